"""Flexible, exact attention for JAX, and fused softmax for the attention that is not flash."""

from jax_magi import optim
from jax_magi._attention import (
  AttnForwardMeta,
  attention,
  dot_product_attention,
  flex_flash_attn_func,
)
from jax_magi._mask import AttentionMask, MaskType
from jax_magi._megatron_softmax import FusedScaleMaskSoftmax
from jax_magi._merge import merge_attention
from jax_magi._ops import CHECKPOINT_NAMES
from jax_magi._softmax import (
  SoftmaxExplanation,
  fused_scale_mask_softmax,
  scaled_masked_softmax,
  scaled_softmax,
  scaled_upper_triang_masked_softmax,
)

__all__ = [
  "CHECKPOINT_NAMES",
  "AttentionMask",
  "AttnForwardMeta",
  "FusedScaleMaskSoftmax",
  "MaskType",
  "SoftmaxExplanation",
  "attention",
  "dot_product_attention",
  "flex_flash_attn_func",
  "fused_scale_mask_softmax",
  "merge_attention",
  "optim",
  "scaled_masked_softmax",
  "scaled_softmax",
  "scaled_upper_triang_masked_softmax",
]
