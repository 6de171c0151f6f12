"""Rows of keys that no query sees. Values computed from them must not reach any result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_magi._src.transforms.varying import vary_like


def seen_rows(slices: Any, length: int) -> Any:
  """bool `[length]`: the rows of keys that slices `[num_slices, 6]` reach."""
  q_begin, q_end, k_begin, k_end = (slices[:, i] for i in range(4))
  count = ((q_begin < q_end) & (k_begin < k_end)).astype(np.int32)
  edges = vary_like(jnp.zeros(length, np.int32), slices)
  edges = edges.at[k_begin].add(count, mode="drop").at[k_end].add(-count, mode="drop")
  return jnp.cumsum(edges, dtype=np.int32) > 0


def without_hidden(rows: Sequence[Any], is_seen: Any) -> list[Any]:
  """Replaces rows that no query sees by a row that is seen.

  A function of rows may have infinite derivatives at padding rows, which are often zeros. Zero
  gradients of its results would not help, because 0 * inf is NaN.
  """
  if not is_seen.shape[0]:
    return list(rows)
  first = jnp.argmax(is_seen)
  return [where_rows(is_seen, x, x[first][None]) for x in rows]


def where_rows(is_seen: Any, x: Any, y: Any) -> Any:
  """`jnp.where` by rows, of arrays of any rank."""
  return jnp.where(is_seen.reshape(-1, *[1] * (x.ndim - 1)), x, y)
