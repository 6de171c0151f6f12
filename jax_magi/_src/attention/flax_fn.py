"""`dot_product_attention` as the `attention_fn` of Flax's modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_magi._src.attention.dot_product import NO_DROPOUT, dot_product_attention
from jax_magi._src.masks.mask import AttentionMask
from jax_magi._src.transforms.explicit import fold_leading, reshaped, spec_of

# Arguments of `dot_product_attention` with one entry, or one row, for each row of the batch.
_OF_BATCH = {
  "query_seq_lengths",
  "key_value_seq_lengths",
  "segment_ids",
  "kv_segment_ids",
  "alibi_slopes",
}


def flax_attention_fn(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  bias: Any = None,
  mask: Any = None,
  broadcast_dropout: bool = True,
  dropout_rng: Any = None,
  dropout_rate: float = 0.0,
  deterministic: bool = False,
  dtype: Any = None,
  precision: Any = None,
  module: Any = None,
  is_causal: bool = False,
  force_fp32_for_softmax: bool = True,
  einsum_dot_general: Any = None,
  qk_attn_weights_einsum: Any = None,
  attn_weights_value_einsum: Any = None,
  on_max_logits: Callable[[jax.Array], Any] | None = None,
  **options: Any,
) -> Any:
  """An `attention_fn` for `nnx.MultiHeadAttention` and `linen.MultiHeadDotProductAttention`.

  Flax passes the `mask` of a module's caller on to this function, so it may be an `AttentionMask`.
  Use `functools.partial(flax_attention_fn, is_causal=True, local_window_size=(1023, 0))` for
  arguments that are the same in every call. Fully masked rows return zeros, whereas Flax's own
  attention returns the mean of all values.

  Args:
    query: `[batch..., q_len, num_q_heads, head_dim]`.
    key: `[batch..., k_len, num_kv_heads, head_dim]`.
    value: `[batch..., k_len, num_kv_heads, value_dim]`.
    bias: as in `dot_product_attention`.
    mask: as in `dot_product_attention`; or an array of numbers, as `flax.linen.make_causal_mask`
      returns it, where 0 hides a pair. With several batch axes, masks for each row may be nested
      lists.
    broadcast_dropout: ignored, because there is no dropout.
    dropout_rng: ignored, because there is no dropout.
    dropout_rate: must be 0, unless Flax's `deterministic` is True: attention dropout is not
      supported.
    deterministic: Flax's argument, which turns dropout off. It is not the `deterministic` of
      `dot_product_attention`.
    dtype: the dtype of the computation. None means the dtype to which the operands promote.
    precision: ignored. Products of 16-bit operands are exact, and all products are summed in
      float32.
    module: must be None. `sow_weights` is not supported, because the weights are never
      materialized.
    is_causal: as in `dot_product_attention`.
    force_fp32_for_softmax: ignored. The softmax is always in float32.
    einsum_dot_general: must be None.
    qk_attn_weights_einsum: must be None.
    attn_weights_value_einsum: must be None.
    on_max_logits: a function that is called with max_logits `[batch..., num_q_heads]` when the
      module is traced, for QK-Clip. In a parent module, pass
      `lambda x: self.sow("intermediates", "max_logits", x)`.
    **options: further arguments of `dot_product_attention`, such as `local_window_size` and
      `softcap`. Arguments with a batch have the batch axes of the query.

  Returns:
    out `[batch..., q_len, num_q_heads, value_dim]`. With `return_residual` or `return_meta`, the
    results of `dot_product_attention`, with these batch axes.
  """
  del broadcast_dropout, dropout_rng, precision, force_fp32_for_softmax
  if dropout_rate and not deterministic:
    raise NotImplementedError(
      f"dropout_rate must be 0, got {dropout_rate}: {NO_DROPOUT}. Give the module "
      "dropout_rate=0, or call it with deterministic=True"
    )
  if module is not None:
    raise NotImplementedError(
      "sow_weights must be False: attention weights are never materialized; "
      "use fused_scale_mask_softmax for attention that needs them"
    )
  for name, einsum in (
    ("einsum_dot_general", einsum_dot_general),
    ("qk_attn_weights_einsum", qk_attn_weights_einsum),
    ("attn_weights_value_einsum", attn_weights_value_einsum),
  ):
    if einsum is not None:
      raise NotImplementedError(
        f"{name} must be None: the kernels compute their own matrix products"
      )
  dtype = jnp.result_type(query, key, value) if dtype is None else dtype
  q, k, v = (x.astype(dtype) for x in (query, key, value))
  if hasattr(mask, "dtype") and jnp.issubdtype(mask.dtype, jnp.number):
    mask = mask != 0
  if on_max_logits is not None:
    for name in ("return_meta", "return_residual", "return_max_logits"):
      if options.get(name):
        raise ValueError(
          f"on_max_logits and {name} cannot be combined; use max_logits of return_meta"
        )
    options |= {"return_meta": True, "return_max_logits": True}
  results = _attend(q, k, v, bias, mask, is_causal, options)
  if on_max_logits is None:
    return results
  out, meta = results
  on_max_logits(meta.max_logits)
  return out


def _attend(
  q: Any, k: Any, v: Any, bias: Any, mask: Any, is_causal: bool, options: dict[str, Any]
) -> Any:
  """`dot_product_attention` with any number of batch axes."""
  batch = q.shape[:-3]
  if len(batch) <= 1:
    return dot_product_attention(q, k, v, bias, mask, is_causal=is_causal, **options)
  batch_axes = spec_of(q)[: len(batch)]
  q, k, v = (fold_leading(x, len(batch)) for x in (q, k, v))
  bias, mask = (_fold_pairs(x, batch) for x in (bias, mask))
  for name in _OF_BATCH.intersection(options):
    options[name] = _fold_rows(options[name], batch)
  results = dot_product_attention(q, k, v, bias, mask, is_causal=is_causal, **options)

  def unfold(x: jax.Array) -> jax.Array:
    return reshaped(x, (*batch, *x.shape[1:]), P(*batch_axes, *spec_of(x)[1:]))

  return jax.tree.map(unfold, results)


def _fold_rows(x: Any, batch: tuple[int, ...]) -> Any:
  """An array with or without batch axes, with its batch axes merged into one."""
  x = x if x is None or hasattr(x, "ndim") else np.asarray(x)
  return fold_leading(x, len(batch)) if x is not None and x.shape[: len(batch)] == batch else x


def _fold_pairs(x: Any, batch: tuple[int, ...]) -> Any:
  """An array over all pairs, or masks, with the batch axes merged into one."""
  if isinstance(x, AttentionMask):
    return AttentionMask.tree_unflatten((x.q_len, x.k_len), (_fold_rows(x.slices, batch),))
  if isinstance(x, (list, tuple)):
    return jax.tree.leaves(x, is_leaf=lambda x: isinstance(x, AttentionMask))
  if x is None or x.ndim <= 3:
    return x
  leading = (1,) * (len(batch) + 3 - x.ndim) + x.shape[:-3]
  if math.prod(leading) == 1:
    return x.reshape(1, *x.shape[-3:])
  return fold_leading(jnp.broadcast_to(x, (*batch, *x.shape[-3:])), len(batch))
