"""forward, backward and delta as functions: on parts of the keys, and in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_magi import AttentionMask, merge_attention
from jax_magi._src.attention import ops
from tests.accuracy import check_close
from tests.sizes import in_turns

_IMPLEMENTATIONS = [
  "cpu",
  "blockwise",
  pytest.param("cuda", marks=pytest.mark.gpu),
]
_LENGTH, _HEADS, _KV_HEADS = 300, 4, 2
_SCALE = 0.1


def _inputs(seed=0, head_dim=64, value_dim=64):
  rng = np.random.default_rng(seed)

  def normal(heads, dim):
    return jnp.asarray(rng.standard_normal((1, _LENGTH, heads, dim)), jnp.bfloat16)

  q, k = normal(_HEADS, head_dim), normal(_KV_HEADS, head_dim)
  v, dout = normal(_KV_HEADS, value_dim), normal(_HEADS, value_dim)
  dlse = jnp.asarray(rng.standard_normal((1, _LENGTH, _HEADS)), np.float32)
  return q, k, v, dout, dlse


def _masks():
  """All keys, and the same in three parts: none of the first hundred rows sees the last part."""
  whole = AttentionMask.causal(_LENGTH)
  bounds = [(0, 100), (100, 217), (217, _LENGTH)]
  parts = [(slice(*b), whole.crop(0, _LENGTH, *b).slices[None]) for b in bounds]
  return whole.slices[None], parts


def _no_sink():
  return jnp.full((1, _HEADS), -jnp.inf, np.float32)


def _run(fun, *operands, **options):
  return jax.jit(functools.partial(fun, **options), static_argnums=0)(*operands)


@pytest.mark.parametrize(
  ("dims", "softcap"),
  in_turns([(64, 64), (128, 128), (256, 256), (33, 65)], [0.0, 5.0], every=3),
  ids=str,
)
@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_float32_results_round_to_what_others_get(implementation, dims, softcap):
  q, k, v, dout, dlse = _inputs(0, *dims)
  slices, _ = _masks()
  config = ops.AttentionConfig(_SCALE, softcap, deterministic=True, implementation=implementation)
  operands = (config, q, k, v, slices, _no_sink())
  wide, lse, max_logits = _run(ops.forward, *operands, out_dtype=np.float32)
  narrow, *statistics = _run(ops.forward, *operands)
  assert wide.dtype == np.float32 and narrow.dtype == q.dtype
  np.testing.assert_array_equal(wide.astype(q.dtype), narrow)
  assert (wide != narrow.astype(np.float32)).any()
  jax.tree.map(np.testing.assert_array_equal, statistics, [lse, max_logits])

  delta = ops.delta(narrow, lse, dout, dlse)
  operands = (config, q, k, v, dout, lse, delta, slices)
  wide = _run(ops.backward, *operands, grad_dtype=np.float32)
  narrow = _run(ops.backward, *operands)
  for x, y in zip(wide, narrow, strict=True):
    assert x.dtype == np.float32 and y.dtype == q.dtype
    np.testing.assert_array_equal(x.astype(y.dtype), y)
    assert (x != y.astype(np.float32)).any()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_parts_of_the_keys_make_the_whole(implementation, deterministic):
  """Partial results, merged by lse and summed, are as close to the truth as those of one call."""
  q, k, v, dout, dlse = _inputs()
  slices, parts = _masks()
  config = ops.AttentionConfig(_SCALE, deterministic=deterministic, implementation=implementation)

  def whole(config, dtype):
    operands = [x.astype(dtype) for x in (q, k, v)]
    out, lse, _ = ops.forward(config, *operands, slices, _no_sink())
    delta = ops.delta(out, lse, dout, dlse)
    return out, lse, *ops.backward(config, *operands, dout.astype(dtype), lse, delta, slices)

  def in_parts():
    results = [
      ops.forward(config, q, k[:, rows], v[:, rows], part, _no_sink(), out_dtype=np.float32)
      for rows, part in parts
    ]
    outs, lses, _ = zip(*results, strict=True)
    out, lse = merge_attention(outs, lses)
    delta = ops.delta(out, lse, dout, dlse)
    gradients = [
      ops.backward(config, q, k[:, rows], v[:, rows], dout, lse, delta, part, grad_dtype=np.float32)
      for rows, part in parts
    ]
    dqs, dks, dvs = zip(*gradients, strict=True)
    return out, lse, sum(dqs), jnp.concatenate(dks, axis=1), jnp.concatenate(dvs, axis=1)

  got = jax.jit(in_parts)()
  one_call = jax.jit(functools.partial(whole, config, q.dtype))()
  exact = ops.AttentionConfig(_SCALE, implementation="cpu")
  with jax.default_device(jax.devices("cpu")[0]):
    truth = jax.jit(functools.partial(whole, exact, np.float32))()
  for name, x, y, z in zip(("out", "lse", "dq", "dk", "dv"), got, truth, one_call, strict=True):
    check_close(name, x, y, z, q.dtype)


def test_delta_of_a_row_that_sees_nothing_is_zero():
  lse = jnp.array([[[1.0], [-jnp.inf]]])
  out = dout = jnp.ones((1, 2, 1, 3))
  np.testing.assert_array_equal(ops.delta(out, lse, dout, jnp.full(lse.shape, jnp.nan))[0, 1], 0.0)
  np.testing.assert_array_equal(ops.delta(out, lse, dout, jnp.zeros(lse.shape))[0, 0], 3.0)
