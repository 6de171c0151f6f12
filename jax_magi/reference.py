"""The specification: dense attention and softmax in plain jnp, in any dtype.

Only tests import this. In float64 it is the truth. In a 16-bit dtype it is the plain computation
with which ours is compared.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  dense_mask: Any,
  *,
  softmax_scale: float | None = None,
  softcap: float = 0.0,
  sink: Any = None,
  bias: Any = None,
  alibi_slopes: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Attention that computes everything in the dtype of q.

  Args:
    q: `[q_len, num_q_heads, head_dim]`.
    k: `[k_len, num_kv_heads, head_dim]`.
    v: `[k_len, num_kv_heads, value_dim]`.
    dense_mask: bool `[q_len, k_len]`, True where visible.
    softmax_scale: None means `head_dim ** -0.5`.
    softcap: 0 means no cap.
    sink: `[num_q_heads]` or `[num_sink, num_q_heads]`.
    bias: broadcastable to `[num_q_heads, q_len, k_len]`, added before the cap. -inf hides a pair.
    alibi_slopes: `[num_q_heads]`. slope * (key - query) is added before the cap, too.

  Returns:
    out `[q_len, num_q_heads, value_dim]`, lse `[q_len, num_q_heads]`, max_logits `[num_q_heads]`.
  """
  scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
  group = q.shape[1] // k.shape[1]
  k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
  logits = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * jnp.asarray(scale, q.dtype)
  mask = jnp.asarray(dense_mask)[None]
  if bias is not None:
    bias = jnp.broadcast_to(jnp.asarray(bias, q.dtype), logits.shape)
    logits, mask = logits + bias, mask & (bias != -jnp.inf)
  if alibi_slopes is not None:
    distances = jnp.arange(k.shape[0])[None, :] - jnp.arange(q.shape[0])[:, None]
    slopes = jnp.asarray(alibi_slopes, q.dtype)[:, None, None]
    logits = logits + slopes * distances.astype(q.dtype)[None]
  max_logits = jnp.where(mask, logits, -jnp.inf).max(axis=(1, 2), initial=-jnp.inf)
  if softcap:
    logits = softcap * jnp.tanh(logits / softcap)
  sinks = jnp.zeros((0, q.shape[1]), q.dtype) if sink is None else jnp.atleast_2d(sink)
  sinks = jnp.broadcast_to(sinks.astype(q.dtype).T[:, None, :], (*logits.shape[:2], len(sinks)))
  logits = jnp.concatenate([logits, sinks], axis=-1)
  mask = jnp.concatenate(
    [jnp.broadcast_to(mask, logits.shape[:2] + mask.shape[2:]), sinks > -jnp.inf], -1
  )

  probabilities, lse = _masked_softmax(logits, mask)
  out = jnp.einsum("hqk,khd->qhd", probabilities[..., : k.shape[0]], v, precision="highest")
  return out, lse.T, jax.lax.stop_gradient(max_logits)


def softmax(
  x: jax.Array, *, scale: float = 1.0, mask: Any = None, bias: Any = None, offset: Any = None
) -> jax.Array:
  """Scale, mask and softmax, all in the dtype of x.

  Args:
    x: `[..., heads, q_len, k_len]` or `[q_len, k_len]`.
    scale: a factor of x.
    mask: bool, True where visible, broadcastable to x.
    bias: added to the scaled x, broadcastable to x.
    offset: `[heads]`, one more logit in each row, whose probability is not returned.

  Returns:
    Probabilities, in the shape and dtype of x. Fully masked rows are zero.
  """
  logits = x * jnp.asarray(scale, x.dtype)
  if bias is not None:
    logits = logits + jnp.broadcast_to(jnp.asarray(bias, x.dtype), x.shape)
  mask = jnp.broadcast_to(True if mask is None else mask, x.shape) & (logits != -jnp.inf)
  extra = jnp.full((*x.shape[:-1], 1), -jnp.inf, x.dtype)
  if offset is not None:
    per_head = jnp.asarray(offset, x.dtype).reshape(-1, *[1] * min(x.ndim - 1, 2))
    extra = jnp.broadcast_to(per_head, extra.shape)
  logits = jnp.concatenate([logits, extra], axis=-1)
  mask = jnp.concatenate([mask, extra > -jnp.inf], axis=-1)
  return _masked_softmax(logits, mask)[0][..., : x.shape[-1]]


def _masked_softmax(logits: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Probabilities and lse over the last axis, over visible elements."""
  # Fully masked rows must not compute -inf - -inf, whose gradient is NaN.
  largest = jnp.where(mask, logits, -jnp.inf).max(axis=-1, keepdims=True, initial=-jnp.inf)
  largest = jax.lax.stop_gradient(jnp.where(largest == -jnp.inf, 0, largest))
  weights = jnp.where(mask, jnp.exp(jnp.where(mask, logits - largest, 0)), 0)
  total = weights.sum(axis=-1, keepdims=True)
  safe_total = jnp.where(total == 0, 1, total)
  lse = jnp.where(total == 0, -jnp.inf, largest + jnp.log(safe_total))[..., 0]
  return weights / safe_total, lse
