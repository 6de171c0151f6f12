"""jax_magi as the attention of MaxText, none of whose files change: see docs/trainers.md.

python -m maxtext.trainers.pre_train.train base.yml attention=dot_product ...  # becomes
python -m examples.trainers.maxtext_attention base.yml attention=jax_magi ...
"""

from flax import nnx
from maxtext.layers.attention_op import AttentionOp

import jax_magi

_MASKS = ("previous_chunk", "bidirectional_mask", "indexer_mask", "compressed_mask")


def apply_attention(op, query, key, value, decoder_segment_ids, model_mode, sinks=None, **more):
  """What `AttentionOp.apply_attention` does, for queries that MaxText has scaled."""
  kind, masks = op.attention_type.value, [x for x in _MASKS if more.get(x) is not None]
  if kind not in ("global", "local_sliding", "mla") or model_mode != "train" or masks:
    raise NotImplementedError(f"jax_magi: {kind} attention, model_mode={model_mode}, {masks}")
  attend = _over_context if op.mesh.shape[op.config.context_sharding] > 1 else _on_a_device
  window = (op.sliding_window_size - 1, 0) if kind == "local_sliding" else None
  out, meta = attend(
    op, query, key, value, window, sink=sinks, softcap=op.attn_logits_soft_cap or 0.0,
    segment_ids=decoder_segment_ids, max_segments=max(64, op.config.max_segments_per_seq),
    checkpoint_names="context", return_max_logits=op.config.use_qk_clip,
  )  # fmt: skip
  if op.config.use_qk_clip:
    op.max_logits = nnx.Intermediate(meta.max_logits)
  return out, None, None


def _on_a_device(op, q, k, v, window, **options):
  options |= {"local_window_size": window, "return_meta": True}
  return jax_magi.dot_product_attention(q, k, v, scale=1.0, is_causal=True, **options)


def _over_context(op, query, key, value, window, **options):
  """Sequences are split over the context axis. MaxText has put them into its order."""
  order = str(op.config.context_parallel_reorder_strategy).lower()
  if op.config.context_parallel_strategy != "all_gather" or "striped" in order:
    raise NotImplementedError("jax_magi: only all_gather, and no striped order")
  batch_axis, head_axis, *_ = op._logical_to_mesh_axes(op.flash_axis_names_q)
  return jax_magi.context_parallel_attention(
    query, key, value, softmax_scale=1.0, window=window, mesh=op.mesh, batch_axis=batch_axis,
    head_axis=head_axis, axis_name=op.config.context_sharding,
    order="zigzag" if op.config.context_parallel_load_balance else "contiguous", **options,
  )  # fmt: skip


def install():
  """Lets `attention=jax_magi` choose `apply_attention`; other names mean what they did."""
  theirs = AttentionOp.apply_attention

  def choose(op, **given):
    return (apply_attention if op.attention_kernel == "jax_magi" else theirs)(op, **given)

  AttentionOp.apply_attention = choose


if __name__ == "__main__":
  import sys

  from maxtext.trainers.pre_train import train

  install()
  train.main(sys.argv)
