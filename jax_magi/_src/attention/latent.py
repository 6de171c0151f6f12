"""Attention whose keys and values are expanded from latents, again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_magi._src.attention import checks
from jax_magi._src.attention.api import AttnForwardMeta, attention
from jax_magi._src.attention.seen_rows import seen_rows, without_hidden
from jax_magi._src.masks.mask import AttentionMask


def latent_attention(
  q: jax.Array,
  latent: Any,
  mask: AttentionMask,
  *,
  expand: Callable[[Any], tuple[jax.Array, jax.Array]],
  **options: Any,
) -> tuple[jax.Array, AttnForwardMeta]:
  """`attention` over keys and values that `expand` computes from latents.

  The backward pass computes them again, so a layer keeps only q, the latents, out and lse. No
  kernel of the forward pass runs twice. Use `jax.vmap` for a batch.

  Args:
    q: `[q_len, num_q_heads, head_dim]`.
    latent: an array `[k_len, ...]`, or a tree of them.
    mask: the keys that each query sees.
    expand: `expand(latent)` returns k `[k_len, num_kv_heads, head_dim]` and v `[k_len,
      num_kv_heads, value_dim]`. Each row depends only on the same row of latents. `expand` may
      close over parameters. Rows that no query sees are replaced by one that is seen before
      `expand` is called.
    **options: as in `attention`.

  Returns:
    out and meta, as `attention`.
  """
  leaves, treedef = latent_leaves(latent)
  length = leaves[0].shape[0]
  checks.check_mask(mask, q, leaves[0])

  def attend(q: Any, leaves: Any, terms: Any) -> tuple[jax.Array, AttnForwardMeta]:
    rows = without_hidden(leaves, seen_rows(jnp.asarray(mask.slices), length))
    kv = expand(jax.tree.unflatten(treedef, rows))
    check_kv(q, kv, length)
    k, v = kv
    return attention(q, k, v, mask, **terms, **static)

  names = ("sink", "bias", "alibi_slopes")
  terms = {name: options[name] for name in names if options.get(name) is not None}
  static = {name: x for name, x in options.items() if name not in names}
  policy = jax.checkpoint_policies.save_only_these_names(
    *checks.check_checkpoint_names(options.get("checkpoint_names"))
  )
  results: tuple[jax.Array, AttnForwardMeta]
  results = jax.checkpoint(attend, policy=policy)(q, leaves, terms)
  return results


def latent_leaves(latent: Any) -> tuple[tuple[jax.Array, ...], Any]:
  """Checks a tree of latents; returns its arrays and its structure."""
  found, treedef = jax.tree.flatten(latent)
  if not found:
    raise ValueError("latent must have at least one array")
  leaves = tuple(map(jnp.asarray, found))
  for x in leaves:
    is_real = x.dtype == bool or jnp.issubdtype(x.dtype, jnp.integer)
    is_real |= jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize * 8 == jnp.finfo(x).bits
    if not is_real:
      raise ValueError(f"latent must hold real numbers of whole bytes, got {x.dtype}")
    if not x.shape or x.shape[0] != leaves[0].shape[0]:
      shapes = [list(x.shape) for x in leaves]
      raise ValueError(f"latent must have arrays with equally many rows, got {shapes}")
  return leaves, treedef


def check_kv(q: Any, kv: Any, length: int) -> None:
  """Checks that `expand` returned k and v of `length` rows that fit the queries."""
  if not isinstance(kv, (tuple, list)) or len(kv) != 2:
    raise ValueError(f"expand must return (k, v), got {type(kv).__name__}")
  k, v = kv
  checks.check_qkv(q, k, v, names=("q", "expand's k", "expand's v"))
  if k.shape[0] != length:
    raise ValueError(
      f"expand must return k and v with the {length} rows that it was given, got {list(k.shape)}"
    )
