"""jax_magi as the attention of Levanter, none of whose files change: see docs/trainers.md.

from examples.trainers import levanter_attention
levanter_attention.install()  # Before a model is traced.
"""

import haliax as hax
import jax.numpy as jnp
from haliax.partitioning import physical_axis_name
from levanter.layers import attention

import jax_magi

_HEADS = ("heads", "kv_head", "q_heads_per_group")


def dot_product_attention(
  QPos, KPos, Key, query, key, value, mask=None, bias=None, attention_dtype=None, *_, dropout=0.0,
  inference=True, logits_soft_cap=None, scaling_factor=None, attn_sink=None, **__,
):  # fmt: skip
  """What Levanter's function does, for self-attention without an array over all pairs."""
  mask = attention.AttentionMask() if mask is None else mask
  arrays = (bias, getattr(mask, "explicit_mask", mask), getattr(mask, "causal_offset", None))
  if any(x is not None for x in arrays) or (dropout and not inference):
    raise NotImplementedError("jax_magi: bias, explicit masks, causal_offset or dropout")
  heads, batch = ([x for x in query.axes if x.name in names] for names in (_HEADS, ("batch",)))

  def rows(x, Pos):  # [batch, length, heads, dim]
    x = x.rearrange((*batch, Pos, *(axis for axis in x.axes if axis in heads), Key)).array
    x = x.reshape(*x.shape[: len(batch) + 1], -1, x.shape[-1])
    return x.astype(attention_dtype or x.dtype)

  radius, ids = mask.bidirectional_window, mask.segment_ids
  window = None if radius is None else (radius, radius)
  window = window if mask.sliding_window is None else (mask.sliding_window - 1, 0)
  q, k, v = rows(query, QPos), rows(key, KPos), rows(value, KPos)
  options = {"softcap": logits_soft_cap or 0.0, "return_max_logits": False}
  if ids is not None:  # Levanter pads with -1.
    ids = jnp.broadcast_to(ids[0].array, q.shape[:-2])
    options |= {"segment_ids": ids, "max_segments": 64, "padding_id": -1}
  if attn_sink is not None:
    options["sink"] = attn_sink.rearrange(heads).array.ravel()
  attend = _on_a_device if physical_axis_name(QPos) is None else _over_context
  out, _ = attend(q, k, v, scaling_factor, mask.is_causal, window, options, QPos, batch, heads)
  axes = (*batch, query.resolve_axis(QPos), *heads, value.resolve_axis(Key))
  return hax.named(out.reshape([axis.size for axis in axes]), axes)


def _on_a_device(q, k, v, scale, is_causal, window, options, *_):
  return jax_magi.dot_product_attention(
    q, k, v, scale=scale, is_causal=is_causal, local_window_size=window, return_meta=True, **options
  )


def _over_context(q, k, v, scale, is_causal, window, options, QPos, batch, heads):
  """The axis "position" is mapped to an axis of the mesh."""
  batch_axis, head_axis = (physical_axis_name(axes[0]) if axes else None for axes in (batch, heads))
  return jax_magi.context_parallel_attention(
    q, k, v, softmax_scale=scale, causal=is_causal, window=window, order="contiguous",
    axis_name=physical_axis_name(QPos), batch_axis=batch_axis, head_axis=head_axis, **options,
  )  # fmt: skip


def install():
  """Replaces the function that Levanter's attention modules call."""
  attention.dot_product_attention = dot_product_attention
