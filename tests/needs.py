"""What the CUDA kernels ask for a call, without a GPU."""

import numpy as np

from jax_magi._src.native.backends import HOPPER


def hopper_needs(mask, *, is_backward, group=4, head_dim=128, batch=1, num_kv_heads=2, **changes):
  """Of attention in bf16 with a known mask; `changes` are arguments of `attention_needs`."""
  slices = np.asarray(mask.slices)
  call = {
    "q_shape": (batch, mask.q_len, num_kv_heads * group, head_dim),
    "k_shape": (batch, mask.k_len, num_kv_heads, head_dim),
    "value_dim": head_dim,
    "slices_shape": (1, *slices.shape),
    "dtype": "bfloat16",
    "has_softcap": False,
    "is_backward": is_backward,
    "deterministic": False,
    "static_slices": slices.tobytes(),
  }
  return HOPPER.module.attention_needs(**(call | changes))


def most_tile_rows(needs):
  """Of one head, as the stamp of the tile list says."""
  return needs.tile_stamp >> 10 & 1023
