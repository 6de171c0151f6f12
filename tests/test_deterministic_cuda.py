"""Gradients that are equal in every run, because dq is summed in a fixed order; on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask
from jax_magi._src.native.attention import list_tiles
from tests.arrays import assert_same_bits, normals
from tests.needs import HEADER_WORDS, TILE_WORDS, hopper_needs, takes_hopper_kernels

pytestmark = pytest.mark.gpu

_LENGTH = 2504
# Tiles with equal and with different numbers of blocks; with one slice, and with many, unsorted.
_MASKS = {
  "full": AttentionMask.full(_LENGTH),
  "causal": AttentionMask.causal(_LENGTH),
  "window": AttentionMask.sliding_window(_LENGTH, left=511),
  "documents": AttentionMask.from_cu_seqlens([0, 700, 1700, 1900, _LENGTH], causal=True),
  # Two documents meet in a unit of 8 queries.
  "documents_anywhere": AttentionMask.from_cu_seqlens(
    [0, 131, 702, 1697, 1901, _LENGTH], causal=True
  ),
  # Three ranges of queries. No two of them see the same tile.
  "three_in_a_unit": AttentionMask.from_ranges(
    [[96, 98], [98, 101], [101, 104], [104, _LENGTH]],
    [[0, 600], [800, 1400], [1600, 2304], [2304, _LENGTH]],
    k_len=_LENGTH,
  ),
  # There are so many slices that units are larger, and are not split.
  "tiny_documents": AttentionMask.from_cu_seqlens([*range(0, _LENGTH, 3), _LENGTH], causal=True),
  "many_documents": AttentionMask.from_cu_seqlens(np.arange(0, _LENGTH + 1, 4)),
  "block_causal": AttentionMask.block_causal(256, _LENGTH),
  # Blocks of the last two ranges are in one tile, and overlap by half.
  "half_apart": AttentionMask.from_ranges(
    [[0, 512], [8, 136], [72, 200]],
    [[0, 128], [128, 168], [168, 256]],
    q_len=_LENGTH,
    k_len=_LENGTH,
  ),
  "out_of_order": AttentionMask.from_ranges(
    [[1203, 2504], [0, 100], [100, 1203], [3, 90]],
    [[100, 1700], [0, 1999], [0, 900], [2000, 2001]],
    [0, 1, 3, 0],
    k_len=_LENGTH,
  ),
}


def _passes(mask, is_known, **options):
  """The output and the gradients, as a function of q, k, v and dout."""

  def run(q, k, v, dout, mask):
    def fun(q, k, v):
      return jax_magi.attention(
        q, k, v, mask, deterministic=True, implementation="cuda", **options
      )[0]

    out, vjp = jax.vjp(fun, q, k, v)
    return out, vjp(dout)

  if is_known:
    return jax.jit(functools.partial(run, mask=mask))
  return functools.partial(jax.jit(run), mask=jax.device_put(mask))


def _gradients(mask, is_known, **options):
  """The gradients alone."""
  run = _passes(mask, is_known, **options)
  return lambda *operands: run(*operands)[1]


def _operands(num_q_heads, num_kv_heads, head_dim):
  heads = (num_q_heads, num_kv_heads, num_kv_heads, num_q_heads)
  shapes = [(_LENGTH, num_heads, head_dim) for num_heads in heads]
  return [jnp.asarray(x) for x in normals(*shapes, dtype=jnp.bfloat16)]


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("name", _MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_runs_are_equal_bit_for_bit(head_dim, name, is_known):
  """Regardless of which CTA does what, and of the number of CTAs. With few, none waits for others.

  Where the number changes how the forward pass cuts tiles along their keys, its sums change, and
  gradients with them. The kernels of sm80 do so: two of their CTAs run on an SM.
  """
  operands = _operands(6, 2, head_dim)
  first = _passes(_MASKS[name], is_known)(*operands)
  comparable = set()
  for sm_margin in (0, 1, 90, 120, 131):
    run = _passes(_MASKS[name], is_known, sm_margin=sm_margin)
    own = run(*operands)
    for _ in range(3):
      assert_same_bits(run(*operands), own)
    if np.asarray(own[0]).tobytes() == np.asarray(first[0]).tobytes():
      assert_same_bits(own, first)
      comparable.add(sm_margin)
  is_hopper = takes_hopper_kernels(operands[0], operands[2])
  assert comparable >= ({0, 1, 90, 120, 131} if is_hopper else {0, 1})


@pytest.mark.parametrize("name", ["causal", "many_documents"])
@pytest.mark.parametrize("heads", [(1, 1), (24, 1), (16, 16)])
def test_other_heads(heads, name):
  """With one head, the table of visits may have few units."""
  operands = _operands(*heads, 64)
  first = _gradients(_MASKS[name], True)(*operands)
  for sm_margin in (0, 100, 131):
    assert_same_bits(_gradients(_MASKS[name], True, sm_margin=sm_margin)(*operands), first)


def test_softcap():
  operands = _operands(6, 2, 128)
  first = _gradients(_MASKS["documents"], False, softcap=5.0)(*operands)
  run = _gradients(_MASKS["documents"], False, softcap=5.0, sm_margin=100)
  for _ in range(4):
    assert_same_bits(run(*operands), first)


def test_batch_with_a_mask_for_each_row():
  """One list has the tiles of all rows."""
  names = ("documents", "block_causal", "out_of_order")
  operands = [jnp.stack([x, x * 2, -x]) for x in _operands(4, 4, 64)]
  num_slices = max(_MASKS[name].slices.shape[0] for name in names)
  slices = np.zeros((3, num_slices, 6), np.int32)
  for row, name in zip(slices, names, strict=True):
    row[: _MASKS[name].slices.shape[0]] = _MASKS[name].slices

  @jax.jit
  @jax.vmap
  def run(q, k, v, dout, slices):
    mask = AttentionMask(slices, _LENGTH, _LENGTH)
    return _gradients(mask, False)(q, k, v, dout)

  first = run(*operands, slices)
  for _ in range(5):
    assert_same_bits(run(*operands, slices), first)
  for i in range(3):
    mask = AttentionMask(slices[i], _LENGTH, _LENGTH)
    alone = _gradients(mask, False)(*(x[i] for x in operands))
    for x, y in zip(first, alone, strict=True):
      x, y = np.asarray(x[i], np.float32), np.asarray(y, np.float32)
      np.testing.assert_allclose(x, y, rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("num_documents", [5, 300, 1500])
def test_the_device_makes_the_same_list_every_time(num_documents):
  """Sorted by number of blocks, equal tiles in order; with few threads and with many."""
  length = 12000
  mask = AttentionMask.from_cu_seqlens(np.linspace(0, length, num_documents + 1, dtype=np.int32))
  options = {"is_backward": True, "group": 1, "head_dim": 64, "deterministic": True}
  needs = hopper_needs(mask, static_slices=None, **options)

  @jax.jit
  def make(slices):
    return list_tiles(slices, [needs], length, [(slices.shape[1], length)])[0]

  slices = jnp.asarray(mask.slices)[None]

  def tiles_of(words):
    return words[HEADER_WORDS:].reshape(-1, TILE_WORDS)[: words[0]]

  tiles = tiles_of(np.asarray(make(slices)))
  _, begin, num_rows, num_blocks, _, _, index, _ = tiles.T
  np.testing.assert_array_equal(index, np.arange(len(tiles)))
  # Tiles of 126 blocks or more may be in any order, but these have fewer.
  more, as_many = num_blocks[:-1] > num_blocks[1:], num_blocks[:-1] == num_blocks[1:]
  assert (more | (as_many & (begin[:-1] < begin[1:]))).all()
  order = np.argsort(begin)
  np.testing.assert_array_equal(begin[order][1:], (begin + num_rows)[order][:-1])
  for _ in range(20):
    np.testing.assert_array_equal(tiles_of(np.asarray(make(slices))), tiles)
