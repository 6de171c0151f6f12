"""What the CUDA kernels ask for a call, and which are chosen, without a GPU."""

import contextlib
import dataclasses
import types
from unittest import mock

import jax
import numpy as np

from jax_magi._src.native import attention
from jax_magi._src.native.backends import BACKENDS, CUDA

# int32 words of a tile list: of its header, and of each tile. In the header, WEIGHTS are the number
# of blocks and the numbers of tiles of each weight. KEY is what the list was made for. Its last
# word, LACKS, says which tiles the list lacks.
HEADER_WORDS, TILE_WORDS = 24, 8
WEIGHTS, KEY = slice(2, 15), slice(15, 21)
LACKS = KEY.stop - 1


def hopper_needs(mask, *, is_backward, group=4, head_dim=128, batch=1, num_kv_heads=2, **changes):
  """The needs of bf16 attention with a known mask. `changes` are arguments of `attention_needs`."""
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
    "architecture": "sm90",
  }
  return CUDA.module.attention_needs(**(call | changes))


def most_tile_rows(needs):
  """The largest number of rows of a tile of one head, from the stamp of the tile list."""
  return CUDA.module.read_tile_stamp(needs.tile_stamp)["num_rows"]


def stamped_blocks(needs):
  """The approximate number of blocks of a tile list, from its stamp."""
  return CUDA.module.read_tile_stamp(needs.tile_stamp)["num_blocks"]


@contextlib.contextmanager
def forward_in_clusters():
  """Lets forward calls run in clusters regardless of the amount of work."""
  plain_needs = attention._needs

  def needs(*args, is_backward, **options):
    found = plain_needs(*args, is_backward=is_backward, **options)
    if is_backward:
      return found
    fields = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
    few, many = (CUDA.module.stamp_of_blocks(n) for n in (stamped_blocks(found), 2**31))
    return types.SimpleNamespace(**fields | {"tile_stamp": found.tile_stamp - few + many})

  jax.clear_caches()
  with mock.patch.object(attention, "_needs", needs):
    yield
  jax.clear_caches()


def takes_hopper_kernels(q, v):
  """Whether attention of these operands takes the kernels for Hopper here, rather than others."""
  return BACKENDS["cuda"].for_attention(q, v).architecture.name == "sm90"


def with_gpus(monkeypatch, capabilities, architectures=("sm90",)):
  """The CUDA backend of a build for these architectures, on a machine with these GPUs."""
  gpus = [
    types.SimpleNamespace(compute_capability=x, platform="gpu", device_kind="GPU")
    for x in capabilities
  ]
  monkeypatch.setattr(jax, "devices", lambda platform=None: gpus)
  variants = {f"attention {name}": ["256 bfloat16", "256 float16"] for name in architectures}
  sizes = {80: 163, 86: 99, 90: 227, 120: 99}
  module = types.SimpleNamespace(
    LEFT_OUT="",
    variants=lambda: variants,
    shared_memory_of=lambda compute_capability: sizes.get(compute_capability, 99) << 10,
  )
  backend = dataclasses.replace(CUDA, module=module)
  monkeypatch.setitem(BACKENDS, "cuda", backend)
  return backend
