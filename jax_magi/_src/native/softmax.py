"""The native softmax kernels as JAX functions.

x, y, dy, dx [b, heads, q_len, k_len]           mask: the same, or 1 in any dimension
offset_probability, dot [b, heads, q_len]       offset [b or 1, heads]
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi._src.native.call import call_on_whole_arrays

_FORWARD = "jax_magi_softmax_forward"
_BACKWARD = "jax_magi_softmax_backward"


def _band(lo: int, hi: int) -> dict[str, np.int32]:
  return {"lo": np.int32(lo), "hi": np.int32(hi)}


def forward(
  x: jax.Array,
  mask: Any = None,
  offset: jax.Array | None = None,
  *,
  scale: float,
  lo: int,
  hi: int,
  donate: bool,
) -> tuple[jax.Array, jax.Array | None]:
  """Returns y, and the probability of the offset in each row. `mask` and `offset` may be None."""
  rows = x.shape[:-1] if offset is not None else (0,)
  y, offset_probability = call_on_whole_arrays(
    _FORWARD,
    (
      x,
      # `jnp.zeros`, because custom_partitioning accepts no constants.
      jnp.zeros((0, 0, 0, 0), bool) if mask is None else mask,
      jnp.zeros((0, 0), np.float32) if offset is None else offset,
    ),
    [(x.shape, x.dtype), (rows, np.float32)],
    aliases={0: 0} if donate else None,
    scale=np.float32(scale),
    **_band(lo, hi),
  )
  return y, None if offset is None else offset_probability


def backward(
  y: jax.Array, dy: jax.Array, *, scale: float, lo: int, hi: int, donate: bool, with_dot: bool
) -> tuple[jax.Array, jax.Array | None]:
  """Returns dx and, with `with_dot`, each row's sum of y * dy."""
  dx, dot = call_on_whole_arrays(
    _BACKWARD,
    (y, dy),
    [(y.shape, y.dtype), (y.shape[:-1] if with_dot else (0,), np.float32)],
    aliases={1: 0} if donate else None,
    scale=np.float32(scale),
    **_band(lo, hi),
  )
  return dx, dot if with_dot else None
