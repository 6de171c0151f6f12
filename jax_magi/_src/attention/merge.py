"""Merges attention over parts of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi._src.softmax_lse import softmax_lse


def merge_attention(
  outs: Sequence[jax.Array], lses: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """Merges attention over disjoint sets of keys into attention over all of them.

  Args:
    outs: the outputs, `[q_len, num_q_heads, value_dim]` each.
    lses: float32 `[q_len, num_q_heads]` each.

  Returns:
    out `[q_len, num_q_heads, value_dim]` in the dtype of `outs`, and lse `[q_len, num_q_heads]`.
  """
  if len(outs) != len(lses) or len(outs) == 0:
    raise ValueError(
      f"outs and lses must have the same length of at least 1, got {len(outs)} and {len(lses)}"
    )
  for out, lse in zip(outs, lses, strict=True):
    if out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
      raise ValueError(
        f"outs must have one shape, and lses the same without its last dimension, "
        f"got {list(out.shape)} and {list(lse.shape)}"
      )
  weights, lse = softmax_lse(jnp.stack(lses))
  out = sum(w[..., None] * o.astype(np.float32) for w, o in zip(weights, outs, strict=True))
  return out.astype(outs[0].dtype), lse
