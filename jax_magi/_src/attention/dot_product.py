"""The drop-in for `jax.nn.dot_product_attention`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi._src.arguments import check_flag, has_symbols
from jax_magi._src.attention import checks, ops
from jax_magi._src.attention.api import AttnForwardMeta
from jax_magi._src.attention.visibility import hidden_by_bias, visible_slices
from jax_magi._src.masks.windows import band_around, window_band

NO_DROPOUT = (
  "attention dropout is not supported, as every kernel would have to make its random bits, and the "
  "same again in the backward pass; dropout of the attention's output is a line of JAX"
)


def dot_product_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  bias: Any = None,
  mask: Any = None,
  *,
  scale: float | None = None,
  is_causal: bool = False,
  query_seq_lengths: Any = None,
  key_value_seq_lengths: Any = None,
  local_window_size: int | tuple[int | None, int | None] | None = None,
  implementation: str | None = None,
  return_residual: bool = False,
  segment_ids: Any = None,
  kv_segment_ids: Any = None,
  max_segments: int | None = None,
  padding_id: int | None = 0,
  softcap: float = 0.0,
  sink: jax.Array | None = None,
  alibi_slopes: jax.Array | None = None,
  dropout_rate: float = 0.0,
  return_meta: bool = False,
  return_max_logits: bool = False,
  deterministic: bool = False,
  sm_margin: int = 0,
  checkpoint_names: str | tuple[str, str] | None = None,
) -> Any:
  """Drop-in for `jax.nn.dot_product_attention`, with documents, softcap, sink and statistics.

  As in `jax.nn`, `is_causal` and `local_window_size` are aligned to the top left corner: query i's
  own key is i. Fully masked rows return zeros.

  A pair is visible if all arguments that you pass allow it: `is_causal`, `local_window_size`,
  lengths, documents and `mask`. They are combined as slices, and hidden tiles cost nothing.
  Documents together with an `AttentionMask` need one slice for each pair of document and slice.

  A boolean `mask` is converted to slices if it is known when the call is traced, all heads share
  it, and the slices are few: at most 64, or at most one for every 8 queries. Any other boolean mask
  becomes a bias of 0 and -inf in the dtype of query. The bias has the size of the mask: for a
  `[batch, 1, 1, k_len]` mask, it is one row per batch element. If you also pass a `bias`, the two
  are added, in the shape to which they broadcast. Lengths and documents never become a bias.

  Args:
    query: `[batch, q_len, num_q_heads, head_dim]`, or without batch.
    key: `[batch, k_len, num_kv_heads, head_dim]`, or without batch.
    value: `[batch, k_len, num_kv_heads, value_dim]`, or without batch.
    bias: broadcastable to `[batch, num_q_heads, q_len, k_len]`, as in `attention`.
    mask: boolean, broadcastable to `[batch, num_q_heads, q_len, k_len]`, True where visible; or an
      `AttentionMask` for the whole batch; or one for each row of the batch, as a sequence of masks,
      or as a mask with slices `[batch, num_slices, 6]`, which `jax.vmap` of a constructor returns.
    scale: as `softmax_scale` in `attention`.
    is_causal: whether to hide keys after the query.
    query_seq_lengths: int32 `[batch]`. Rows after the length are zero.
    key_value_seq_lengths: int32 `[batch]`. Keys after the length are hidden.
    local_window_size: (left, right), the number of keys that a query sees before and after its own.
      An int sets both. None means no limit.
    implementation: as in `attention`.
    return_residual: whether to return (out, lse), as `jax.nn` does.
    segment_ids: int `[batch, q_len]`, the document number of each token, as in
      `AttentionMask.from_segment_ids`. Negative numbers, documents that are not contiguous, and
      more than `max_segments` documents are an error. If the numbers are traced, all results of
      that row of the batch are NaN instead.
    kv_segment_ids: int `[batch, k_len]`, the document numbers of the keys. None means
      `segment_ids`.
    max_segments: the largest number of documents in a row (static). Required with `segment_ids`.
    padding_id: the number of padding, which sees nothing; often 0 or -1. None means no padding.
    softcap: as in `attention`.
    sink: as in `attention`.
    alibi_slopes: as in `attention`, or `[batch, num_q_heads]`.
    dropout_rate: must be 0. Attention dropout is not supported.
    return_meta: whether to return (out, meta).
    return_max_logits: whether to return `meta.max_logits`, `[batch, num_q_heads]`.
    deterministic: as in `attention`.
    sm_margin: as in `attention`.
    checkpoint_names: as in `attention`.

  Returns:
    out `[batch, q_len, num_q_heads, value_dim]`; or (out, lse) with `return_residual`; or
    (out, meta) with `return_meta`. lse is float32 `[batch, q_len, num_q_heads]`.
  """
  if not isinstance(dropout_rate, (int, float)) or dropout_rate != 0:
    raise NotImplementedError(f"dropout_rate must be 0, got {dropout_rate!r}: {NO_DROPOUT}")
  for name, flag in (
    ("is_causal", is_causal),
    ("return_residual", return_residual),
    ("return_meta", return_meta),
    ("return_max_logits", return_max_logits),
  ):
    check_flag(name, flag)
  if return_residual and return_meta:
    raise ValueError("return_residual and return_meta cannot be combined; meta.lse is the residual")
  if return_max_logits and not return_meta:
    raise ValueError("return_max_logits needs return_meta=True: max_logits is a field of meta")
  for name, x in (("query", query), ("key", key), ("value", value)):
    if len(np.shape(x)) not in (3, 4) or len(np.shape(x)) != len(np.shape(query)):
      raise ValueError(
        f"{name} must be [batch, length, heads, dim], or [length, heads, dim] for all three, "
        f"got {list(np.shape(x))}"
      )
  has_batch = np.ndim(query) == 4
  q, k, v = (x if has_batch else x[None] for x in map(jnp.asarray, (query, key, value)))
  batch = q.shape[0]
  for name, x in (("key", k), ("value", v)):
    if x.shape[0] != batch:
      raise ValueError(f"{name} must have query's batch of {batch}, got {x.shape[0]}")
  q_type, k_type, v_type = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (q, k, v))
  checks.check_qkv(q_type, k_type, v_type, names=("query", "key", "value"))
  config = checks.make_config(
    q,
    v,
    softmax_scale=scale,
    softcap=softcap,
    deterministic=deterministic,
    sm_margin=sm_margin,
    checkpoint_names=checkpoint_names,
    implementation=implementation,
    scale_name="scale",
  )
  sink = checks.sink_logit(sink, q.shape[2])
  # A numpy sink stays numpy, unless the batch is symbolic, which numpy does not support.
  xp: Any = np if isinstance(sink, np.ndarray) and not has_symbols((batch,)) else jnp
  sink = xp.broadcast_to(sink, (batch, q.shape[2]))

  shape = (batch, q.shape[2], q.shape[1], k.shape[1])
  slices, dense, is_broken = visible_slices(
    shape,
    band_around(0, window_band("local_window_size", local_window_size, is_causal=is_causal)),
    {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths},
    {"segment_ids": segment_ids, "kv_segment_ids": kv_segment_ids},
    max_segments,
    padding_id,
    mask,
  )
  if is_broken is not None:
    # A NaN sink makes the whole row NaN without another pass over the output.
    sink = sink + jnp.where(is_broken, np.float32(np.nan), np.float32(0))[:, None]
  bias = checks.check_bias(bias, shape, q.dtype)
  if dense is not None:
    bias = hidden_by_bias(dense, bias, k.shape[1], q.dtype)
  slopes = checks.check_alibi_slopes(alibi_slopes, (shape[1:2], shape[:2]))
  results = ops.attention(config, q, k, v, slices, sink, bias=bias, alibi_slopes=slopes)
  out, lse, max_logits = results if has_batch else (x[0] for x in results)
  if return_meta:
    return out, AttnForwardMeta(lse, max_logits if return_max_logits else None)
  return (out, lse) if return_residual else out
