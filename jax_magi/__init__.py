"""Flexible, exact attention for JAX, and fused softmax for the attention that is not flash."""

from jax_magi import optim, overlap
from jax_magi._src.attention.api import AttnForwardMeta, attention, flex_flash_attn_func
from jax_magi._src.attention.dot_product import dot_product_attention
from jax_magi._src.attention.explain import Explanation, explain_attention
from jax_magi._src.attention.flax_fn import flax_attention_fn
from jax_magi._src.attention.kernel_call import CHECKPOINT_NAMES
from jax_magi._src.attention.latent import latent_attention
from jax_magi._src.attention.merge import merge_attention
from jax_magi._src.context_parallel.api import (
  calc_attn,
  context_parallel_attention,
  stack_keys,
)
from jax_magi._src.context_parallel.batches import plan_batch
from jax_magi._src.context_parallel.capacities import Capacities
from jax_magi._src.context_parallel.dispatch import dispatch, get_position_ids, roll, undispatch
from jax_magi._src.context_parallel.gathered import zigzag_positions
from jax_magi._src.context_parallel.key import DistAttnKey
from jax_magi._src.context_parallel.latent_api import (
  calc_latent_attn,
  context_parallel_latent_attention,
)
from jax_magi._src.context_parallel.links import Links
from jax_magi._src.context_parallel.make_keys import (
  key_for_new_mask,
  magi_attn_flex_key,
  magi_attn_varlen_key,
)
from jax_magi._src.context_parallel.stats import PlanStats
from jax_magi._src.exchange_check.api import check_exchange
from jax_magi._src.exchange_check.report import ExchangeReport
from jax_magi._src.masks.constructors import MaskType
from jax_magi._src.masks.mask import AttentionMask
from jax_magi._src.softmax.api import (
  explain_softmax,
  fused_scale_mask_softmax,
  scaled_masked_softmax,
  scaled_softmax,
  scaled_upper_triang_masked_softmax,
)
from jax_magi._src.softmax.megatron import FusedScaleMaskSoftmax
from jax_magi._src.version import __version__

__all__ = [
  "CHECKPOINT_NAMES",
  "AttentionMask",
  "AttnForwardMeta",
  "Capacities",
  "DistAttnKey",
  "ExchangeReport",
  "Explanation",
  "FusedScaleMaskSoftmax",
  "Links",
  "MaskType",
  "PlanStats",
  "__version__",
  "attention",
  "calc_attn",
  "calc_latent_attn",
  "check_exchange",
  "context_parallel_attention",
  "context_parallel_latent_attention",
  "dispatch",
  "dot_product_attention",
  "explain_attention",
  "explain_softmax",
  "flax_attention_fn",
  "flex_flash_attn_func",
  "fused_scale_mask_softmax",
  "get_position_ids",
  "key_for_new_mask",
  "latent_attention",
  "magi_attn_flex_key",
  "magi_attn_varlen_key",
  "merge_attention",
  "optim",
  "overlap",
  "plan_batch",
  "roll",
  "scaled_masked_softmax",
  "scaled_softmax",
  "scaled_upper_triang_masked_softmax",
  "stack_keys",
  "undispatch",
  "zigzag_positions",
]
