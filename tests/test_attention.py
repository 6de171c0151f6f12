"""Every named case, forward and backward, against the float64 reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask
from jax_magi._src.masks.slices import grouped_by_keys
from tests.accuracy import DTYPES, check_attention, check_close, expected_results, make_inputs
from tests.cases import CASES
from tests.sizes import in_turns, name_of


@pytest.mark.parametrize(("case", "dtype"), in_turns(CASES, DTYPES), ids=name_of)
def test_case_on_cpu(case, dtype):
  check_attention(case.make_inputs(dtype), case.mask, "cpu", **case.options)


@pytest.mark.parametrize("case", in_turns(CASES, every=4), ids=name_of)
def test_case_blockwise(case):
  check_attention(case.make_inputs("f32"), case.mask, "blockwise", **case.options)


@pytest.mark.parametrize("implementation", ["cpu", "blockwise"])
@pytest.mark.parametrize("block_size", [16, 48])
def test_known_mask_that_the_backward_pass_cuts_by_keys(block_size, implementation):
  mask = AttentionMask.block_causal(block_size, 170)
  assert grouped_by_keys(np.asarray(mask.slices)) is not mask.slices
  inputs = make_inputs(np.random.default_rng(0), np.float32, 170, 170, 4, 2, 64, 64)
  check_attention(inputs, mask, implementation, is_mask_known=True)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_16_bit_blockwise(dtype):
  case = next(case for case in CASES if case.name == "several_k_ranges-gqa2-sink")
  check_attention(case.make_inputs(dtype), case.mask, "blockwise", **case.options)


def test_blockwise_over_several_blocks():
  mask = AttentionMask.from_cu_seqlens([0, 300, 1100, 1101, 1250], causal=True)
  inputs = make_inputs(np.random.default_rng(0), np.float32, 1250, 1250, 2, 1, 16, 8)
  check_attention(inputs, mask, "blockwise")


@pytest.mark.parametrize("implementation", ["cpu", "blockwise"])
def test_huge_logits_give_no_nan(implementation):
  rng = np.random.default_rng(0)
  inputs = make_inputs(rng, np.float32, 100, 100, 2, 2, 64, 64)
  mask = AttentionMask.causal(100)
  options = {"softmax_scale": 1e4 / 20}  # Logits of about +-1e4.

  def loss(q, k, v):
    out, meta = jax_magi.attention(q, k, v, mask, implementation=implementation, **options)
    return jnp.sum(out**2) + jnp.sum(meta.lse), (out, meta.lse)

  gradients = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
  grads, (out, lse) = gradients(inputs.q, inputs.k, inputs.v)
  for x in (*grads, out, lse):
    assert np.isfinite(x).all()
  truth, _ = expected_results(inputs, mask, **options)
  # A logit of 1e4 has an ulp of 1e-3 in float32, so the softmax cannot agree to 1e-5; lse can,
  # relative to its size.
  check_close("lse", lse, truth["lse"], truth["lse"], np.float32)


# Plain, with payload bits, and CUDA's own.
_NANS = [0x7FC00000, 0x7FC00001, 0x7FFFFFFF]


@pytest.mark.parametrize("row", [3, 66], ids=["first_tile", "last_tile"])
@pytest.mark.parametrize("bits", _NANS, ids=hex)
@pytest.mark.parametrize("implementation", ["cpu", "blockwise"])
def test_nan_logit_is_visible_in_max_logits(implementation, bits, row):
  q, k = np.ones((70, 2, 8), np.float32), np.ones((70, 2, 8), np.float32)
  q.view(np.uint32)[row, 1, 3] = bits
  mask = AttentionMask.causal(70)
  out, meta = jax_magi.attention(
    q, k, k, mask, return_max_logits=True, implementation=implementation
  )
  assert np.isnan(meta.max_logits[1])
  np.testing.assert_allclose(meta.max_logits[0], 8**0.5, rtol=1e-6)
  # No other row is affected.
  is_nan = np.isnan(out).any(axis=-1)
  assert is_nan[row, 1] and is_nan.sum() == 1


@pytest.mark.parametrize("implementation", ["cpu", "blockwise"])
def test_nan_logit_gives_nan_gradients(implementation):
  q, k = np.ones((70, 2, 8), np.float32), np.ones((70, 2, 8), np.float32)
  q[66, 1, 3] = np.nan

  def loss(v):
    mask = AttentionMask.causal(70)
    return jnp.sum(jax_magi.attention(q, k, v, mask, implementation=implementation)[0])

  dv = jax.grad(loss)(k)
  assert np.isnan(dv[:67, 1]).all() and np.isfinite(dv[:, 0]).all()


def test_x64_changes_nothing():
  inputs = make_inputs(np.random.default_rng(7), np.float32, 40, 40, 2, 2, 16, 16)
  mask = AttentionMask.causal(40)

  @jax.jit
  @jax.grad
  def gradient(q):
    return jnp.sum(jax_magi.attention(q, inputs.k, inputs.v, mask)[0])

  expected = gradient(inputs.q)
  with jax.enable_x64(True):
    got = gradient(inputs.q)
  assert got.dtype == np.float32
  np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


def test_zero_scale_is_a_mean():
  inputs = make_inputs(np.random.default_rng(8), np.float32, 10, 10, 2, 2, 16, 16)
  mask = AttentionMask.full(10)
  out, meta = jax_magi.attention(
    inputs.q, inputs.k, inputs.v, mask, softmax_scale=0.0, return_max_logits=True
  )
  np.testing.assert_allclose(out[3], inputs.v.mean(axis=0), rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(meta.max_logits, 0.0)


def test_hidden_nan_does_not_leak():
  q, k = np.ones((70, 2, 8), np.float32), np.ones((90, 2, 8), np.float32)
  k[75:] = np.nan
  mask = AttentionMask.from_ranges([[0, 70]], [[0, 75]], q_len=70, k_len=90)

  def loss(q, k, v):
    out, meta = jax_magi.attention(q, k, v, mask)
    return jnp.sum(out) + jnp.sum(meta.lse)

  value, grads = jax.value_and_grad(loss, (0, 1, 2))(q, k, k)
  assert np.isfinite(value)
  for grad in grads:
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("implementation", ["cpu", "blockwise"])
def test_large_sink_does_not_overflow(implementation):
  inputs = make_inputs(np.random.default_rng(1), np.float32, 30, 30, 2, 2, 16, 16)
  sink = np.array([500.0, -500.0], np.float32)
  mask = AttentionMask.causal(30)
  out, meta = jax_magi.attention(
    inputs.q, inputs.k, inputs.v, mask, sink=sink, implementation=implementation
  )
  np.testing.assert_array_equal(out[:, 0], 0.0)
  np.testing.assert_array_equal(meta.lse[:, 0], 500.0)
  plain, _ = jax_magi.attention(inputs.q, inputs.k, inputs.v, mask, implementation=implementation)
  np.testing.assert_allclose(out[:, 1], plain[:, 1], rtol=1e-6)


def test_sink_of_minus_infinity_is_no_sink():
  inputs = make_inputs(np.random.default_rng(2), np.float32, 30, 30, 2, 2, 16, 16)
  mask = AttentionMask.causal(20).crop(0, 30, 0, 30)

  def loss(q, sink):
    out, meta = jax_magi.attention(q, inputs.k, inputs.v, mask, sink=sink)
    return jnp.sum(out) + jnp.sum(jnp.where(meta.lse == -jnp.inf, 0.0, meta.lse))

  no_sink = jax.jit(jax.grad(loss))(inputs.q, None)
  for shape in ((2,), (3, 2)):
    gradients = jax.jit(jax.grad(loss, (0, 1)))
    dq, dsink = gradients(inputs.q, np.full(shape, -np.inf, np.float32))
    np.testing.assert_array_equal(dq, no_sink)
    np.testing.assert_array_equal(dsink, 0.0)


def test_max_logits_has_no_gradient():
  inputs = make_inputs(np.random.default_rng(3), np.float32, 30, 30, 2, 2, 16, 16)

  def loss(q):
    mask = AttentionMask.causal(30)
    _, meta = jax_magi.attention(q, inputs.k, inputs.v, mask, return_max_logits=True)
    return jnp.sum(meta.max_logits)

  np.testing.assert_array_equal(jax.grad(loss)(inputs.q), 0.0)


def test_max_logits_only_when_asked_for():
  inputs = make_inputs(np.random.default_rng(3), np.float32, 8, 8, 1, 1, 8, 8)
  _, meta = jax_magi.attention(inputs.q, inputs.k, inputs.v, AttentionMask.causal(8))
  assert meta.max_logits is None


def test_gradients_are_equal_bit_for_bit():
  # There is one kv head, so threads share its key tiles.
  inputs = make_inputs(np.random.default_rng(4), np.float32, 700, 700, 2, 1, 32, 32)

  def gradients():
    def loss(q, k, v):
      mask = AttentionMask.causal(700)
      return jnp.sum(jax_magi.attention(q, k, v, mask, deterministic=True)[0] ** 2)

    return jax.jit(jax.grad(loss, (0, 1, 2)))(inputs.q, inputs.k, inputs.v)

  first = gradients()
  for _ in range(5):
    for a, b in zip(first, gradients(), strict=True):
      np.testing.assert_array_equal(a, b)


def test_transposed_inputs():
  inputs = make_inputs(np.random.default_rng(5), np.float32, 70, 70, 4, 2, 16, 16)
  mask = AttentionMask.causal(70)
  by_head = [np.ascontiguousarray(x.transpose(1, 0, 2)) for x in (inputs.q, inputs.k, inputs.v)]

  def loss(q, k, v):
    return jnp.sum(jnp.sin(jax_magi.attention(q, k, v, mask)[0]))

  def loss_by_head(q, k, v):
    return loss(*(x.transpose(1, 0, 2) for x in (q, k, v)))

  expected = jax.jit(jax.grad(loss, (0, 1, 2)))(inputs.q, inputs.k, inputs.v)
  actual = jax.jit(jax.grad(loss_by_head, (0, 1, 2)))(*by_head)
  for a, b in zip(actual, expected, strict=True):
    np.testing.assert_array_equal(a.transpose(1, 0, 2), b)


def test_flex_flash_attn_func_is_attention_over_ranges():
  inputs = make_inputs(np.random.default_rng(6), np.float32, 40, 50, 4, 2, 16, 16)
  q_ranges, k_ranges = np.array([[0, 20], [20, 40]]), np.array([[0, 30], [10, 50]])
  types = np.array([1, 3])
  out, meta = jax.jit(jax_magi.flex_flash_attn_func)(
    inputs.q, inputs.k, inputs.v, q_ranges, k_ranges, types
  )
  mask = AttentionMask.from_ranges(q_ranges, k_ranges, types)
  expected, expected_meta = jax_magi.attention(inputs.q, inputs.k, inputs.v, mask)
  np.testing.assert_array_equal(out, expected)
  np.testing.assert_array_equal(meta.lse, expected_meta.lse)
