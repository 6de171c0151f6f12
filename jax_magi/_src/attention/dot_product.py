"""The drop-in for `jax.nn.dot_product_attention`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi._src.arguments import as_int32, check_flag, has_symbols
from jax_magi._src.attention import checks
from jax_magi._src.attention.api import AttnForwardMeta
from jax_magi._src.attention.batch import attend
from jax_magi._src.masks.mask import AttentionMask
from jax_magi._src.masks.windows import band_around, window_band


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
  local_window_size: int | tuple[int, int] | None = None,
  implementation: str | None = None,
  return_residual: bool = False,
  segment_ids: Any = None,
  kv_segment_ids: Any = None,
  max_segments: int | None = None,
  softcap: float = 0.0,
  sink: jax.Array | None = None,
  return_meta: bool = False,
  return_max_logits: bool = False,
  deterministic: bool = False,
  sm_margin: int = 0,
) -> Any:
  """Drop-in for `jax.nn.dot_product_attention`, with documents, softcap, sink and statistics.

  As there, `is_causal` and `local_window_size` are aligned to the top left corner: query i's own
  key is i. Rows that see nothing are zero.

  Args:
    query: `[batch, q_len, num_q_heads, head_dim]`, or without batch.
    key: `[batch, k_len, num_kv_heads, head_dim]`, likewise.
    value: `[batch, k_len, num_kv_heads, value_dim]`, likewise.
    bias: not supported.
    mask: not supported as an array; an `AttentionMask` over `q_len` and `k_len` is, instead of the
      other arguments that say which pairs are visible. It serves the whole batch, unless its slices
      are `[batch, num_slices, 6]`, as `jax.vmap` of a constructor makes them: then each row has its
      own.
    scale: as `softmax_scale` in `attention`.
    is_causal: whether to hide keys after the query.
    query_seq_lengths: int32 `[batch]`; rows past it are zero.
    key_value_seq_lengths: int32 `[batch]`; keys past it are hidden.
    local_window_size: (left, right) keys that a query sees around its own; an int is both.
    implementation: as in `attention`.
    return_residual: whether to return (out, lse).
    segment_ids: int32 `[batch, q_len]`, documents packed one after the other; 0 is padding.
    kv_segment_ids: int32 `[batch, k_len]`; None is `segment_ids`.
    max_segments: static bound on the document numbers, needed with `segment_ids`.
    softcap: as in `attention`.
    sink: as in `attention`.
    return_meta: whether to return (out, meta).
    return_max_logits: whether to fill `meta.max_logits`, `[batch, num_q_heads]`.
    deterministic: as in `attention`.
    sm_margin: as in `attention`.

  Returns:
    out `[batch, q_len, num_q_heads, value_dim]`; or (out, lse), or (out, meta), as asked for. lse
    is float32 `[batch, q_len, num_q_heads]`.
  """
  if bias is not None:
    raise NotImplementedError("bias is not supported; jax.nn.dot_product_attention has it")
  for name, flag in (
    ("is_causal", is_causal),
    ("return_residual", return_residual),
    ("return_meta", return_meta),
    ("return_max_logits", return_max_logits),
  ):
    check_flag(name, flag)
  if return_residual and return_meta:
    raise ValueError("return_residual and return_meta exclude each other; meta.lse is the residual")
  if return_max_logits and not return_meta:
    raise ValueError("return_max_logits needs return_meta=True, which carries them")
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
    implementation=implementation,
    scale_name="scale",
  )
  sink = checks.check_sink(sink, q.shape[2])
  # By numpy where it was made so, but numpy knows no symbolic batch.
  xp: Any = np if isinstance(sink, np.ndarray) and not has_symbols((batch,)) else jnp
  sink = xp.broadcast_to(sink, (batch, q.shape[2]))

  lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
  segments = {"segment_ids": segment_ids, "kv_segment_ids": kv_segment_ids}
  if mask is not None:
    others = {"is_causal": is_causal or None, "local_window_size": local_window_size}
    _check_mask_alone(mask, {**others, **lengths, **segments})
    slices = checks.slices_of_batch(mask, batch, q.shape[1], k.shape[1])
  else:
    slices = _slices(
      (batch, q.shape[1], k.shape[1]),
      band_around(0, window_band("local_window_size", local_window_size, is_causal=is_causal)),
      lengths,
      segments,
      max_segments,
    )
  results = attend(config, q, k, v, slices, sink)
  out, lse, max_logits = results if has_batch else (x[0] for x in results)
  if return_meta:
    return out, AttnForwardMeta(lse, max_logits if return_max_logits else None)
  return (out, lse) if return_residual else out


def _check_mask_alone(mask: Any, others: dict[str, Any]) -> None:
  if not isinstance(mask, AttentionMask):
    raise NotImplementedError(
      "mask must be an AttentionMask; for an array, say what it means by is_causal, "
      "local_window_size, segment_ids or sequence lengths"
    )
  for name, value in others.items():
    if value is not None:
      raise ValueError(f"mask and {name} exclude each other: the mask says what is visible")


def _slices(
  shape: tuple[int, int, int],
  band: tuple[int, int],
  lengths: dict[str, Any],
  segments: dict[str, Any],
  max_segments: int | None,
) -> Any:
  """int32 `[batch or 1, num_slices, 6]` from per-batch lengths or documents, and one band."""
  batch, q_len, k_len = shape
  given_lengths = {
    name: as_int32(name, x, (batch,)) for name, x in lengths.items() if x is not None
  }
  given_segments = {
    name: as_int32(name, x if np.ndim(x) == 2 else jnp.asarray(x)[None], (batch, length))
    for (name, x), length in zip(segments.items(), (q_len, k_len), strict=True)
    if x is not None
  }
  if not given_lengths and not given_segments:
    return np.array([[[0, q_len, 0, k_len, *band]]], np.int32)
  if not given_segments:
    slices = np.array([[[0, 0, 0, 0, *band]]], np.int32)
    # By broadcasting alone, which keeps whatever sharding the lengths have.
    for name, column, length in (
      ("query_seq_lengths", 1, q_len),
      ("key_value_seq_lengths", 3, k_len),
    ):
      end = jnp.clip(given_lengths.get(name, np.array([length], np.int32)), 0, length)
      slices = slices + end[:, None, None] * np.eye(6, dtype=np.int32)[None, None, column]
    return slices
  if given_lengths:
    raise ValueError(f"segment_ids and {next(iter(given_lengths))} exclude each other: use id 0")
  if "segment_ids" not in given_segments:
    raise ValueError("kv_segment_ids needs segment_ids")
  if max_segments is None:
    raise ValueError("segment_ids needs max_segments, a static bound on the document numbers")
  ids = given_segments["segment_ids"]
  kv_ids = given_segments.get("kv_segment_ids", ids)
  if kv_ids.shape[1] != k_len:
    raise ValueError(f"kv_segment_ids must be given: query and key have {q_len} and {k_len} tokens")

  def documents(ids, kv_ids):
    return AttentionMask.from_segment_ids(ids, max_segments, kv_ids=kv_ids).slices

  if isinstance(ids, np.ndarray) and isinstance(kv_ids, np.ndarray):  # Row by row, and checked.
    slices = np.array([documents(*row) for row in zip(ids, kv_ids, strict=True)], np.int32)
    slices = slices.reshape(batch, max_segments, 6)
  else:
    slices = jax.vmap(documents)(jnp.asarray(ids), jnp.asarray(kv_ids))
  # The band is over positions in the row, as everywhere in this function; padding stays zero.
  is_range = np.array([[[1, 1, 1, 1, 0, 0]]], np.int32)
  return slices * is_range + np.array([[[0, 0, 0, 0, *band]]], np.int32)
