"""jax_magi as the attention of Levanter, none of whose files change: see docs/trainers.md.

from examples.trainers import levanter_attention
levanter_attention.install()  # Before a model is traced.
"""

import haliax as hax
from levanter.layers import attention

import jax_magi


def attend(QPos, KPos, Key, query, key, value, mask, bias=None, return_max_logits=False, **more):
  """(out, meta): Levanter's `dot_product_attention` for masks that are not arrays over pairs."""
  if bias is not None or mask.explicit_mask is not None or mask.causal_offset is not None:
    raise NotImplementedError("jax_magi: bias, explicit masks and causal offsets")
  kinds = attention._bin_and_group_axes_by_function(query, key, value, QPos, KPos, Key)
  kinds[2]["D"] = [value.resolve_axis(hax.axis_name(Key))]
  q, k, v = map(attention._reshape_axes_for_bshd_bins, (query, key, value), kinds)
  q, k, v = (x.array.astype(more.get("attention_dtype") or x.dtype) for x in (q, k, v))
  options = {"softcap": more.get("logits_soft_cap") or 0.0, "return_max_logits": return_max_logits}
  if more.get("attn_sink") is not None:
    options["sink"] = more["attn_sink"].array.ravel()
  if mask.segment_ids is not None:
    ids = mask.segment_ids[0].broadcast_to((*kinds[0]["B"], *kinds[0]["S"])).array
    options |= {"segment_ids": ids.reshape(q.shape[:2]), "max_segments": 64, "padding_id": -1}
  run = _over_context if hax.partitioning.physical_axis_name(QPos) else _on_a_device
  left, radius = mask.sliding_window, mask.bidirectional_window
  window = (radius, radius) if left is None else (left - 1, 0)
  out, meta = run((q, k, v), more.get("scaling_factor"), mask.is_causal, window, options, kinds[0])
  return attention._unflatten_bshd(hax.named(out, ("B", "S", "H", "D")), kinds[0], kinds[2]), meta


def _on_a_device(qkv, scale, is_causal, window, options, _):
  options |= {"is_causal": is_causal, "local_window_size": window, "return_meta": True}
  return jax_magi.dot_product_attention(*qkv, scale=scale, **options)


def _over_context(qkv, scale, is_causal, window, options, axes):
  """The axis "position" is mapped to an axis of the mesh."""
  places = {kind: hax.partitioning.pspec_for_axis(axes[kind]) for kind in "BSH"}
  options |= {"axis_name": places["S"][0], "causal": is_causal, "window": window}
  options |= {"batch_axis": places["B"][0] if axes["B"] else None, "head_axis": places["H"][0]}
  return jax_magi.context_parallel_attention(
    *qkv, softmax_scale=scale, order="contiguous", **options
  )


def install():
  """Replaces the function that Levanter's attention modules call."""
  attention.dot_product_attention = lambda *operands, **more: attend(*operands, **more)[0]
