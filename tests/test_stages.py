"""Calls over parts of the keys that continue with each other's results, on a CPU."""

import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_magi import AttentionMask
from jax_magi._src.attention import ops
from jax_magi._src.attention.dq_sum import empty_dq_sum, finished_dq
from tests.accuracy import DTYPES, make_inputs
from tests.arrays import assert_trees_close, normals
from tests.compilation import quick_jit
from tests.random_masks import random_mask
from tests.sizes import in_turns
from tests.stages import (
  backward_stages,
  check_query_stages,
  check_stages,
  check_untouched,
  forward_stages,
  run_stages,
  stage_slices,
  untouched_results,
)

_IMPLEMENTATIONS = ["cpu", "blockwise"]
# Few cases, because each is compiled: unsorted, with an empty stage, with stages of few keys.
_BOUNDS = [
  ((0, 97), (97, 150)),
  ((140, 150), (0, 1), (1, 140)),
  ((64, 128), (20, 20), (128, 150), (0, 20), (20, 64)),
]


@pytest.mark.parametrize(
  ("implementation", "dtype", "bounds"),
  in_turns(_IMPLEMENTATIONS, ["f32", "bf16", "f16"], _BOUNDS),
  ids=str,
)
@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**31), has_sink=st.booleans())
def test_random_mask(implementation, dtype, bounds, seed, has_sink):
  """In many stages, some queries see nothing, and in some stages, all queries see nothing."""
  rng = np.random.default_rng(seed)
  mask = random_mask(rng, 130, 150)
  inputs = make_inputs(rng, DTYPES[dtype], 130, 150, 4, 2, 32, 24, num_sinks=0)
  if not has_sink:  # An operand of -inf instead of none, so that both use one compiled program.
    inputs.sink[...] = -np.inf
  check_stages(inputs, mask, bounds, implementation)


@pytest.mark.parametrize(
  ("implementation", "dtype"), in_turns(_IMPLEMENTATIONS, ["bf16", "f16", "f32"]), ids=str
)
@pytest.mark.parametrize("sink", [None, 0], ids=["no sink", "sink"])
def test_queries_in_one_call_each(implementation, dtype, sink):
  for seed in range(4):
    rng = np.random.default_rng(seed)
    inputs = make_inputs(rng, DTYPES[dtype], 130, 150, 4, 2, 32, 24, sink)
    bounds = ((70, 130), (0, 3), (5, 70))
    mask = random_mask(rng, 130, 150).crop(0, 130, 0, 150)
    check_query_stages(inputs, _without_queries(mask, 3, 5), bounds, implementation)


def _without_queries(mask, begin, end):
  parts = [mask.slices.copy() for _ in range(2)]
  parts[0][:, :2] = np.minimum(parts[0][:, :2], begin)
  parts[1][:, :2] = np.maximum(parts[1][:, :2], end)
  return AttentionMask(np.concatenate(parts), mask.q_len, mask.k_len)


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_softcap_and_odd_dims(implementation):
  inputs = make_inputs(np.random.default_rng(0), np.float32, 130, 150, 6, 2, 33, 65, 0)
  check_stages(inputs, AttentionMask.causal(130, 150), _BOUNDS[1], implementation, softcap=2.0)


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
@pytest.mark.parametrize("logit_scale", [0.0, 1e4])
def test_extreme_logits(implementation, logit_scale):
  shape = (40, 150, 2, 2, 16, 16)
  inputs = make_inputs(np.random.default_rng(0), np.float32, *shape, logit_scale=logit_scale)
  slices = stage_slices(AttentionMask.causal(40, 150), _BOUNDS[0])
  config = ops.AttentionConfig(1.0, implementation=implementation)
  ours = run_stages(config, _BOUNDS[0], inputs.operands, inputs.cotangents, slices)
  assert all(np.isfinite(x).all() for x in ours.values())


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
@pytest.mark.parametrize("shown", [(0, 0), (0, 64), (130, 131), (70, 200)])
def test_rows_that_see_nothing_keep_every_bit(implementation, shown):
  config = ops.AttentionConfig(0.1, implementation=implementation)
  results = untouched_results(config, np.float32, (16, 24), 200, shown)
  check_untouched(*results, shown)


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_no_keys_at_all(implementation):
  config = ops.AttentionConfig(0.1, implementation=implementation)
  results = untouched_results(config, np.float32, (16, 24), 130, (0, 130), k_len=0)
  check_untouched(*results, (0, 0))


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_nan_of_any_stage_reaches_max_logits(implementation):
  inputs = make_inputs(np.random.default_rng(0), np.float32, 40, 150, 2, 2, 16, 16)
  inputs.k[3, 1] = np.nan
  slices = stage_slices(AttentionMask.full(40, 150), _BOUNDS[0])
  config = ops.AttentionConfig(1.0, implementation=implementation)
  for bounds, tables in ((_BOUNDS[0], slices), (_BOUNDS[0][::-1], slices[::-1])):
    ours = run_stages(config, bounds, inputs.operands, inputs.cotangents, tables)
    np.testing.assert_array_equal(np.isnan(ours["max_logits"]), [False, True])
    assert np.isnan(ours["out"][:, 1]).all() and np.isfinite(ours["out"][:, 0]).all()


def _batch(seed=0):
  shapes = [(2, 130, 4, 16), (2, 150, 2, 16), (2, 150, 2, 24), (2, 130, 4, 24)]
  q, k, v, dout = map(jnp.asarray, normals(*shapes, seed=seed))
  return q, k, v, dout, jnp.asarray(normals((2, 4), seed=seed + 1)[0])


def _all_stages(config, q, k, v, dout, sink):
  slices, bounds = stage_slices(AttentionMask.causal(130, 150), _BOUNDS[1]), _BOUNDS[1]
  out, lse, max_logits = forward_stages(config, q, k, v, sink, slices, bounds)
  delta = ops.delta(out, lse, dout, jnp.zeros_like(lse))
  return (
    out,
    lse,
    max_logits,
    *backward_stages(config, q, k, v, dout, lse, delta, slices, bounds),
  )


@functools.cache
def _compiled_stages(implementation):
  """Several tests compare with it."""
  config = ops.AttentionConfig(0.3, implementation=implementation)
  return quick_jit(functools.partial(_all_stages, config))


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_vmap_is_a_batch(implementation):
  fun = functools.partial(_all_stages, ops.AttentionConfig(0.3, implementation=implementation))
  operands = _batch()
  expected = _compiled_stages(implementation)(*operands)
  mapped = quick_jit(jax.vmap(fun))(*(x[:, None] for x in operands))
  assert_trees_close([x[:, 0] for x in mapped], list(expected))


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
@pytest.mark.parametrize("spec", [("x", None), (None, "x")], ids=["batch", "heads"])
def test_shardings_are_kept(implementation, spec):
  devices = jax.devices("cpu")[:2]
  if len(devices) < 2:
    pytest.skip("needs two devices")
  mesh = Mesh(np.array(devices), "x")
  fun = _compiled_stages(implementation)
  operands = _batch()
  expected = fun(*operands)

  def put(x):
    dims = (spec[0], None, spec[1], None) if x.ndim == 4 else spec
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*dims)))

  placed = [put(x) for x in operands]
  assert_trees_close(list(fun(*placed)), list(expected))
  if implementation == "cpu":
    text = fun.lower(*placed).compile().as_text()
    assert "all-gather" not in text


def test_kernels_write_to_the_memory_of_running_results():
  """There is no copy of out, lse or the sum of dq."""
  fun = functools.partial(_all_stages, ops.AttentionConfig(0.3, implementation="cpu"))
  text = jax.jit(fun).lower(*_batch()).compile().as_text()
  calls = [
    line for line in text.splitlines() if re.search(r"custom_call_target=\S+_(for|back)", line)
  ]
  assert len(calls) == 6
  aliased = [line for line in calls if "output_to_operand_aliasing" in line]
  assert len(aliased) == 5  # All but the first forward call.
  words = empty_dq_sum(*(jnp.zeros(x.shape, x.dtype) for x in _batch()[:3:2])).shape[-1]
  large = rf"f32\[2,130,4,24\]|f32\[2,130,4\]|f32\[2,4,{words}\]"
  # Except copies of zeros, which XLA makes by broadcasting.
  pattern = rf"= ({large})\S* copy\((?!%broadcast)"
  assert not [line for line in text.splitlines() if re.search(pattern, line)]


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_results_that_are_used_again_are_not_overwritten(implementation):
  q, k, v, dout, sink = _batch()
  config = ops.AttentionConfig(0.3, implementation=implementation)
  slices = np.array([[(0, 130, 0, 150, -(2**30), 2**30)]], np.int32)
  alone = jax.jit(lambda: ops.forward(config, q, k, v, slices, sink, out_dtype=np.float32))()

  @jax.jit
  def run():
    first = ops.forward(config, q, k, v, slices, sink, out_dtype=np.float32)
    second = ops.forward(config, q, 2 * k, v, slices, sink, running=first)
    delta = ops.delta(second[0], second[1], dout, jnp.zeros_like(second[1]))
    operands = (q, k, v, dout, second[1], delta, slices)
    once, *_ = ops.backward(config, *operands, running_dq=empty_dq_sum(q, v))
    twice, *_ = ops.backward(config, *operands, running_dq=once)
    return first, [finished_dq(config, x, q, v, q.dtype) for x in (once, twice)]

  first, (once, twice) = run()
  assert_trees_close(list(first), list(alone))
  assert_trees_close(twice, 2 * once)


def test_terms_are_not_taken_together_with_running_results():
  q, k, v, _, sink = _batch()
  config = ops.AttentionConfig(0.3)
  slices = np.zeros((1, 1, 6), np.int32)
  running = ops.forward(config, q, k, v, slices, sink, out_dtype=np.float32)
  with pytest.raises(AssertionError, match="not taken together"):
    ops.forward(config, q, k, v, slices, sink, alibi_slopes=sink, running=running)
