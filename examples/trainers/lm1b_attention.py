"""jax_magi in Flax's lm1b, and in models like it: see docs/trainers.md.

In `TransformerLM`, the mask is document numbers, and nothing of [batch, length, length] is made:

    decoder_mask = inputs_segmentation

In `EncoderDecoder1DBlock`, the module gets this function, and attention dropout is off:

    nn.MultiHeadDotProductAttention(
      ..., dropout_rate=0.0, attention_fn=attention_fn
    )(x, mask=decoder_mask)
"""

import jax_magi

_MAX_SEGMENTS = 64  # Documents of a row.


def attention_fn(query, key, value, bias=None, mask=None, *, on_max_logits=None, **more):
  """An `attention_fn` for decoders, whose mask is `inputs_segmentation`, 0 for padding."""
  return jax_magi.flax_attention_fn(
    query, key, value, bias, is_causal=True, segment_ids=mask,
    max_segments=None if mask is None else _MAX_SEGMENTS, on_max_logits=on_max_logits, **more,
  )  # fmt: skip


def attention_fn_over_context(mesh, batch_axis="data", axis_name="context"):
  """The same with the sequence split over an axis of the mesh, in its order."""

  def attention_fn(query, key, value, bias=None, mask=None, *, on_max_logits=None, **more):
    if bias is not None or (more.get("dropout_rate") and not more.get("deterministic")):
      raise NotImplementedError("jax_magi: no bias and no attention dropout over a context axis")
    out, meta = jax_magi.context_parallel_attention(
      query, key, value, segment_ids=mask, max_segments=None if mask is None else _MAX_SEGMENTS,
      order="contiguous", mesh=mesh, axis_name=axis_name, batch_axis=batch_axis,
      return_max_logits=on_max_logits is not None,
    )  # fmt: skip
    if on_max_logits is not None:
      on_max_logits(meta.max_logits)
    return out

  return attention_fn
