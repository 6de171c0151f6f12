"""Bias and ALiBi slopes, forward and backward, against the float64 reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask
from tests.accuracy import DTYPES, Inputs, check_attention, make_inputs
from tests.arrays import assert_trees_close, normals
from tests.bias_cases import BIAS_CASES, many_slices
from tests.sizes import in_turns, name_of

IMPLEMENTATIONS = ["cpu", "blockwise"]
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


# Every second case: all shapes of a bias, float32 ones, and slopes alone are among them.
@pytest.mark.parametrize("case", in_turns([*BIAS_CASES[1:], BIAS_CASES[0]], every=2), ids=name_of)
def test_case_on_cpu(case):
  dtype = list(DTYPES)[BIAS_CASES.index(case) % len(DTYPES)]
  check_attention(case.make_inputs(dtype), case.case.mask, "cpu", **case.case.options)


@pytest.mark.parametrize("case", in_turns(BIAS_CASES[::3], every=4), ids=name_of)
def test_case_blockwise(case):
  check_attention(case.make_inputs("f32"), case.case.mask, "blockwise", **case.case.options)


@pytest.mark.parametrize("bias", in_turns(["h1k", "hqk", "1qk"], every=3))
def test_blockwise_over_several_blocks(bias):
  mask = AttentionMask.from_cu_seqlens([0, 300, 1100, 1101, 1250], causal=True)
  inputs = make_inputs(
    np.random.default_rng(0), np.float32, 1250, 1250, 2, 1, 16, 8, bias=bias, has_alibi=True
  )
  check_attention(inputs, mask, "blockwise")


# The code that keeps this gradient exact is in ops.py, which all paths share, and the plain path
# takes long for many slices.
@pytest.mark.parametrize(
  "implementation", ["cpu", pytest.param("blockwise", marks=pytest.mark.long)]
)
def test_slopes_of_queries_far_from_their_keys(implementation):
  """It is close to that of float32 arrays. A rounded `out` would make it wrong by 13 to 70%."""
  inputs, mask = many_slices((2, 1), (64, 64), None)
  check_attention(inputs, mask, implementation)

  def gradient(dtype):
    q, k, v, dout = (jnp.asarray(x, dtype) for x in (*inputs.operands[:3], inputs.dout))
    attend = functools.partial(jax_magi.attention, q, k, v, mask, implementation=implementation)
    slopes = jnp.asarray(inputs.alibi_slopes)
    return jax.vjp(lambda slopes: attend(alibi_slopes=slopes)[0], slopes)[1](dout)[0]

  expected = gradient(jnp.float32)
  np.testing.assert_allclose(gradient(jnp.bfloat16), expected, atol=0.1 * np.abs(expected).max())


# --- what a bias means ---


def _arrays(q_len=70, k_len=90, num_q_heads=4, num_kv_heads=2, dim=16, lead=()):
  q, k = (*lead, q_len, num_q_heads, dim), (*lead, k_len, num_kv_heads, dim)
  return normals(q, k, k)


def _value_and_grads(fun, *operands):
  """out, lse and max_logits of an attention, and gradients of all operands."""

  @jax.jit
  def run(*operands):
    def loss(*operands):
      out, meta = fun(*operands)
      lse = jnp.where(meta.lse == -jnp.inf, 0.0, meta.lse)
      return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse)), (out, meta)

    return jax.grad(loss, tuple(range(len(operands))), has_aux=True)(*operands)

  return run(*operands)


@implementations
def test_a_bias_of_minus_infinity_is_a_mask(implementation):
  q, k, v = _arrays()
  shown = AttentionMask.from_ranges(
    [[3, 40], [40, 66]], [[0, 50], [20, 90]], [1, 0], q_len=70, k_len=90
  )
  bias = np.where(shown.to_dense(), 0.0, -np.inf).astype(np.float32)
  attend = functools.partial(
    jax_magi.attention, implementation=implementation, softcap=4.0, return_max_logits=True
  )
  full = AttentionMask.full(70, 90)
  got = _value_and_grads(lambda *x: attend(*x, full, bias=bias), q, k, v)
  expected = _value_and_grads(lambda *x: attend(*x, shown), q, k, v)
  assert_trees_close(got, expected)


@implementations
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_rows_and_heads_whose_bias_hides_all_have_no_nan(implementation, softcap):
  q, k, v = _arrays()
  bias = normals((4, 70, 90))[0]
  bias[:, 5] = bias[2] = -np.inf

  def fun(q, k, v, bias):
    options = {"softcap": softcap, "implementation": implementation, "return_max_logits": True}
    return jax_magi.attention(q, k, v, AttentionMask.causal(70, 90), bias=bias, **options)

  grads, (out, meta) = _value_and_grads(fun, q, k, v, bias)
  for x in (*grads, out):
    assert np.isfinite(x).all()
  assert not out[5].any() and not out[:, 2].any() and not grads[0][5].any()
  assert not grads[3][:, 5].any() and not grads[3][2].any()
  assert (meta.lse[5] == -np.inf).all() and (meta.lse[:, 2] == -np.inf).all()
  assert meta.max_logits[2] == -np.inf and np.isfinite(np.delete(meta.max_logits, 2)).all()


@implementations
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_other_biases_that_are_not_finite_are_seen(implementation, value):
  q, k, v = _arrays()
  bias = np.zeros((1, 70, 90), np.float32)
  bias[0, 66, 3] = value
  mask = AttentionMask.causal(70, 90)
  out, meta = jax_magi.attention(
    q, k, v, mask, bias=bias, implementation=implementation, return_max_logits=True
  )
  is_nan = np.isnan(out).any(axis=(1, 2))
  assert is_nan[66] and is_nan.sum() == 1
  assert not np.isfinite(meta.max_logits).any()


@implementations
def test_a_bias_that_the_mask_hides_is_not_used(implementation):
  q, k, v = _arrays()
  mask = AttentionMask.sliding_window(70, 90, left=11, right=3)
  bias = normals((4, 70, 90))[0]
  poisoned = np.where(mask.to_dense(), bias, np.nan)

  def fun(q, k, v, bias):
    return jax_magi.attention(
      q, k, v, mask, bias=bias, softcap=5.0, implementation=implementation, return_max_logits=True
    )

  expected = _value_and_grads(fun, q, k, v, bias)
  assert_trees_close(_value_and_grads(fun, q, k, v, poisoned), expected, rtol=0, atol=0)
  assert not np.asarray(expected[0][3])[:, ~np.asarray(mask.to_dense())].any()


@implementations
def test_slopes_are_a_bias(implementation):
  """The bias is over positions in q and k, regardless of slices."""
  q, k, v = _arrays()
  mask = AttentionMask.from_cu_seqlens([0, 20, 70], [0, 50, 90], causal=True)
  slopes = np.array([0.5, 0.0, -0.25, 0.125], np.float32)
  distances = (np.arange(90)[None, :] - np.arange(70)[:, None]).astype(np.float32)
  attend = functools.partial(
    jax_magi.attention, implementation=implementation, return_max_logits=True
  )
  got, results = _value_and_grads(
    lambda *x: attend(*x[:3], mask, alibi_slopes=x[3]), q, k, v, slopes
  )
  (*grads, dbias), expected = _value_and_grads(
    lambda *x: attend(*x[:3], mask, bias=x[3]), q, k, v, slopes[:, None, None] * distances
  )
  assert_trees_close(results, expected, rtol=1e-4, atol=1e-5)
  dslopes = np.sum(np.asarray(dbias, np.float64) * distances, axis=(1, 2))
  assert_trees_close(got, (*grads, dslopes), rtol=2e-4, atol=2e-4)


@implementations
@pytest.mark.parametrize("scale", [-0.4, 0.0])
def test_a_scale_that_is_not_positive_leaves_the_bias_as_it_is(implementation, scale):
  inputs = make_inputs(
    np.random.default_rng(0), np.float32, 70, 90, 4, 2, 16, 16, bias="h1k", has_alibi=True
  )
  check_attention(inputs, AttentionMask.causal(70, 90), implementation, softmax_scale=scale)


@implementations
def test_flex_flash_attn_func_passes_them_on(implementation):
  q, k, v = _arrays()
  terms = {"bias": normals((70, 90))[0], "alibi_slopes": np.ones(4, np.float32)}
  options = {"implementation": implementation, **terms}
  got = jax_magi.flex_flash_attn_func(q, k, v, [[0, 70]], [[0, 90]], [1], **options)
  expected = jax_magi.attention(q, k, v, AttentionMask.causal(70, 90), **options)
  assert_trees_close(got, expected, rtol=0, atol=0)


def test_the_cpus_gradients_are_equal_bit_for_bit():
  """Heads and batch rows share a bias, and several threads sum its gradient."""
  q, k, v = _arrays(300, 300, lead=(3,))
  bias, slopes = normals((1, 1, 300, 300), (4,))

  @jax.jit
  def gradients(bias, slopes):
    def loss(bias, slopes):
      out = jax_magi.dot_product_attention(q, k, v, bias, alibi_slopes=slopes, implementation="cpu")
      return jnp.sum(jnp.sin(out))

    return jax.grad(loss, (0, 1))(bias, slopes)

  first = gradients(bias, slopes)
  for _ in range(5):
    assert_trees_close(gradients(bias, slopes), first, rtol=0, atol=0)


def test_the_cpus_gradient_of_slopes_is_exact_where_its_terms_cancel():
  """All pairs weigh the same, and the signs of v make the sum over each row's distances zero.

  Sums in float32 would leave an error of 1e-3.
  """
  q_len, block, num_blocks = 100, 96, 16
  k_len = block * num_blocks  # No power of two: the weights are rounded, all of them equally.
  signs = [(-1.0) ** bin(i).count("1") for i in range(num_blocks)]  # The Thue-Morse sequence.
  inputs = Inputs(
    q=np.zeros((q_len, 1, 1), np.float32),
    k=np.ones((k_len, 1, 1), np.float32),
    v=np.repeat(signs, block).astype(np.float32).reshape(k_len, 1, 1),
    sink=None,
    dout=np.ones((q_len, 1, 1), np.float32),
    dlse=np.zeros((q_len, 1), np.float32),
    alibi_slopes=np.zeros(1, np.float32),
  )
  check_attention(inputs, AttentionMask.full(q_len, k_len), "cpu")


# --- errors ---


@pytest.mark.parametrize(
  ("options", "match"),
  [
    ({"bias": np.zeros((4, 70, 89), np.float32)}, r"bias must be broadcastable to .*\[4, 70, 90\]"),
    ({"bias": np.zeros((2, 70, 90), np.float32)}, "bias must be broadcastable"),
    ({"bias": np.zeros((1, 4, 70, 90), np.float32)}, "bias must be broadcastable"),
    ({"bias": np.zeros((70, 90), np.int32)}, "bias must be float32, bfloat16 or float16, got int"),
    ({"bias": np.zeros((70, 90), bool)}, "a boolean mask is no bias"),
    ({"alibi_slopes": np.zeros((4, 1), np.float32)}, r"alibi_slopes must be \[4\]"),
    ({"alibi_slopes": np.zeros(2, np.float32)}, r"alibi_slopes must be \[4\], got \[2\]"),
    ({"alibi_slopes": np.zeros(4, np.int32)}, "alibi_slopes must be float32"),
  ],
)
def test_bad_argument_is_named(options, match):
  with pytest.raises(ValueError, match=match):
    jax_magi.attention(*_arrays(), AttentionMask.causal(70, 90), **options)
