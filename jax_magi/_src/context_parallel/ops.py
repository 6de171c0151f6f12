"""Attention of one rank over all keys that it needs: forward and backward, stage by stage."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jax_magi._src.attention import ops
from jax_magi._src.attention.dq_sum import empty_dq_sum, finished_dq
from jax_magi._src.attention.kernel_call import AttentionConfig
from jax_magi._src.context_parallel.exchange import Transfer, transfers_of
from jax_magi._src.context_parallel.key import DistAttnKey
from jax_magi._src.context_parallel.schedule import (
  Step,
  num_parts_of,
  part_of_rows,
  side_by_side,
  slices_of_keys,
  slices_of_queries,
  steps_of,
)
from jax_magi._src.optim.statistics import reduce_max_logits
from jax_magi._src.transforms.explicit import spec_of, with_auto_axes

# Keys and values of each stage, by its number.
Stages = dict[int, tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class RankConfig:
  """What is static about a call."""

  forward: AttentionConfig
  backward: AttentionConfig
  axis_name: str
  keep_remote_kv: bool = False
  kernel_barrier: bool = False
  reduces_max_logits: bool = False
  remote_grad_dtype: Any = np.float32


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rank_attention(
  config: RankConfig, q: jax.Array, k: jax.Array, v: jax.Array, key: DistAttnKey, sink: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """out, lse and max_logits of a rank's queries.

  Args:
    config: see `RankConfig`.
    q: `[q_local, num_q_heads, head_dim]`.
    k: `[k_local, num_kv_heads, head_dim]`, the rank's own; so v.
    v: `[k_local, num_kv_heads, value_dim]`.
    key: the rank's part of a key: leaves with a leading axis of 1.
    sink: float32 `[num_q_heads]`.

  Returns:
    out `[q_local, num_q_heads, value_dim]` in q's dtype, lse `[q_local, num_q_heads]`, and
    max_logits `[num_q_heads]` of these queries, or of all ranks'.
  """
  return _forward_on_mesh(config, q, k, v, key, sink)[0]


def _forward_on_mesh(
  config: RankConfig, *operands: Any
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Stages | None]:
  """`_forward` for heads that may be split over Explicit axes, and stages only if they are kept."""
  q, k, _, key, _ = operands

  def fun(*operands: Any) -> Any:
    results, stages = _forward(config, *operands)
    return results, stages if config.keep_remote_kv else None

  def out_specs() -> Any:
    (_, q_heads, _), (_, kv_heads, _) = spec_of(q), spec_of(k)
    kept = {stage: (P(None, kv_heads),) * 2 for stage in range(key.spec.overlap_degree + 1)}
    results = P(None, q_heads), P(None, q_heads), P(q_heads)
    return results, kept if config.keep_remote_kv else None

  return with_auto_axes(fun, operands, out_specs)(*operands)


def _forward(
  config: RankConfig, q: jax.Array, k: jax.Array, v: jax.Array, key: DistAttnKey, sink: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Stages]:
  both = _joined(k, v)
  transfers = transfers_of(key, config.axis_name)
  stages = {0: (k, v)}
  if not key.spec.overlap_degree:
    stages[0] = _parted(transfers[0].cast(both), k, v)
  if not key.spec.overlap_degree or key.spec.cp_size == 1:
    transfers = []
  is_whole = bool(transfers) and key.whole_slices is not None
  tables = key.whole_slices if is_whole else key.slices
  steps = steps_of([len(transfer.hops) for transfer in transfers], key.spec.capacities.orders[0])
  last_kernel = [step for step in steps if step.stage >= 0][-1]

  def attend(step: Step, running: Any, slices: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The results of all steps up to this one; `running` are those of the steps before it."""
    operands = (q, *stages[step.stage], slices, sink)
    # Where results of several calls are merged, the last call rounds them.
    out_dtype = None if is_whole or step == last_kernel else np.float32
    return ops.forward(
      config.forward, *(x[None] for x in operands), out_dtype=out_dtype, running=running
    )

  running: Any = None
  parts = [[both] for _ in transfers]  # What each transfer has brought so far.
  kept = {}  # For the backward pass.
  for step in steps:
    slices = tables[0, max(step.stage, 0)]
    if (num_parts := num_parts_of(steps, step.stage)) > 1:
      slices = slices_of_queries(slices, *part_of_rows(q.shape[0], step.part, num_parts))
    moves, sent = _casts(step, transfers, parts)
    parts, running, arrived = side_by_side(
      parts,
      functools.partial(attend, step) if step.stage >= 0 else None,
      running,
      slices,
      moves,
      sent,
      with_barrier=config.kernel_barrier,
    )
    for stage in _arrive(step, transfers, parts, arrived):
      transfer = transfers[stage - 1]
      if is_whole:
        stages[stage] = _parted(transfer.unpacked_whole(parts[:stage]), k, v)
      if not is_whole or config.keep_remote_kv:
        kept[stage] = _parted(transfer.unpacked(parts[stage - 1]), k, v)
      if not is_whole:
        stages[stage], parts[stage - 1] = kept[stage], []
  out, lse, max_logits = (x[0] for x in running)
  if config.reduces_max_logits:
    max_logits = reduce_max_logits(max_logits, axis_name=config.axis_name)
    # XLA has one collective in flight. Unless this one is over before the next begins, it may be
    # the one that a kernel hides, and a transfer of keys not.
    out, _ = lax.optimization_barrier((out, max_logits))
  return (out, lse, max_logits), {0: stages[0], **kept}


def _casts(step: Step, transfers: list[Transfer], parts: list[Any]) -> tuple[list[Any], list[Any]]:
  """The moves of a step that bring keys, and what each sends."""
  moves, sent = [], []
  for stage, hop in step.casts:
    transfer = transfers[stage - 1]
    moves.append(functools.partial(transfer.move, hop, is_exposed=step.stage < 0))
    sent.append(transfer.packed(hop, parts[stage - 1]))
  return moves, sent


def _arrive(
  step: Step, transfers: list[Transfer], parts: list[Any], arrived: list[Any]
) -> list[int]:
  """Adds what a step brought to `parts`, and returns the stages all of whose keys are there."""
  stages = []
  for (stage, hop), rows in zip(step.casts, arrived, strict=False):
    parts[stage - 1].append(rows)
    if hop == len(transfers[stage - 1].hops) - 1:
      stages.append(stage)
  return stages


def _rank_attention_fwd(
  config: RankConfig, q: jax.Array, k: jax.Array, v: jax.Array, key: DistAttnKey, sink: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[Any, ...]]:
  (out, lse, max_logits), kept = _forward_on_mesh(config, q, k, v, key, sink)
  out, lse = map(checkpoint_name, (out, lse), ops.CHECKPOINT_NAMES)
  return (out, lse, max_logits), (q, k, v, key, sink, out, lse, kept)


def _rank_attention_bwd(
  config: RankConfig, residuals: tuple[Any, ...], cotangents: tuple[Any, ...]
) -> tuple[Any, ...]:
  q, k, v, _, sink, *_ = residuals
  operands = (*residuals, *cotangents[:2])

  def out_specs() -> Any:
    return tuple(map(spec_of, (q, k, v, sink)))

  fun = functools.partial(_backward, config)
  dq, dk, dv, dsink = with_auto_axes(fun, operands, out_specs)(*operands)
  return dq, dk, dv, None, dsink


def _backward(
  config: RankConfig,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  key: DistAttnKey,
  sink: jax.Array,
  out: jax.Array,
  lse: jax.Array,
  kept: Stages | None,
  dout: jax.Array,
  dlse: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  # Of all keys, whichever rank they came from.
  row_delta = ops.delta(out, lse, dout, dlse)
  dsink = -jnp.sum(ops.sink_probability(sink[None], lse[None])[0] * row_delta, axis=0)
  # Behind a barrier, or XLA would keep what the forward pass fetched, instead of fetching it anew.
  k, v, dout = lax.optimization_barrier((k, v, dout))
  transfers = transfers_of(key, config.axis_name)
  queries = (q, dout, lse, row_delta)
  dq = empty_dq_sum(q[None], v[None])  # To which kernels add.
  if not key.spec.overlap_degree:
    stage_k, stage_v = kept[0] if kept else _parted(transfers[0].cast(_joined(k, v)), k, v)
    dq, gradient = _stage_backward(config, queries, stage_k, stage_v, dq, key.slices[0, 0])
    dk_dv = transfers[0].reduce(gradient, config.remote_grad_dtype, config.backward.deterministic)
  elif key.spec.cp_size == 1:
    dq, dk_dv = _stage_backward(config, queries, k, v, dq, key.slices[0, 0])
  else:
    dq, dk_dv = _staged_backward(config, queries, k, v, dq, key, transfers, kept)
  dq = finished_dq(config.backward, dq, q[None], v[None], q.dtype)[0]
  dk, dv = _parted(dk_dv, k, v)
  return dq, dk.astype(k.dtype), dv.astype(v.dtype), dsink


def _staged_backward(
  config: RankConfig,
  queries: tuple[jax.Array, ...],
  k: jax.Array,
  v: jax.Array,
  dq: jax.Array,
  key: DistAttnKey,
  transfers: list[Transfer],
  kept: Stages | None,
) -> tuple[jax.Array, jax.Array]:
  """The sum of dq, and dk and dv as one array of rows; the steps of `steps_of` tell the order."""
  both = _joined(k, v)
  stages: dict[int, tuple[Any, Any]] = dict(kept or {0: (k, v)})
  counts = [len(transfer.hops) for transfer in transfers]
  _, order = key.spec.capacities.orders
  steps = steps_of(counts, order, is_fetching=not kept, is_backward=True)
  # By transfer, what it has brought so far; and gradients of that, until they are home.
  parts: list[Any] = [[both] for _ in transfers]
  back: list[Any] = [None for _ in transfers]
  # By stage, gradients of the parts of its keys; and the sum of those of the rank's own keys, which
  # grows as they come, as all that is there waits at each step.
  gradients: dict[int, list[Any]] = {}
  dk_dv = None
  for step in steps:
    kernel, slices = None, key.slices[0, max(step.stage, 0)]
    if step.stage >= 0:
      stage_k, stage_v = stages[step.stage]
      num_parts = num_parts_of(steps, step.stage)
      begin, end = part_of_rows(stage_k.shape[0], step.part, num_parts)
      kernel = functools.partial(
        _stage_backward, config, queries, stage_k[begin:end], stage_v[begin:end]
      )
      if num_parts > 1:
        slices = slices_of_keys(slices, begin, end)
    moves, sent = _casts(step, transfers, parts)
    for stage, hop in step.reduces:
      transfer = transfers[stage - 1]
      if back[stage - 1] is None:
        back[stage - 1] = transfer.parted(jnp.concatenate(gradients.pop(stage)))
      moves.append(functools.partial(transfer.move_back, hop, is_exposed=step.stage < 0))
      sent.append(transfer.packed_back(back[stage - 1], config.remote_grad_dtype))
    (gradients, dk_dv, parts, back), results, arrived = side_by_side(
      (gradients, dk_dv, parts, back),
      kernel,
      dq,
      slices,
      moves,
      sent,
      with_barrier=config.kernel_barrier,
    )
    for stage in _arrive(step, transfers, parts, arrived):
      stages[stage] = _parted(transfers[stage - 1].unpacked(parts[stage - 1]), k, v)
      parts[stage - 1] = []
    for (stage, hop), rows in zip(step.reduces, arrived[len(step.casts) :], strict=True):
      transfer = transfers[stage - 1]
      summed = transfer.added(hop, back[stage - 1], rows, config.backward.deterministic)
      back[stage - 1] = None if hop == 0 else summed
      dk_dv = _sum(dk_dv, summed[0]) if hop == 0 else dk_dv
    if kernel is None:
      dq = results
    else:
      dq, gradient = results
      gradients[step.stage] = [*gradients.get(step.stage, []), gradient]
  return dq, _sum(dk_dv, jnp.concatenate(gradients[0]))


def _sum(total: jax.Array | None, x: jax.Array) -> jax.Array:
  return x if total is None else total + x


def _stage_backward(
  config: RankConfig,
  queries: tuple[jax.Array, ...],
  k: jax.Array,
  v: jax.Array,
  dq: jax.Array,
  slices: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """The sum of dq with the stage's added, and float32 dk and dv as one array of rows."""
  q, dout, lse, row_delta = queries
  operands = (x[None] for x in (q, k, v, dout, lse, row_delta, slices))
  dq, dk, dv = ops.backward(config.backward, *operands, grad_dtype=np.float32, running_dq=dq)
  return dq, _joined(dk[0], dv[0])


rank_attention.defvjp(_rank_attention_fwd, _rank_attention_bwd)


def _joined(k: jax.Array, v: jax.Array) -> jax.Array:
  """One array of rows, so that keys and values travel together."""
  # Of a part of a stage there may be no rows, of which -1 has no size.
  rows = [x.reshape(x.shape[0], x.shape[1] * x.shape[2]) for x in (k, v)]
  return jnp.concatenate(rows, axis=1)


def _parted(rows: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The inverse of `_joined`, for any number of rows."""
  width = k.shape[1] * k.shape[2]
  return (
    rows[:, :width].reshape(-1, *k.shape[1:]),
    rows[:, width:].reshape(-1, *v.shape[1:]),
  )
