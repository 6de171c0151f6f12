"""Softmax and logsumexp over an axis that may hold nothing but -inf."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def softmax_lse(x: jax.Array, axis: int = 0) -> tuple[jax.Array, jax.Array]:
  """softmax(x) and log(sum(exp(x))) over `axis`.

  Where all of `x` is -inf, the results are 0 and -inf, and their gradients are 0 (those of
  `jax.nn.logsumexp` are NaN). The weights are divided by their sum. Computing them from the
  logarithm would lose precision for large numbers.
  """
  largest = jax.lax.stop_gradient(x.max(axis=axis, keepdims=True, initial=-jnp.inf))
  # -inf - -inf would be NaN.
  largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
  weights = jnp.exp(x - largest)
  total = weights.sum(axis=axis, keepdims=True)
  is_nothing = total == 0.0
  safe_total = jnp.where(is_nothing, 1.0, total)
  lse = jnp.where(is_nothing, -jnp.inf, largest + jnp.log(safe_total))
  return weights / safe_total, lse.squeeze(axis)
