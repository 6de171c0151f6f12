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
from jax_magi._src.attention.merge import merge_attention
from jax_magi._src.context_parallel.exchange import transfers_of
from jax_magi._src.context_parallel.key import DistAttnKey


@dataclasses.dataclass(frozen=True)
class RankConfig:
  """What is static about a call."""

  forward: ops.AttentionConfig
  backward: ops.AttentionConfig
  axis_name: str
  keep_remote_kv: bool = False


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
    max_logits `[num_q_heads]` of these queries.
  """
  return _forward(config, q, k, v, key, sink)[0]


def _forward(config: RankConfig, q, k, v, key, sink):
  stages = _stages(config, k, v, key)
  # Results of several stages are rounded once, when they are one.
  out_dtype = np.float32 if len(stages) > 1 else None
  outs: list[Any] = []
  lses: list[Any] = []
  maxima: list[Any] = []
  for number, (stage_k, stage_v) in enumerate(stages):
    # The sink takes part in one stage's softmax, and so in their union's.
    stage_sink = sink if number == 0 else jnp.full_like(sink, -jnp.inf)
    operands = (q, stage_k, stage_v, key.slices[0, number], stage_sink)
    results = ops.forward(config.forward, *(x[None] for x in operands), out_dtype=out_dtype)
    for values, result in zip((outs, lses, maxima), results, strict=True):
      values.append(result[0])
  out, lse = (outs[0], lses[0]) if len(stages) == 1 else merge_attention(outs, lses)
  return (out.astype(q.dtype), lse, functools.reduce(jnp.maximum, maxima)), stages


def _stages(config: RankConfig, k, v, key) -> list[tuple[Any, Any]]:
  """Keys and values of each stage. Transfers depend on nothing but k and v."""
  if key.spec.cp_size == 1 and key.spec.overlap_degree:
    return [(k, v)]
  both = _joined(k, v)
  remote = [_parted(transfer.cast(both), k, v) for transfer in transfers_of(key, config.axis_name)]
  return [(k, v), *remote] if key.spec.overlap_degree else remote


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
  stages = kept or _stages(config, k, v, key)
  transfers = transfers_of(key, config.axis_name)
  dq, dk_dv = [], []
  for number, (stage_k, stage_v) in enumerate(stages):
    operands = (q, stage_k, stage_v, dout, lse, row_delta, key.slices[0, number])
    stage_dq, dk, dv = (
      x[0]
      for x in ops.backward(config.backward, *(x[None] for x in operands), grad_dtype=np.float32)
    )
    dq.append(stage_dq)
    gradient = _joined(dk, dv)
    if key.spec.overlap_degree and number == 0:  # The rank's own.
      dk_dv.append(gradient)
    else:
      transfer = transfers[number - min(key.spec.overlap_degree, 1)]
      dk_dv.append(transfer.reduce(gradient, config.backward.deterministic))
  dk, dv = _parted(sum(dk_dv), k, v)
  return sum(dq).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, dsink


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
