"""Lists of tiles that the CUDA kernels get for concrete masks: made on the host, without a GPU."""

import numpy as np
import pytest

from jax_magi import AttentionMask
from jax_magi._slices import grouped_by_keys

cuda = pytest.importorskip("jax_magi._cuda")

MASKS = {
  "full": AttentionMask.full(1000),
  "causal": AttentionMask.causal(1000),
  "window": AttentionMask.sliding_window(3000, left=1023),
  "documents": AttentionMask.from_cu_seqlens([0, 700, 1700, 1900, 3000], causal=True),
  "tiny_documents": AttentionMask.from_cu_seqlens(np.arange(0, 1001, 10), causal=True),
  "rectangle": AttentionMask.causal(300, 1000),
  "few_queries": AttentionMask.causal(5, 1000),
  "nothing": AttentionMask.full(1000).crop(0, 1000, 2000, 3000),
}


def _tiles(mask, *, is_backward, group=4, head_dim=128, batch=1, num_kv_heads=2):
  q_shape = (batch, mask.q_len, num_kv_heads * group, head_dim)
  shapes = (q_shape, (batch, mask.k_len, num_kv_heads, head_dim), head_dim)
  slices = np.asarray(mask.slices)
  call = (*shapes, (1, *slices.shape), True, False, is_backward, False)
  _, _, plan = cuda.needs(*call, slices.tobytes())
  words = np.frombuffer(plan, np.int32).reshape(-1, 8)
  assert words[0, 0] == len(words) - 1
  batch, begin, num_rows, num_blocks = words[1:, :4].T
  assert (batch == 0).all()
  return begin, num_rows, num_blocks


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_every_row_is_in_one_tile(name, is_backward):
  mask = MASKS[name]
  begin, num_rows, num_blocks = _tiles(mask, is_backward=is_backward)
  length = mask.k_len if is_backward else mask.q_len
  counts = np.zeros(length, int)
  for first, count in zip(begin, num_rows, strict=True):
    counts[first : first + count] += 1
  assert (counts == 1).all()
  assert (np.diff(num_blocks) <= 0).all(), "the heaviest first"


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_blocks_hold_what_is_visible_and_little_more(name, is_backward):
  mask = MASKS[name]
  dense = mask.to_dense().T if is_backward else mask.to_dense()
  columns = 80 if is_backward else 128  # Of a block, at head_dim 128.
  for first, count, blocks in zip(*_tiles(mask, is_backward=is_backward), strict=True):
    seen = np.flatnonzero(dense[first : first + count].any(axis=0))
    assert (blocks == 0) == (len(seen) == 0)
    assert blocks * columns >= len(seen)
    if name != "tiny_documents":  # There a tile has many slices, and a block for each.
      assert blocks * columns < len(seen) + columns * 2


def test_tiles_are_cut_where_documents_begin():
  begin, _, _ = _tiles(MASKS["documents"], is_backward=False)
  assert {0, 700, 1700, 1900} <= set(begin.tolist())


def test_few_queries_share_a_tile_with_other_heads():
  """Rows of a tile: 128, or as many as are left when it holds several heads."""
  *_, blocks = _tiles(MASKS["few_queries"], is_backward=False, group=4)
  assert len(blocks) == 1


@pytest.mark.parametrize(("length", "most_rows"), [(1024, 128), (1100, 192), (8192, 192)])
def test_short_queries_of_head_dim_64_have_small_tiles(length, most_rows):
  _, num_rows, _ = _tiles(AttentionMask.full(length), is_backward=False, head_dim=64)
  assert num_rows.max() == most_rows


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("length", [5, 100, 1100, 2048])
def test_plans_do_not_depend_on_batch_and_heads(length, head_dim, is_backward):
  """They are made before these are sharded."""
  mask = AttentionMask.causal(length)
  options = {"is_backward": is_backward, "head_dim": head_dim}
  one = _tiles(mask, batch=1, num_kv_heads=1, **options)
  many = _tiles(mask, batch=8, num_kv_heads=16, **options)
  for x, y in zip(one, many, strict=True):
    np.testing.assert_array_equal(x, y)


def test_block_causal_cut_by_keys_computes_little_in_vain():
  mask = AttentionMask.block_causal(256, 4096)
  grouped = AttentionMask(grouped_by_keys(np.asarray(mask.slices)), 4096, 4096)
  pairs = [_tiles(m, is_backward=True)[2].sum() * 128 * 80 for m in (mask, grouped)]
  assert pairs[0] > 1.2 * mask.area() and pairs[1] < 1.05 * mask.area()


def test_slices_of_another_length_are_refused():
  shapes = ((1, 8, 2, 64), (1, 8, 2, 64), 64, (1, 3, 6))
  with pytest.raises(ValueError, match="one slice list"):
    cuda.needs(*shapes, True, False, False, False, b"1234")
