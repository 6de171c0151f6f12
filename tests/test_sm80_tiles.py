"""Tiles of the kernels for sm_80 and later, and their lists; runs without a GPU."""

import numpy as np
import pytest

from jax_magi import AttentionMask
from jax_magi._src.native.backends import CUDA
from tests.needs import HEADER_WORDS, TILE_WORDS, hopper_needs

if CUDA.module is None:
  pytest.skip("built without the CUDA kernels", allow_module_level=True)

MASKS = {
  "causal": AttentionMask.causal(1000),
  "window": AttentionMask.sliding_window(3000, left=1023),
  "documents": AttentionMask.from_cu_seqlens([0, 701, 1597, 1804, 3000], causal=True),
  "few_queries": AttentionMask.causal(5, 1000),
}
HEAD_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
KILOBYTES = [99, 163, 227]  # Of shared memory that a CTA may use.


def _needs(mask, kilobytes, dims, *, has_bias=False, **changes):
  head_dim, value_dim = dims
  if has_bias:
    shape = (1, 1, mask.q_len, mask.k_len)
    changes |= {"bias_shape": shape, "bias_dtype": "bfloat16"}
  changes |= {"architecture": "sm80", "shared_memory_bytes": kilobytes << 10}
  return hopper_needs(mask, head_dim=head_dim, value_dim=value_dim, **changes)


def _stamp(*args, **call):
  return CUDA.module.read_tile_stamp(_needs(*args, **call).tile_stamp)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("kilobytes", KILOBYTES[:2])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_tiles_hold_all_rows_and_visible_pairs(name, dims, kilobytes, is_backward, has_bias):
  mask = MASKS[name]
  needs = _needs(mask, kilobytes, dims, is_backward=is_backward, has_bias=has_bias)
  stamp = CUDA.module.read_tile_stamp(needs.tile_stamp)
  assert stamp["by_keys"] == is_backward
  words = np.frombuffer(needs.tile_list, np.int32)
  tiles = words[HEADER_WORDS:].reshape(-1, TILE_WORDS)
  assert words[0] == len(tiles)
  dense = mask.to_dense().T if is_backward else mask.to_dense()
  counts = np.zeros(len(dense), int)
  for begin, num_rows, num_blocks in tiles[:, 1:4]:
    assert 0 < num_rows <= stamp["num_rows"]
    counts[begin : begin + num_rows] += 1
    seen = np.flatnonzero(dense[begin : begin + num_rows].any(axis=0))
    # A tile may have rows of two documents. Each adds less than a block, and less than a second one
    # if a bias aligns blocks.
    num_columns = num_blocks * stamp["num_columns"]
    assert len(seen) <= num_columns < len(seen) + (4 if has_bias else 2) * stamp["num_columns"]
  assert (counts == 1).all()
  assert (np.diff(tiles[:, 3]) <= 0).all(), "the heaviest first"


@pytest.mark.parametrize("has_softcap", [False, True])
@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_more_shared_memory_makes_no_tile_smaller(dims, is_backward, has_softcap):
  """More than 163 KB, which an A100 has, change one tile: see the next test."""
  call = {"is_backward": is_backward, "has_softcap": has_softcap}
  little, much, most = (_stamp(MASKS["causal"], size, dims, **call) for size in KILOBYTES)
  assert most == (little if dims == (256, 256) and not is_backward else much)
  for key in ("num_rows", "num_columns"):
    assert little[key] <= much[key]
  assert little["architecture"] == much["architecture"]


def test_tiles_of_256_dims_depend_on_shared_memory():
  """Forward: there is room for two small blocks, for a large one, or for a small one."""
  stamps = [_stamp(MASKS["causal"], size, (256, 256), is_backward=False) for size in KILOBYTES]
  sizes = [(stamp["num_rows"], stamp["num_columns"]) for stamp in stamps]
  assert dict(zip(KILOBYTES, sizes, strict=True)) == {99: (64, 64), 163: (128, 64), 227: (64, 64)}


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_hopper_kernels_take_no_list_of_these(dims, is_backward):
  head_dim, value_dim = dims
  call = {"is_backward": is_backward, "value_dim": value_dim, "head_dim": head_dim}
  mask = MASKS["causal"]
  stamps = [_needs(mask, 227, dims, is_backward=is_backward), hopper_needs(mask, **call)]
  architectures = [CUDA.module.read_tile_stamp(x.tile_stamp)["architecture"] for x in stamps]
  assert architectures[0] != architectures[1]
