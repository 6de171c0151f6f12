"""Attention of one rank over all keys that it needs: forward and backward, stage by stage."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
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
from jax_magi._src.attention.mask_operand import PassMasks
from jax_magi._src.context_parallel.exchange import Transfer, transfers_of
from jax_magi._src.context_parallel.key import DistAttnKey
from jax_magi._src.context_parallel.rows import RowForm, differentiable, gradients_of
from jax_magi._src.context_parallel.schedule import Step, side_by_side, steps_of
from jax_magi._src.context_parallel.step_masks import backward_masks, forward_masks
from jax_magi._src.optim.statistics import reduce_max_logits
from jax_magi._src.transforms.closure import OpenFunction
from jax_magi._src.transforms.explicit import spec_of, with_auto_axes

# Rows of each stage, by its number.
Stages = dict[int, tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True)
class RankConfig:
  """The static arguments of a call."""

  forward: AttentionConfig
  backward: AttentionConfig
  axis_name: str
  keep_remote_kv: bool = False
  kernel_barrier: bool = False
  reduces_max_logits: bool = False
  remote_grad_dtype: Any = np.float32
  expand: OpenFunction | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rank_attention(
  config: RankConfig, q: Any, rows: Any, constants: Any, key: DistAttnKey, sink: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """out, lse and max_logits of a rank's queries.

  Args:
    config: the static arguments.
    q: `[q_local, num_q_heads, head_dim]`.
    rows: a tuple of arrays `[k_local, ...]`, the rank's own rows: k and v, or arrays from which
      `config.expand` computes k `[n, num_kv_heads, head_dim]` and v `[n, num_kv_heads, value_dim]`.
    constants: a tuple of the further operands of `config.expand`.
    key: the rank's part of a key: leaves with a leading axis of 1.
    sink: float32 `[num_q_heads]`.

  Returns:
    out `[q_local, num_q_heads, value_dim]` in the dtype of q, lse `[q_local, num_q_heads]`, and
    max_logits `[num_q_heads]`, over these queries or over those of all ranks.
  """
  return _forward_on_mesh(config, q, rows, constants, key, sink)[0]


def _forward_on_mesh(
  config: RankConfig, *operands: Any
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Stages | None]:
  """`_forward` for heads on Explicit axes. Returns the rows of stages only if they are kept."""
  q, rows, _, key, _ = operands

  def fun(*operands: Any) -> Any:
    results, stages = _forward(config, *operands)
    return results, stages if config.keep_remote_kv else None

  def out_specs() -> Any:
    _, q_heads, _ = spec_of(q)
    of_rows = tuple(P(None, *spec_of(x)[1:]) for x in rows)
    kept = {stage: of_rows for stage in range(key.spec.overlap_degree + 1)}
    results = P(None, q_heads), P(None, q_heads), P(q_heads)
    return results, kept if config.keep_remote_kv else None

  return with_auto_axes(fun, operands, out_specs)(*operands)


def _forward(
  config: RankConfig, q: Any, rows: Any, constants: Any, key: DistAttnKey, sink: Any
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Stages]:
  form = RowForm.of(rows, config.expand)
  wire = form.joined(rows)
  transfers = transfers_of(key, config.axis_name)
  stages = {0: rows}
  if not key.spec.overlap_degree:
    stages[0] = form.parted(transfers[0].cast(wire))
  if not key.spec.overlap_degree or key.spec.cp_size == 1:
    transfers = []
  is_whole = bool(transfers) and key.whole_slices is not None
  tables = key.whole_slices if is_whole else key.slices
  steps = steps_of([len(transfer.hops) for transfer in transfers], key.spec.capacities.orders[0])
  capacities = key.spec.capacities
  lengths = [stages[0][0].shape[0], *((is_whole and capacities.whole_rows) or capacities.rows)]
  masks = forward_masks(steps, tables[0], lengths, q.shape[0], is_whole=is_whole)
  last_kernel = [step for step in steps if step.stage >= 0][-1]

  expanded: dict[int, Any] = {}

  def attend(step: Step, running: Any, slices: Any) -> Any:
    """The results of all steps up to this one, given the `running` results of earlier steps."""
    running, kv = running
    k, v = kv or stages[step.stage]
    operands = (q[None], k[None], v[None], masks.operand(step, slices), sink[None])
    # If results of several calls are merged, only the last call rounds them.
    out_dtype = None if is_whole or step == last_kernel else np.float32
    return ops.forward(config.forward, *operands, out_dtype=out_dtype, running=running)

  running: Any = None
  parts = [[wire] for _ in transfers]  # The blocks that each transfer has brought so far.
  kept = {}  # For the backward pass.
  for step in steps:
    has_kernel = step in masks.slices
    if config.expand and has_kernel and step.stage not in expanded:
      seen = tables[0, step.stage]  # The rows that any part of the queries sees.
      expanded[step.stage] = form.keys_and_values(stages[step.stage], constants, seen)
    moves, sent = _casts(step, transfers, parts)
    parts, running, arrived = side_by_side(
      parts,
      functools.partial(attend, step) if has_kernel else None,
      (running, expanded.get(step.stage)) if has_kernel else running,
      masks.slices.get(step),
      moves,
      sent,
      with_barrier=config.kernel_barrier,
    )
    for stage in _arrive(step, transfers, parts, arrived):
      transfer = transfers[stage - 1]
      if is_whole:
        stages[stage] = form.parted(transfer.unpacked_whole(parts[:stage]))
      if not is_whole or config.keep_remote_kv:
        kept[stage] = form.parted(transfer.unpacked(parts[stage - 1]))
      if not is_whole:
        stages[stage], parts[stage - 1] = kept[stage], []
  out, lse, max_logits = (x[0] for x in running)
  if config.reduces_max_logits:
    max_logits = reduce_max_logits(max_logits, axis_name=config.axis_name)
    # By default, XLA keeps one collective in flight. Without the barrier, this one might overlap
    # with a kernel in the place of a transfer of keys, which would then be exposed.
    out, _ = lax.optimization_barrier((out, max_logits))
  return (out, lse, max_logits), {0: stages[0], **kept}


def _casts(step: Step, transfers: list[Transfer], parts: list[Any]) -> tuple[list[Any], list[Any]]:
  """The moves of a step that bring keys, and the rows that each sends."""
  moves, sent = [], []
  for stage, hop in step.casts:
    transfer = transfers[stage - 1]
    moves.append(functools.partial(transfer.move, hop, is_exposed=step.stage < 0))
    sent.append(transfer.packed(hop, parts[stage - 1]))
  return moves, sent


def _arrive(
  step: Step, transfers: list[Transfer], parts: list[Any], arrived: list[Any]
) -> list[int]:
  """Adds the rows that a step brought to `parts`; returns the stages whose keys are complete."""
  stages = []
  for (stage, hop), rows in zip(step.casts, arrived, strict=False):
    parts[stage - 1].append(rows)
    if hop == len(transfers[stage - 1].hops) - 1:
      stages.append(stage)
  return stages


def _rank_attention_fwd(
  config: RankConfig, q: Any, rows: Any, constants: Any, key: DistAttnKey, sink: Any
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[Any, ...]]:
  (out, lse, max_logits), kept = _forward_on_mesh(config, q, rows, constants, key, sink)
  out, lse = map(checkpoint_name, (out, lse), config.forward.checkpoint_names)
  return (out, lse, max_logits), (q, rows, constants, key, sink, out, lse, kept)


def _rank_attention_bwd(
  config: RankConfig, residuals: tuple[Any, ...], cotangents: tuple[Any, ...]
) -> tuple[Any, ...]:
  q, rows, constants, _, sink, *_ = residuals
  operands = (*residuals, *cotangents[:2])

  def out_specs() -> Any:
    # Only arrays with a gradient have a spec.
    of_arrays = (tuple(map(spec_of, differentiable(x))) for x in (rows, constants))
    return spec_of(q), *of_arrays, spec_of(sink)

  fun = functools.partial(_backward, config)
  dq, drows, dconstants, dsink = with_auto_axes(fun, operands, out_specs)(*operands)
  drows, dconstants = gradients_of(rows, drows), gradients_of(constants, dconstants)
  return dq, drows, dconstants, None, dsink


def _backward(
  config: RankConfig,
  q: Any,
  rows: Any,
  constants: Any,
  key: DistAttnKey,
  sink: Any,
  out: Any,
  lse: Any,
  kept: Stages | None,
  dout: Any,
  dlse: Any,
) -> tuple[Any, Any, Any, Any]:
  # `out` and `lse` are those over all keys, so delta is, too.
  row_delta = ops.delta(out, lse, dout, dlse)
  dsink = -jnp.sum(ops.sink_probability(sink[None], lse[None])[0] * row_delta, axis=0)
  # Without the barrier, XLA would keep the exchanged rows of the forward pass in memory.
  rows, constants, dout = lax.optimization_barrier((rows, constants, dout))
  form = RowForm.of(rows, config.expand)
  transfers = transfers_of(key, config.axis_name)
  queries = (q, dout, lse, row_delta)
  v_like = form.value_like(rows)
  stage_of = functools.partial(_StageBackward, config, form, queries, constants)
  # The sum to which each kernel adds.
  dq = empty_dq_sum(q[None], v_like, config.backward.implementation)
  if not key.spec.overlap_degree:
    stage = kept[0] if kept else form.parted(transfers[0].cast(form.joined(rows)))
    dq, gradient, dconstants = _only_stage(stage_of, stage, key, dq)
    gradient = form.joined_gradients([gradient])
    drows = transfers[0].reduce(gradient, config.remote_grad_dtype, config.backward.deterministic)
  elif key.spec.cp_size == 1:
    dq, gradient, dconstants = _only_stage(stage_of, rows, key, dq)
    drows = form.joined_gradients([gradient])
  else:
    dq, drows, dconstants = _staged_backward(config, form, stage_of, rows, dq, key, transfers, kept)
  dq = finished_dq(config.backward, dq, q[None], v_like, q.dtype)[0]
  return dq, form.parted_gradients(drows), dconstants, dsink


def _only_stage(
  stage_of: Callable[..., _StageBackward], rows: Any, key: DistAttnKey, dq: Any
) -> tuple[Any, Any, Any]:
  """The sum of dq, and the gradients of rows and of constants, if one call has all keys."""
  masks = PassMasks({0: (key.slices[0, 0], rows[0].shape[0])})
  call = stage_of(masks, 0, rows)
  return call.done(call.kernel((dq, call.kv), masks.slices[0]), None)


def _staged_backward(
  config: RankConfig,
  form: RowForm,
  stage_of: Callable[..., _StageBackward],
  rows: Any,
  dq: Any,
  key: DistAttnKey,
  transfers: list[Transfer],
  kept: Stages | None,
) -> tuple[Any, Any, Any]:
  """The sum of dq, and the gradients of the rank's own rows and of constants.

  `steps_of` determines the order.
  """
  wire = form.joined(rows)
  stages: dict[int, Any] = dict(kept or {0: rows})
  counts = [len(transfer.hops) for transfer in transfers]
  _, order = key.spec.capacities.orders
  steps = steps_of(counts, order, is_fetching=not kept, is_backward=True)
  lengths = [rows[0].shape[0], *key.spec.capacities.rows]
  masks, keys = backward_masks(steps, key.slices[0], lengths)
  # For each transfer, the blocks that it has brought so far, and later their gradients, until these
  # have returned to their owners.
  parts: list[Any] = [[wire] for _ in transfers]
  back: list[Any] = [None for _ in transfers]
  # For each stage, the gradients of the parts of its rows, which are joined where they are needed.
  # And the sum of the gradients of the rank's own rows: it grows as they arrive, because each step
  # waits for all values that exist.
  gradients: dict[int, list[tuple[Any, ...]]] = {}
  own = dconstants = None
  for step in steps:
    call = None
    if step in masks.slices:
      call = stage_of(masks, step, tuple(x[keys[step]] for x in stages[step.stage]))
    moves, sent = _casts(step, transfers, parts)
    for stage, hop in step.reduces:
      transfer = transfers[stage - 1]
      if back[stage - 1] is None:
        back[stage - 1] = transfer.parted(form.joined_gradients(gradients.pop(stage)))
      how = {"deterministic": config.backward.deterministic, "is_exposed": step.stage < 0}
      moves.append(functools.partial(transfer.move_back, hop, **how))
      sent.append(transfer.packed_back(back[stage - 1], config.remote_grad_dtype))
    done = (gradients, own, dconstants, parts, back)
    (gradients, own, dconstants, parts, back), results, arrived = side_by_side(
      done,
      call.kernel if call else None,
      (dq, call.kv) if call else dq,
      masks.slices.get(step),
      moves,
      sent,
      with_barrier=config.kernel_barrier,
    )
    for stage in _arrive(step, transfers, parts, arrived):
      stages[stage] = form.parted(transfers[stage - 1].unpacked(parts[stage - 1]))
      parts[stage - 1] = []
    for (stage, hop), rows in zip(step.reduces, arrived[len(step.casts) :], strict=True):
      # Gradients of own rows are added to those of earlier transfers, in one array.
      transfer, received = transfers[stage - 1], (own, *back[stage - 1][1:])
      own, *others = transfer.added(hop, received, rows)
      back[stage - 1] = (None, *others) if hop else None
    if call is None:
      dq = results
    else:
      dq, gradient, dconstants = call.done(results, dconstants)
      gradients[step.stage] = [*gradients.get(step.stage, []), gradient]
  return dq, _sum(own, form.joined_gradients(gradients[0])), dconstants


def _sum(total: jax.Array | None, x: jax.Array) -> jax.Array:
  return x if total is None else total + x


class _StageBackward:
  """The backward pass over a stage's rows, or a part of them.

  `expand` and its derivative run outside the step of the kernel. Inside, XLA would let the matrix
  products of `expand` hide a transfer, instead of the kernel.

  Attributes:
    kv: keys and values, if they are not the rows themselves.
  """

  def __init__(
    self,
    config: RankConfig,
    form: RowForm,
    queries: tuple[Any, ...],
    constants: Any,
    masks: PassMasks,
    name: Hashable,
    rows: Any,
  ):
    """`name` is the name of the call in `masks`."""
    self._config, self._queries = config, queries
    self._mask = functools.partial(masks.operand, name)
    made, self._pull_back = form.differentiated(rows, constants, masks.slices[name])
    self._rows, self.kv = made, made if config.expand else None

  def kernel(self, running: Any, slices: Any) -> tuple[Any, Any]:
    """Adds dq of this call to the sum of dq, and computes dk and dv."""
    dq, kv = running
    arrays = (*self._queries, *(kv or self._rows))
    q, dout, lse, row_delta, k, v = (x[None] for x in arrays)
    operands = (q, k, v, dout, lse, row_delta, self._mask(slices))
    dq, dk, dv = ops.backward(
      self._config.backward, *operands, grad_dtype=np.float32, running_dq=dq
    )
    return dq, (dk[0], dv[0])

  def done(self, results: Any, dconstants: Any) -> tuple[Any, Any, Any]:
    """The sum of dq, the gradients of rows, and the sum of the gradients of constants."""
    dq, gradients = results
    rows, constants = self._pull_back(*gradients)
    if dconstants is not None:
      constants = tuple(map(jnp.add, dconstants, constants))
    return dq, rows, constants


rank_attention.defvjp(_rank_attention_fwd, _rank_attention_bwd)
