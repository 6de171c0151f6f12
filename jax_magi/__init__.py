"""Flexible, exact attention for JAX, and fused softmax for the attention that is not flash."""

from jax_magi import optim
from jax_magi._src.attention.api import AttnForwardMeta, attention, flex_flash_attn_func
from jax_magi._src.attention.dot_product import dot_product_attention
from jax_magi._src.attention.merge import merge_attention
from jax_magi._src.attention.ops import CHECKPOINT_NAMES
from jax_magi._src.masks.constructors import MaskType
from jax_magi._src.masks.mask import AttentionMask
from jax_magi._src.softmax.api import (
  SoftmaxExplanation,
  fused_scale_mask_softmax,
  scaled_masked_softmax,
  scaled_softmax,
  scaled_upper_triang_masked_softmax,
)
from jax_magi._src.softmax.megatron import FusedScaleMaskSoftmax

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
