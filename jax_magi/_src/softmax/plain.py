"""The softmax operations in plain JAX, in float32 at least."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def forward(
  x: jax.Array,
  mask: jax.Array | None = None,
  offset: jax.Array | None = None,
  *,
  scale: float,
  lo: int,
  hi: int,
) -> tuple[jax.Array, jax.Array | None]:
  dtype = np.promote_types(x.dtype, np.float32)
  logits = x.astype(dtype) * scale
  in_band = _in_band(x.shape, lo, hi)
  if mask is not None and mask.dtype != bool:
    logits = logits + mask.astype(dtype)
  visible = in_band & mask if mask is not None and mask.dtype == bool else in_band
  logits = jnp.where(visible, logits, -jnp.inf)
  extra = jnp.array(-jnp.inf, dtype) if offset is None else offset.astype(dtype)[:, :, None, None]
  largest = jnp.maximum(logits.max(axis=-1, keepdims=True, initial=-jnp.inf), extra)
  largest = jnp.where(largest == -jnp.inf, 0.0, largest)
  weights = jnp.exp(logits - largest)
  extra_weight = jnp.exp(extra - largest)
  total = weights.sum(axis=-1, keepdims=True) + extra_weight
  inverse = jnp.where(total == 0.0, 0.0, 1.0 / jnp.where(total == 0.0, 1.0, total))
  y = jnp.where(in_band, weights * inverse, 0.0).astype(x.dtype)
  offset_probability = (extra_weight * inverse)[..., 0].astype(np.float32)
  return y, None if offset is None else offset_probability


def backward(
  y: jax.Array, dy: jax.Array, *, scale: float, lo: int, hi: int, with_dot: bool = False
) -> tuple[jax.Array, jax.Array | None]:
  dtype = np.promote_types(y.dtype, np.float32)
  wide_y = y.astype(dtype)
  wide_dy = jnp.where(_in_band(y.shape, lo, hi), dy.astype(dtype), 0.0)
  dot = jnp.sum(wide_y * wide_dy, axis=-1)
  dx = scale * wide_y * (wide_dy - dot[..., None])
  return dx.astype(y.dtype), dot.astype(np.float32) if with_dot else None


def _in_band(shape: tuple[int, ...], lo: int, hi: int) -> jax.Array:
  """The visible pairs of a band, bool `[1, 1, q_len, k_len]`."""
  shape = (1, 1, *shape[-2:])
  row = jax.lax.broadcasted_iota(np.int32, shape, 2)
  column = jax.lax.broadcasted_iota(np.int32, shape, 3)
  return (column - row >= lo) & (column - row <= hi)
