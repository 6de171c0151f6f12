"""Joining attention over parts of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def merge_attention(
  outs: Sequence[jax.Array], lses: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """Attention over the union of disjoint sets of keys, from the attention over each set.

  Args:
    outs: each `[q_len, num_q_heads, value_dim]`.
    lses: each float32 `[q_len, num_q_heads]`.

  Returns:
    out in the outs' dtype, and lse.
  """
  if len(outs) != len(lses) or len(outs) == 0:
    raise ValueError(f"outs and lses must be as many, and some, got {len(outs)} and {len(lses)}")
  for out, lse in zip(outs, lses, strict=True):
    if out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
      raise ValueError(
        f"outs must have one shape, and lses the same without its last dimension, "
        f"got {list(out.shape)} and {list(lse.shape)}"
      )
  stacked = jnp.stack(lses)
  largest = jax.lax.stop_gradient(stacked.max(axis=0))
  largest = jnp.where(largest == -jnp.inf, 0.0, largest)  # A row that no part sees.
  weights = jnp.exp(stacked - largest)
  total = weights.sum(axis=0)
  is_empty = total == 0.0
  safe_total = jnp.where(is_empty, 1.0, total)
  out = sum(
    (w / safe_total)[..., None] * o.astype(np.float32) for w, o in zip(weights, outs, strict=True)
  )
  lse = jnp.where(is_empty, -jnp.inf, largest + jnp.log(safe_total))
  return out.astype(outs[0].dtype), lse  # type: ignore[union-attr]
