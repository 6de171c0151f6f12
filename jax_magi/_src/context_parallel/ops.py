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

from jax_magi._src.attention import ops
from jax_magi._src.attention.dq_sum import empty_dq_sum, finished_dq
from jax_magi._src.context_parallel.exchange import transfers_of
from jax_magi._src.context_parallel.key import DistAttnKey
from jax_magi._src.context_parallel.schedule import (
  backward_steps,
  part_of_rows,
  side_by_side,
)
from jax_magi._src.optim.statistics import reduce_max_logits


@dataclasses.dataclass(frozen=True)
class RankConfig:
  """What is static about a call."""

  forward: ops.AttentionConfig
  backward: ops.AttentionConfig
  axis_name: str
  keep_remote_kv: bool = False
  kernel_barrier: bool = False
  reduces_max_logits: bool = False


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rank_attention(config: RankConfig, q, k, v, key: DistAttnKey, sink):
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
  return _forward(config, q, k, v, key, sink)[0]


def _forward(config: RankConfig, q, k, v, key, sink):
  both = _joined(k, v)
  transfers = transfers_of(key, config.axis_name)
  stages = [(k, v)]
  if not key.spec.overlap_degree:
    stages = [_parted(transfer.cast(both), k, v) for transfer in transfers]
  if not key.spec.overlap_degree or key.spec.cp_size == 1:
    transfers = []

  def attend(number, running, slices):
    """The results of all stages up to this one; `running` are those of the stages before it."""
    operands = (q, *stages[number], slices, sink)
    # Results of several stages are rounded once, when they are one.
    out_dtype = np.float32 if transfers else None
    return ops.forward(
      config.forward, *(x[None] for x in operands), out_dtype=out_dtype, running=running
    )

  running: Any = None
  for number, transfer in enumerate([*transfers, None]):
    sent = transfer.packed(both) if transfer else None
    move = transfer.move if transfer else None
    # The kernel alone takes them from here on, and may write to their memory.
    running, slices, sent = lax.optimization_barrier((running, key.slices[0, number], sent))
    kernel = functools.partial(attend, number, running)
    _, running, arrived = side_by_side(
      (), kernel, slices, move, sent, with_barrier=config.kernel_barrier
    )
    if transfer:
      stages.append(_parted(transfer.unpacked(both, arrived), k, v))
  out, lse, max_logits = (x[0] for x in running)
  out = out.astype(q.dtype)
  if config.reduces_max_logits:
    max_logits = reduce_max_logits(max_logits, axis_name=config.axis_name)
    # XLA has one collective in flight. Unless this one is over before the next begins, it may be
    # the one that a kernel hides, and a transfer of keys not.
    out, _ = lax.optimization_barrier((out, max_logits))
  return (out, lse, max_logits), stages


def _rank_attention_fwd(config: RankConfig, q, k, v, key, sink):
  (out, lse, max_logits), stages = _forward(config, q, k, v, key, sink)
  out, lse = map(checkpoint_name, (out, lse), ops.CHECKPOINT_NAMES)
  kept = stages if config.keep_remote_kv else None
  return (out, lse, max_logits), (q, k, v, key, sink, out, lse, kept)


def _rank_attention_bwd(config: RankConfig, residuals, cotangents):
  q, k, v, key, sink, out, lse, kept = residuals
  dout, dlse, _ = cotangents
  # Of all keys, whichever rank they came from.
  row_delta = ops.delta(out, lse, dout, dlse)
  dsink = -jnp.sum(ops.sink_probability(sink[None], lse[None])[0] * row_delta, axis=0)
  # Behind a barrier, or XLA would keep what the forward pass fetched, instead of fetching it anew.
  k, v, dout = lax.optimization_barrier((k, v, dout))
  transfers = transfers_of(key, config.axis_name)
  queries = (q, dout, lse, row_delta)
  if not key.spec.overlap_degree:
    ((stage_k, stage_v),) = kept or [_parted(transfers[0].cast(_joined(k, v)), k, v)]
    dq = empty_dq_sum(q[None], v[None])
    dq, gradient = _stage_backward(config, queries, stage_k, stage_v, dq, key.slices[0, 0])
    dk_dv = transfers[0].reduce(gradient, config.backward.deterministic)
  elif key.spec.cp_size == 1:
    dq = empty_dq_sum(q[None], v[None])
    dq, dk_dv = _stage_backward(config, queries, k, v, dq, key.slices[0, 0])
  else:
    dq, dk_dv = _staged_backward(config, queries, k, v, key, transfers, kept)
  dq = finished_dq(config.backward, dq, q[None], v[None], q.dtype)[0]
  dk, dv = _parted(dk_dv, k, v)
  return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, dsink


def _staged_backward(config: RankConfig, queries, k, v, key, transfers, kept):
  """The sum of dq, and dk and dv as one array of rows; `BackwardStep`s tell the order."""
  both = _joined(k, v)
  stages: dict[int, tuple[Any, Any]] = dict(enumerate(kept or [(k, v)]))
  gradients: dict[int, Any] = {}  # By remote stage, of its keys and values, until they go home.
  # Summed as they come, as all that is there waits at each step: of the rank's own rows.
  dk_dv: Any = None
  dq = empty_dq_sum(queries[0][None], v[None])  # To which kernels add.
  for step in backward_steps(key.spec.overlap_degree, is_fetching=kept is None):
    rows = part_of_rows(queries[0].shape[0], step.part, step.num_parts)
    slices = _slices_in_rows(key.slices[0, step.stage], *rows)
    move = sent = own = None
    if step.cast is not None:
      move, sent = transfers[step.cast - 1].move, transfers[step.cast - 1].packed(both)
    if step.reduce is not None:
      move = transfers[step.reduce - 1].move_back
      own, sent = transfers[step.reduce - 1].packed_back(gradients.pop(step.reduce))
    # The kernel alone takes dq from here on, and may write to its memory.
    dq, slices, sent = lax.optimization_barrier((dq, slices, sent))
    kernel = functools.partial(_stage_backward, config, queries, *stages[step.stage], dq)
    (gradients, dk_dv), (dq, gradient), arrived = side_by_side(
      (gradients, dk_dv), kernel, slices, move, sent, with_barrier=config.kernel_barrier
    )
    if step.cast is not None:
      stages[step.cast] = _parted(transfers[step.cast - 1].unpacked(both, arrived), k, v)
    if step.reduce is not None:
      deterministic = config.backward.deterministic
      home = transfers[step.reduce - 1].unpacked_back(own, arrived, deterministic)
      dk_dv = _sum(dk_dv, home)
    if step.stage == 0:
      dk_dv = _sum(dk_dv, gradient)
    else:
      gradients[step.stage] = _sum(gradients.get(step.stage), gradient)
  return dq, dk_dv


def _slices_in_rows(slices, begin: int, end: int):
  """What slices `[..., 6]` show to rows from `begin` to `end`."""
  rows = jnp.clip(slices[..., :2], begin, end)
  return jnp.concatenate([rows, slices[..., 2:]], axis=-1)


def _sum(total, x):
  return x if total is None else total + x


def _stage_backward(config: RankConfig, queries, k, v, dq, slices):
  """The sum of dq with the stage's added, and float32 dk and dv as one array of rows."""
  q, dout, lse, row_delta = queries
  operands = (x[None] for x in (q, k, v, dout, lse, row_delta, slices))
  dq, dk, dv = ops.backward(config.backward, *operands, grad_dtype=np.float32, running_dq=dq)
  return dq, _joined(dk[0], dv[0])


rank_attention.defvjp(_rank_attention_fwd, _rank_attention_bwd)


def _joined(k, v):
  """One array of rows, so that keys and values travel together."""
  rows = [x.reshape(x.shape[0], -1) for x in (k, v)]
  return jnp.concatenate(rows, axis=1)


def _parted(rows, k, v):
  """The inverse of `_joined`, for any number of rows."""
  width = k.shape[1] * k.shape[2]
  return (
    rows[:, :width].reshape(-1, *k.shape[1:]),
    rows[:, width:].reshape(-1, *v.shape[1:]),
  )
