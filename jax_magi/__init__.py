"""Flexible, exact attention for JAX."""

from jax_magi import optim
from jax_magi._attention import (
  AttnForwardMeta,
  attention,
  dot_product_attention,
  flex_flash_attn_func,
)
from jax_magi._mask import AttentionMask, MaskType
from jax_magi._merge import merge_attention
from jax_magi._ops import CHECKPOINT_NAMES

__all__ = [
  "CHECKPOINT_NAMES",
  "AttentionMask",
  "AttnForwardMeta",
  "MaskType",
  "attention",
  "dot_product_attention",
  "flex_flash_attn_func",
  "merge_attention",
  "optim",
]
