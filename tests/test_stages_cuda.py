"""Calls over parts of the keys that continue with each other's results, on a GPU."""

import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jax_magi import AttentionMask
from jax_magi._src.attention import ops
from jax_magi._src.attention.dq_sum import empty_dq_sum, finished_dq
from tests.accuracy import DTYPES, make_inputs
from tests.arrays import assert_same_bits, normals
from tests.needs import forward_in_clusters
from tests.random_masks import random_mask
from tests.stages import (
  backward_stages,
  check_query_stages,
  check_stages,
  check_untouched,
  forward_stages,
  random_bounds,
  stage_slices,
  untouched_results,
)

pytestmark = pytest.mark.gpu

_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256), (40, 24), (33, 65)]
_BOUNDS = [
  ((0, 200), (200, 330)),
  ((300, 330), (0, 1), (1, 300)),
  ((128, 256), (20, 20), (256, 330), (0, 20), (20, 128)),
]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("dims", _DIMS, ids=str)
@pytest.mark.parametrize("bounds", _BOUNDS, ids=len)
@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**31), sink=st.booleans())
def test_random_mask(dtype, dims, bounds, seed, sink):
  """In many stages, some queries see nothing, and in some stages, all queries see nothing."""
  rng = np.random.default_rng(seed)
  mask = random_mask(rng, 270, 330)
  inputs = make_inputs(rng, DTYPES[dtype], 270, 330, 4, 2, *dims, 0 if sink else None)
  check_stages(inputs, mask, bounds, "cuda", deterministic=bool(seed % 2))


@pytest.mark.parametrize("heads", [(6, 6), (6, 1), (12, 4)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seed", range(6))
def test_random_bounds(heads, head_dim, seed):
  rng = np.random.default_rng(seed)
  q_len, k_len = int(rng.integers(1, 700)), int(rng.integers(1, 900))
  mask = random_mask(rng, q_len, k_len)
  inputs = make_inputs(rng, DTYPES["bf16"], q_len, k_len, *heads, head_dim, head_dim, 0)
  check_stages(inputs, mask, random_bounds(rng, k_len), "cuda")


@pytest.mark.parametrize("dims", _DIMS, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("sink", [None, 0], ids=["no sink", "sink"])
def test_queries_in_one_call_each(dims, dtype, sink):
  for seed in range(4):
    rng = np.random.default_rng(seed)
    inputs = make_inputs(rng, DTYPES[dtype], 700, 330, 6, 2, *dims, sink)
    bounds = ((300, 700), (0, 128), (128, 131), (131, 300))
    softcap = 2.0 if seed == 0 else 0.0
    check_query_stages(inputs, random_mask(rng, 700, 330), bounds, "cuda", softcap=softcap)


@pytest.mark.parametrize("sm_margin", [0, 124])
def test_queries_in_one_call_each_in_clusters_and_parts(sm_margin):
  with forward_in_clusters():
    inputs = make_inputs(np.random.default_rng(0), DTYPES["bf16"], 320, 3001, 6, 1, 128, 128, 0)
    mask = AttentionMask.causal(320, 3001)
    bounds = ((130, 320), (0, 100), (100, 130))
    check_query_stages(inputs, mask, bounds, "cuda", sm_margin=sm_margin)


@pytest.mark.parametrize("dims", _DIMS, ids=str)
def test_softcap(dims):
  inputs = make_inputs(np.random.default_rng(0), DTYPES["bf16"], 270, 330, 6, 2, *dims, 0)
  check_stages(inputs, AttentionMask.causal(270, 330), _BOUNDS[1], "cuda", softcap=2.0)


@pytest.mark.parametrize("dims", _DIMS[:4], ids=str)
@pytest.mark.parametrize("sm_margin", [0, 127])
def test_tiles_cut_along_their_keys(dims, sm_margin):
  """The parts of a tile are merged with the running results once."""
  mask = AttentionMask.causal(300, 4000)
  inputs = make_inputs(np.random.default_rng(0), DTYPES["bf16"], 300, 4000, 6, 2, *dims, 0)
  bounds = ((2000, 4000), (0, 2000))
  check_stages(inputs, mask, bounds, "cuda", sm_margin=sm_margin)


@pytest.mark.parametrize("dims", _DIMS[1:4], ids=str)
@pytest.mark.parametrize("sm_margin", [0, 120, 131])
def test_uneven_tiles_of_many_keys(dims, sm_margin):
  """The keys of all heads exceed the L2 cache, but a tile takes as long as a section of heads."""
  q_len, k_len = 300, 17100
  ranges = [[0, 130], [130, q_len]], [[0, k_len], [16000, 16100]]
  mask = AttentionMask.from_ranges(*ranges)
  inputs = make_inputs(np.random.default_rng(0), DTYPES["bf16"], q_len, k_len, 8, 4, *dims, 0)
  check_stages(inputs, mask, ((0, 17000), (17000, k_len)), "cuda", sm_margin=sm_margin)


@pytest.mark.parametrize("num_q_heads", [2, 6, 10])
@pytest.mark.parametrize("sm_margin", [0, 124, 130])
def test_clusters(num_q_heads, sm_margin):
  with forward_in_clusters():
    mask = AttentionMask.causal(320, 3001)
    shape = (320, 3001, num_q_heads, 1, 128, 128)
    inputs = make_inputs(np.random.default_rng(0), DTYPES["bf16"], *shape, 0)
    check_stages(inputs, mask, ((1500, 3001), (0, 1500)), "cuda", sm_margin=sm_margin)


@pytest.mark.parametrize("q_len", [1, 5, 33])
@pytest.mark.parametrize("group", [2, 3, 8, 71])
def test_packed_heads(q_len, group):
  inputs = make_inputs(
    np.random.default_rng(0), DTYPES["bf16"], q_len, 300, 2 * group, 2, 128, 128, 0
  )
  check_stages(inputs, AttentionMask.causal(q_len, 300), ((100, 300), (0, 100)), "cuda")


@pytest.mark.parametrize("dims", _DIMS, ids=str)
@pytest.mark.parametrize("shown", [(0, 0), (0, 192), (384, 385), (250, 800)])
def test_rows_that_see_nothing_keep_every_bit(dims, shown):
  """In tiles that are fully masked, and in tiles of which some rows see keys."""
  config = ops.AttentionConfig(0.1, implementation="cuda")
  results = untouched_results(config, jnp.bfloat16, dims, 800, shown)
  check_untouched(*results, shown)


def test_no_keys_at_all():
  config = ops.AttentionConfig(0.1, implementation="cuda")
  results = untouched_results(config, jnp.bfloat16, (128, 128), 300, (0, 300), k_len=0)
  check_untouched(*results, (0, 0))


def _operands(length, heads, head_dim):
  shapes = [(1, length, num_heads, head_dim) for num_heads in (*heads, heads[1], heads[0])]
  return [jnp.asarray(x) for x in normals(*shapes, dtype=jnp.bfloat16)]


_LENGTH = 2504
_MASKS = {
  "causal": AttentionMask.causal(_LENGTH),
  "documents": AttentionMask.from_cu_seqlens([0, 131, 702, 1697, 1901, _LENGTH], causal=True),
  "window": AttentionMask.sliding_window(_LENGTH, left=511),
}


@pytest.mark.parametrize("name", _MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_runs_are_equal_bit_for_bit(head_dim, name):
  q, k, v, dout = _operands(_LENGTH, (6, 2), head_dim)
  bounds = ((1600, _LENGTH), (0, 700), (700, 1600))
  slices = stage_slices(_MASKS[name], bounds)
  sink = jnp.zeros((1, 6), np.float32)

  def run(sm_margin):
    config = ops.AttentionConfig(
      head_dim**-0.5, deterministic=True, sm_margin=sm_margin, implementation="cuda"
    )

    @jax.jit
    def stages(q, k, v, dout, slices):
      # All use the forward pass of one margin, because the margin may cut tiles along their keys.
      forward = ops.AttentionConfig(head_dim**-0.5, implementation="cuda")
      out, lse, _ = forward_stages(forward, q, k, v, sink, slices, bounds)
      delta = ops.delta(out, lse, dout, jnp.zeros_like(lse))
      return out, lse, *backward_stages(config, q, k, v, dout, lse, delta, slices, bounds)

    return stages(q, k, v, dout, slices)

  first = run(0)
  for sm_margin in (0, 0, 1, 90, 131):
    assert_same_bits(run(sm_margin), first)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_stage_gives_the_bits_of_one_call(head_dim):
  q, k, v, dout = _operands(1000, (6, 2), head_dim)
  slices = jnp.asarray(AttentionMask.causal(1000).slices)[None]
  sink = jnp.zeros((1, 6), np.float32)
  config = ops.AttentionConfig(head_dim**-0.5, deterministic=True, implementation="cuda")

  @jax.jit
  def run(q, k, v, dout, slices):
    out, lse, _ = ops.forward(config, q, k, v, slices, sink)
    operands = (q, k, v, dout, lse, ops.delta(out, lse, dout, jnp.zeros_like(lse)), slices)
    one_call = ops.backward(config, *operands)
    dq, *others = ops.backward(config, *operands, running_dq=empty_dq_sum(q, v))
    return one_call, (finished_dq(config, dq, q, v, q.dtype), *others)

  one_call, stage = run(q, k, v, dout, slices)
  assert_same_bits(one_call, stage)


@pytest.mark.parametrize("num_rows", [None, 3])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lists_made_together_give_the_bits_of_those_made_one_by_one(head_dim, num_rows):
  """One launch for each pass, of a batch of masks too."""
  bounds = ((300, 1000), (0, 20), (20, 300))
  masks = [AttentionMask.from_cu_seqlens([0, end, 1000], causal=True) for end in (100, 310, 900)]
  tables = zip(*(stage_slices(mask, bounds) for mask in masks), strict=True)
  tables = [jnp.stack(rows) for rows in tables]
  slices = [x[0] for x in tables] if num_rows is None else tables
  operands = _operands(1000, (6, 2), head_dim)
  sink = jnp.zeros((1, 6), np.float32)
  config = ops.AttentionConfig(head_dim**-0.5, deterministic=True, implementation="cuda")

  def run(slices, together):
    def row(slices):
      q, k, v, dout = operands
      calls = functools.partial(forward_stages, together=together)
      out, lse, _ = calls(config, q, k, v, sink, slices, bounds)
      delta = ops.delta(out, lse, dout, jnp.zeros_like(lse))
      calls = functools.partial(backward_stages, together=together)
      return out, lse, *calls(config, q, k, v, dout, lse, delta, slices, bounds)

    return row(slices) if num_rows is None else jax.vmap(row)(slices)

  found = []
  for together, counts in ((True, (2, 0)), (False, (0, 6))):
    program = jax.jit(functools.partial(run, together=together)).lower(slices).compile()
    text = program.as_text()
    targets = [f'custom_call_target="jax_magi_attention_tile_list{s}"' for s in ("s", "")]
    assert tuple(map(text.count, targets)) == counts
    found.append(program(slices))
  assert_same_bits(*found)


def test_a_batch_of_masks():
  """With slices for each row, and parts of dk and dv."""
  q, k, v, dout = (jnp.concatenate([x, 2 * x, -x]) for x in _operands(300, (8, 1), 64))
  tables = jnp.stack([jnp.asarray(AttentionMask.causal(n).slices) for n in (300, 7, 201)])
  sink = jnp.zeros((3, 8), np.float32)

  def run(implementation, dtype):
    config = ops.AttentionConfig(0.1, implementation=implementation)
    operands = [x.astype(dtype) for x in (q, k, v)]
    other = (operands[0], -operands[1], operands[2])
    running = ops.forward(config, *operands, tables, sink, out_dtype=np.float32)
    out, lse, max_logits = ops.forward(config, *other, tables, sink, running=running)
    delta = ops.delta(out, lse, dout, jnp.zeros_like(lse))
    dq = empty_dq_sum(*operands[::2])
    for q_, k_, v_ in (operands, other):
      call = (q_, k_, v_, dout.astype(dtype), lse, delta, tables)
      dq, dk, dv = ops.backward(config, *call, running_dq=dq, grad_dtype=np.float32)
    return out, lse, max_logits, finished_dq(config, dq, q_, v_, np.float32), dk, dv

  got = jax.jit(functools.partial(run, "cuda", jnp.bfloat16))()
  expected = jax.jit(functools.partial(run, "blockwise", np.float32))()
  for x, y in zip(got, expected, strict=True):
    x, y = (np.asarray(z, np.float32) for z in (x, y))
    np.testing.assert_array_equal(np.isinf(x), np.isinf(y))
    x, y = (np.where(np.isinf(z), 0.0, z) for z in (x, y))
    assert np.linalg.norm(x - y) < 1e-2 * np.linalg.norm(y)


def test_kernels_write_to_the_memory_of_running_results():
  """XLA for GPUs makes no copy of them."""
  q, k, v, dout = _operands(512, (4, 2), 128)
  bounds = ((0, 200), (200, 512))
  slices = stage_slices(AttentionMask.causal(512), bounds)
  sink = jnp.zeros((1, 4), np.float32)
  config = ops.AttentionConfig(0.1, implementation="cuda")

  @jax.jit
  def run(q, k, v, dout, slices):
    out, lse, _ = forward_stages(config, q, k, v, sink, slices, bounds)
    delta = ops.delta(out, lse, dout, jnp.zeros_like(lse))
    return out, backward_stages(config, q, k, v, dout, lse, delta, slices, bounds)

  text = run.lower(q, k, v, dout, slices).compile().as_text()
  calls = [line for line in text.splitlines() if "custom-call(" in line and "attention_" in line]
  assert sum("output_to_operand_aliasing" in line for line in calls) == 3
  # Except copies of zeros, which XLA may make by broadcasting.
  pattern = r"= f32\[1,(512,4,128|4,65536)\]\S* copy(-start)?\((?!%broadcast)"
  assert not [line for line in text.splitlines() if re.search(pattern, line)]
