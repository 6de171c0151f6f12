"""Attention in stages: calls over parts of the keys that go on with each other's results."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi import AttentionMask
from jax_magi._src.attention import ops
from jax_magi._src.attention.dq_sum import empty_dq_sum, finished_dq
from jax_magi._src.attention.mask_operand import PassMasks
from tests.accuracy import check_results, named_results
from tests.arrays import assert_same_bits
from tests.compilation import quick_jit


def stage_slices(mask, bounds):
  """The mask over the keys of each stage, numbered from 0: `[num_slices, 6]`."""
  num_slices = max(len(mask.slices), 1)
  crops = (mask.crop(0, mask.q_len, begin, end) for begin, end in bounds)
  return [np.asarray(crop.pad(num_slices).slices) for crop in crops]


def _masks(slices, bounds, *, together, keeping_rows=()):
  """The mask of each stage. Tile lists are made together or one by one.

  `keeping_rows` has the numbers of forward stages that leave rows without keys to other stages.
  """
  if not together:
    return [table[None] for table in slices]
  calls = zip(slices, (end - begin for begin, end in bounds), strict=True)
  masks = PassMasks(dict(enumerate(calls)), keeping_rows)
  return [masks.operand(number, table) for number, table in enumerate(slices)]


def forward_stages(config, q, k, v, sink, slices, bounds, *, together=True):
  """out, lse and max_logits of a batch of 1 after all stages. The last stage rounds."""
  running = None
  keeping_rows = range(1, len(bounds) - 1)
  masks = _masks(slices, bounds, together=together, keeping_rows=keeping_rows)
  for number, ((begin, end), mask) in enumerate(zip(bounds, masks, strict=True), 1):
    operands = (q, k[:, begin:end], v[:, begin:end], mask, sink)
    out_dtype = np.float32 if number < len(bounds) else None
    running = ops.forward(config, *operands, out_dtype=out_dtype, running=running)
  return running


def backward_stages(config, q, k, v, dout, lse, delta, slices, bounds, *, together=True):
  """dq of all stages, and dk and dv of each, in the dtype of q."""
  dq = empty_dq_sum(q, v)
  gradients = {}
  masks = _masks(slices, bounds, together=together)
  for (begin, end), mask in zip(bounds, masks, strict=True):
    operands = (q, k[:, begin:end], v[:, begin:end], dout, lse, delta, mask)
    dq, *gradients[begin, end] = ops.backward(
      config, *operands, grad_dtype=np.float32, running_dq=dq
    )
  dk, dv = (
    jnp.concatenate(parts, axis=1).astype(q.dtype)
    for parts in zip(*(gradients[b] for b in sorted(gradients)), strict=True)
  )
  return finished_dq(config, dq, q, v, q.dtype), dk, dv


@functools.partial(quick_jit, static_argnums=(0, 1))
def run_stages(config, bounds, operands, cotangents, slices):
  """All results, by name, of operands `[length, heads, dim]` without a batch."""
  q, k, v, sink = operands
  dout, dlse = (x[None] for x in cotangents)
  q, k, v = (x[None] for x in (q, k, v))
  row_sink = jnp.full((1, q.shape[2]), -jnp.inf, np.float32) if sink is None else sink[None]
  out, lse, max_logits = forward_stages(config, q, k, v, row_sink, slices, bounds)
  delta = ops.delta(out, lse, dout, dlse)
  gradients = backward_stages(config, q, k, v, dout, lse, delta, slices, bounds)
  dsink = -jnp.sum(ops.sink_probability(row_sink, lse) * delta, axis=1)
  results = (out, lse, max_logits, *gradients, dsink)
  out, lse, max_logits, *gradients = (x[0] for x in results)
  return named_results(out, lse, max_logits, gradients if sink is not None else gradients[:3])


def check_stages(inputs, mask, bounds, implementation, *, softcap=0.0, **options):
  """Runs a mask in stages of keys `bounds`, which cover all, and holds every result to the rule."""
  scale = inputs.q.shape[-1] ** -0.5
  config = ops.AttentionConfig(scale, softcap, implementation=implementation, **options)
  slices = stage_slices(mask, bounds)
  ours = run_stages(config, tuple(bounds), inputs.operands, inputs.cotangents, slices)
  check_results(ours, inputs, mask, **({"softcap": softcap} if softcap else {}))
  return ours


@functools.partial(quick_jit, static_argnums=0)
def _query_stage(config, q, k, v, slices, sink, running):
  return ops.forward(config, q[None], k[None], v[None], slices[None], sink, running=running)


@functools.partial(quick_jit, static_argnums=0)
def _query_stages(config, q, k, v, tables, sink):
  """All of these calls. Lists lack the query tiles of other calls."""
  bounds = [(0, k.shape[0])] * len(tables)
  masks = _masks(tables, bounds, together=True, keeping_rows=range(len(tables)))
  running = None
  for mask in masks:
    running = ops.forward(config, q[None], k[None], v[None], mask, sink, running=running)
  return running


def check_query_stages(inputs, mask, bounds, implementation, *, softcap=0.0, **options):
  """Runs a mask in calls over queries `bounds` each, none of which rounds its results again.

  Each call must leave all other queries as they are, to the last bit. Then they run in a single
  program, whose tile lists are made together.
  """
  scale = inputs.q.shape[-1] ** -0.5
  config = ops.AttentionConfig(scale, softcap, implementation=implementation, **options)
  q, k, v, sink = inputs.operands
  sink = jnp.full((1, q.shape[1]), -jnp.inf, np.float32) if sink is None else sink[None]

  running, tables = None, []
  for begin, end in bounds:
    slices = np.asarray(mask.slices).copy()
    slices[:, :2] = np.clip(slices[:, :2], begin, end)
    tables.append(slices)
    before, running = running, _query_stage(config, q, k, v, slices, sink, running)
    if before is not None:
      for x, y in zip(before[:2], running[:2], strict=True):
        assert_same_bits(*(jnp.delete(z, np.arange(begin, end), axis=1) for z in (x, y)))
  # The first call fills the rows that no call computes: those of a slice without keys.
  unseen = np.flatnonzero(~mask.to_dense().any(axis=1))
  marker = [unseen[0], unseen[-1] + 1, 0, 0, 0, 0] if len(unseen) else [0] * 6
  first = np.append(tables[0], np.array([marker], np.int32), axis=0)
  # Freed again, this is likely to be the memory of the results: rows that nobody fills are NaN.
  jax.block_until_ready([jnp.full_like(running[0], np.nan) for _ in range(3)])
  at_once = _query_stages(config, q, k, v, [first, *tables[1:]], sink)
  for found in (running, at_once):
    results = dict(zip(("out", "lse", "max_logits"), (x[0] for x in found), strict=True))
    check_results(results, inputs, mask, **({"softcap": softcap} if softcap else {}))


def mask_of_weights(columns, padding=0, num_turns=1):
  """Tiles of 128 keys and fewer that meet 0 to 20 blocks of `columns` queries, in no order.

  Some are of a diagonal, and of some no query sees all keys. There are `num_turns` tiles of each
  number of blocks. `padding` keys behind them are hidden.
  """
  slices, k_len = [], 0
  for num_blocks in num_turns * (2, 17, 5, 9, 0, 20, 15, 16, 4, 8, 1):
    q_end = columns * num_blocks - 3
    if num_blocks > 0:
      keys = (k_len + num_blocks % 2, k_len + 100)
      slices.append((0, q_end, *keys, -(2**30), 2**30 if num_blocks != 20 else k_len + 60))
    k_len += 128
  q_len = 20 * columns
  return AttentionMask(np.array(slices, np.int32), q_len, k_len + 37 + padding)


def random_bounds(rng, k_len):
  """Begin and end of the keys of 2 to 4 stages, in any order; some may be empty."""
  cuts = np.sort(rng.integers(0, k_len + 1, rng.integers(1, 4)))
  ends = [0, *map(int, cuts), k_len]
  bounds = list(itertools.pairwise(ends))
  return tuple(bounds[i] for i in rng.permutation(len(bounds)))


def untouched_results(config, dtype, dims, q_len, shown, k_len=100, heads=(4, 2)):
  """Random running results before and after a stage that shows keys to queries `shown` alone.

  Returns:
    Three triples of out, lse and max_logits; the last one is after it was the last stage.
  """
  rng = np.random.default_rng(0)

  def normal(*shape, dtype=dtype):
    return jnp.asarray(rng.standard_normal(shape), dtype)

  q = normal(1, q_len, heads[0], dims[0])
  k, v = (normal(1, k_len, heads[1], dim) for dim in dims)
  lse = normal(1, q_len, heads[0], dtype=np.float32)
  lse = lse.at[0, ::7].set(-jnp.inf)
  out = normal(1, q_len, heads[0], dims[1], dtype=np.float32)
  out = jnp.where(lse[..., None] == -jnp.inf, 0.0, out)
  max_logits = jnp.full((1, heads[0]), 3e4, np.float32)
  slices = np.array([[(*shown, 0, k_len, -(2**30), 2**30)]], np.int32)
  sink = jnp.full((1, heads[0]), 7.0, np.float32)  # It has no part in this stage.
  running = (out, lse, max_logits)

  @jax.jit
  def run(running):
    call = functools.partial(ops.forward, config, q, k, v, slices, sink, running=running)
    return call(out_dtype=np.float32), call()

  return running, *run(running)


def check_untouched(before, after, rounded, shown):
  """Rows outside of `shown` keep every bit of their results, and those inside do not.

  A last stage rounds them all.
  """
  assert_same_bits(rounded, (after[0].astype(rounded[0].dtype), *after[1:]))
  is_kept = np.ones(before[0].shape[1], bool)
  is_kept[slice(*shown)] = False
  for x, y in zip(before[:2], after[:2], strict=True):
    assert_same_bits(x[:, is_kept], y[:, is_kept])
    assert (np.asarray(x)[:, ~is_kept] != np.asarray(y)[:, ~is_kept]).any() == (~is_kept).any()
  assert_same_bits(before[2], after[2])
  assert np.isfinite(after[0]).all()
