"""Kernels accept only the tile list of their own call."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from benchmarks.stand_in import start_stand_in
from jax_magi import AttentionMask
from jax_magi._src.native.attention import list_tiles
from jax_magi._src.native.backends import BACKENDS, CUDA
from tests.accuracy import check_attention, make_inputs
from tests.list_calls import (
  forged_list,
  forward_with_list,
  list_of,
  needs_of,
)
from tests.needs import HEADER_WORDS, KEY, LACKS, TILE_WORDS, forward_in_clusters, hopper_needs

pytestmark = pytest.mark.gpu


@pytest.fixture
def on_hopper(monkeypatch):
  """out of a call, by the kernels that the lists of this file are for, whatever the tests run."""
  monkeypatch.setitem(BACKENDS, "cuda", CUDA)
  return lambda q, k, v, mask: jax_magi.attention(q, k, v, mask, implementation="cuda_sm90")[0]


def test_own_list_is_taken(on_hopper):
  mask = AttentionMask.causal(180)
  out, _, operands = forward_with_list(mask, list_of(mask))
  np.testing.assert_array_equal(out, on_hopper(*operands, mask))


def test_list_of_another_tiling_is_refused():
  """A program may outlive the build that made its list."""
  mask = AttentionMask.causal(180)
  with pytest.raises(jax.errors.JaxRuntimeError, match="tile list of another version"):
    forward_with_list(mask, list_of(mask), tile_stamp=needs_of(mask).tile_stamp + 1)


def test_list_for_kernels_of_another_architecture_is_refused():
  mask = AttentionMask.causal(180)
  others = needs_of(mask).tile_stamp + (1 << 6)  # The four bits from 6 on are the architecture.
  with pytest.raises(jax.errors.JaxRuntimeError, match="made for the kernels for sm_80 and later"):
    forward_with_list(mask, list_of(mask), tile_stamp=others)


def test_program_for_a_gpu_with_more_shared_memory_is_refused():
  mask = AttentionMask.causal(180)
  with pytest.raises(jax.errors.JaxRuntimeError, match="with 300 KB of shared memory"):
    forward_with_list(mask, list_of(mask), shared_memory_kb=300)


def test_list_with_more_tiles_than_the_call_may_have_is_refused():
  long, short = AttentionMask.causal(4000), AttentionMask.causal(180)
  with pytest.raises(jax.errors.JaxRuntimeError, match="tile_list is of another call"):
    forward_with_list(short, list_of(long))


def test_list_of_another_length_ends_the_program():
  """Both lists have equally many tiles. Rows of the list after the end must not be written."""
  assert _ends("other_length")


def test_list_that_lacks_tiles_ends_a_call_that_writes_all_rows():
  assert _ends("lacks_tiles")


def _ends(name):
  """Whether a forward call with this wrong list ends the program."""
  command = [sys.executable, "-m", "tests.list_calls", name]
  return subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_tiles_out_of_the_arrays_are_moved_into_them(on_hopper):
  """Under memcheck, `tests/sanitizer_cases.py` shows that nothing else is accessed."""
  mask = AttentionMask.causal(180)
  out, lse, operands = forward_with_list(mask, forged_list(mask))
  assert out.shape == (180, 4, 64) and lse.shape == (180, 4)
  np.testing.assert_array_equal(  # And the next call is right.
    forward_with_list(mask, list_of(mask))[0], on_hopper(*operands, mask)
  )


def _traced(length, slices, num_heads=2, group=1):
  """out of self-attention with these slices, which are traced."""
  q, k = (jnp.ones((length, n, 64), jnp.bfloat16) for n in (num_heads, num_heads // group))

  @jax.jit
  def call(q, k, slices):
    mask = AttentionMask(slices, length, length)
    return jax_magi.attention(q, k, k, mask, implementation="cuda")[0]

  return jax.block_until_ready(call(q, k, slices))


def test_a_million_empty_slices_show_nothing():
  out = _traced(300, jnp.zeros((1 << 20, 6), np.int32))
  np.testing.assert_array_equal(out, jnp.zeros_like(out))


def test_more_slices_than_the_kernels_count_are_refused():
  """If each made all of 2^18 keys visible, the blocks of a tile would exceed 32 bits."""
  with pytest.raises(jax.errors.JaxRuntimeError, match="slices that are not known"):
    _traced(1 << 18, jnp.zeros((1 << 20, 6), np.int32))


def test_more_tiles_than_the_kernels_count_are_refused():
  """Each slice may cut the rows twice, for each of 1,024 heads."""
  with pytest.raises(jax.errors.JaxRuntimeError, match=r"tiles .* must be fewer than 2\*\*31"):
    _traced(1, jnp.zeros((1 << 20, 6), np.int32), num_heads=1024)


def test_a_forged_number_of_blocks_lifts_no_limit():
  """With 4 query heads for each kv head, the blocks of half as many slices are too many, too."""
  slices = jnp.zeros((1 << 19, 6), np.int32)
  with (
    forward_in_clusters(),  # Its stamp says that the mask is known.
    pytest.raises(jax.errors.JaxRuntimeError, match="slices that are not known"),
  ):
    _traced(1 << 18, slices, num_heads=8, group=4)


def test_wild_slices_are_clipped():
  wild = np.array([[-(2**31), 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 2**31 - 1]], np.int32)
  full = AttentionMask.full(300).slices
  np.testing.assert_array_equal(_traced(300, wild), _traced(300, full))


@pytest.mark.parametrize("num_documents", [600, 1500])
def test_traced_masks_with_many_cuts(num_documents):
  """A thread has several of 1,201 rows where a tile might begin; of 3,001 rows none is cut."""
  ends = np.sort(np.random.default_rng(1).permutation(np.arange(1, 3000))[: num_documents - 1])
  mask = AttentionMask.from_cu_seqlens([0, *ends, 3000], causal=True)
  inputs = make_inputs(np.random.default_rng(0), jnp.bfloat16, 3000, 3000, 4, 2, 64, 64)
  check_attention(inputs, mask, "cuda", is_mask_known=False)


def _device_list(slices, length, *, is_backward):
  """The tiles [batch, begin, num_rows, num_blocks] that the device makes of `[batch, n, 6]`."""
  mask = AttentionMask.full(length)
  needs = hopper_needs(
    mask,
    is_backward=is_backward,
    batch=len(slices),
    static_slices=None,
    slices_shape=slices.shape,
  )

  @jax.jit
  def call(slices):
    return list_tiles(slices, [needs], length, [(slices.shape[1], length)])[0]

  words = np.asarray(call(slices))
  tiles = words[HEADER_WORDS:].reshape(-1, TILE_WORDS)[: words[0]]
  return tiles[:, :4]


@pytest.mark.parametrize("is_backward", [False, True])
def test_lists_of_many_batch_rows_are_those_of_each(is_backward):
  """24 rows of 60 slices have 2,904 candidates for cuts, and one has 121."""
  rng, length = np.random.default_rng(0), 4096
  cuts = [np.sort(rng.choice(np.arange(1, length), 59, replace=False)) for _ in range(24)]
  masks = [AttentionMask.from_cu_seqlens([0, *x, length], causal=True) for x in cuts]
  slices = np.stack([mask.slices for mask in masks])
  tiles = _device_list(slices, length, is_backward=is_backward)
  assert (np.diff(tiles[:, 3]) <= 0).all(), "the heaviest first"
  for i, one in enumerate(slices):
    expected = _device_list(one[None], length, is_backward=is_backward)
    found = tiles[tiles[:, 0] == i]
    assert sorted(map(tuple, found[:, 1:])) == sorted(map(tuple, expected[:, 1:]))


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
  "num_slices", [[1, 1], [2, 60, 7], [5, 700, 0, 1500, 30], [40] * 21], ids=str
)
def test_lists_made_at_once_are_those_made_one_by_one(num_slices, batch, is_backward):
  """Small ones, those that need different kernels, and more than one launch makes."""
  rng, q_len = np.random.default_rng(0), 3000
  calls = []
  for i, count in enumerate(num_slices):
    k_len = 0 if i == 2 else int(rng.integers(1, 3000))
    slices = np.zeros((batch, count, 6), np.int32)
    slices[..., 0:2] = np.sort(rng.integers(0, q_len + 1, (batch, count, 2)))
    slices[..., 2:4] = np.sort(rng.integers(0, k_len + 1, (batch, count, 2)))
    slices[..., 4:] = -(2**30), 2**30
    keys = AttentionMask.full(q_len, k_len)
    changes = {"static_slices": None, "slices_shape": slices.shape, "batch": batch}
    needs = hopper_needs(keys, is_backward=is_backward, **changes)
    calls.append((slices, needs, (count, k_len)))
  tables, needs, sizes = zip(*calls, strict=True)
  together = jax.jit(lambda slices: list_tiles(slices, needs, q_len, sizes))
  for i, words in enumerate(together(np.concatenate(tables, axis=1))):
    alone = jax.jit(lambda slices, i=i: list_tiles(slices, [needs[i]], q_len, [sizes[i]])[0])
    assert words[0] > 0 or (is_backward and sizes[i][1] == 0)
    lists = [np.asarray(x) for x in (words, alone(tables[i]))]
    headers = [x[:HEADER_WORDS] for x in lists]
    np.testing.assert_array_equal(*(header[: KEY.stop] for header in headers))
    # Larger launches sort heavier tiles: the order of those may differ.
    tiles = [x[HEADER_WORDS:].reshape(-1, TILE_WORDS)[: x[0], :6] for x in lists]
    assert sorted(map(tuple, tiles[0])) == sorted(map(tuple, tiles[1]))
    assert (np.diff(tiles[0][:, 3].clip(max=126)) <= 0).all(), "the heaviest first"


@pytest.mark.parametrize("count", [3, 1500], ids=["one_thread_a_cut", "several"])
@pytest.mark.parametrize("shown", [(0, 3000), (200, 1400), (0, 0)], ids=str)
def test_lists_of_calls_that_keep_rows_lack_tiles_without_blocks(shown, count):
  q_len = 3000
  slices = np.zeros((1, count, 6), np.int32)
  slices[0, :2] = [(*shown, 0, 900, -(2**30), 2**30), (100, 1300, 900, 1500, -(2**30), 2**30)]
  slices[0, 1, :2] = np.clip(slices[0, 1, :2], *shown)
  needs = hopper_needs(
    AttentionMask.full(q_len, 2000),
    is_backward=False,
    static_slices=None,
    slices_shape=slices.shape,
  )
  sizes = [(count, 2000)] * 2
  lists = jax.jit(lambda x: list_tiles(x, [needs] * 2, q_len, sizes, (False, True)))
  whole, short = map(np.asarray, lists(np.concatenate([slices, slices], axis=1)))
  np.testing.assert_array_equal(whole[2:LACKS], short[2:LACKS])
  assert (whole[LACKS], short[LACKS]) == (0, 1)
  tiles, kept = (x[HEADER_WORDS:].reshape(-1, TILE_WORDS)[: x[0], :6] for x in (whole, short))
  np.testing.assert_array_equal(kept, tiles[tiles[:, 3] > 0])
  assert short[1] == (kept[-1, 3] if len(kept) else 0)
  assert len(kept) < len(tiles) or shown == (0, 3000)


@pytest.mark.parametrize("count", [3, 1500], ids=["one_thread_a_cut", "several"])
def test_first_lists_have_tiles_of_marked_rows(count):
  q_len, marked = 3000, (1701, 2100)
  slices = np.zeros((1, count, 6), np.int32)
  slices[0, :2] = [(200, 1400, 0, 900, -(2**30), 2**30), (*marked, 5, 5, 0, 0)]
  needs = hopper_needs(
    AttentionMask.full(q_len, 2000),
    is_backward=False,
    static_slices=None,
    slices_shape=slices.shape,
  )
  sizes = [(count, 2000)] * 2
  both = np.concatenate([slices, slices], axis=1)

  def lists(keeps_rows):
    found = jax.jit(lambda x: list_tiles(x, [needs] * 2, q_len, sizes, keeps_rows))(both)
    return [np.asarray(x)[HEADER_WORDS:].reshape(-1, TILE_WORDS)[: x[0], :6] for x in found]

  every, _ = lists((False, False))
  first, second = lists((True, True))
  has_blocks = every[:, 3] > 0
  is_marked = (every[:, 1] < marked[1]) & (every[:, 1] + every[:, 2] > marked[0])
  assert has_blocks.any() and is_marked.any() and not (has_blocks | is_marked).all()
  np.testing.assert_array_equal(first, every[has_blocks | is_marked])
  np.testing.assert_array_equal(second, every[has_blocks])


def test_backward_calls_need_all_tiles():
  needs = hopper_needs(
    AttentionMask.full(100), is_backward=True, static_slices=None, slices_shape=(1, 2, 6)
  )
  lists = jax.jit(lambda x: list_tiles(x, [needs] * 2, 100, [(2, 100)] * 2, (False, True)))
  with pytest.raises(jax.errors.JaxRuntimeError, match="lacks is for forward calls"):
    jax.block_until_ready(lists(np.zeros((1, 4, 6), np.int32)))


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ([(2, 100), (1, 50)], "slices must be those of all lists"),
    ([(2, 200), (2, 50)], "tile_list is too small"),
    ([(2, 100), (-1, 50)], "num_slices must not be negative"),
    ([(2, 100), (2, -1)], "k_len is out of range"),
  ],
)
def test_lists_of_other_slices_are_refused(sizes, message):
  call = {"is_backward": True, "static_slices": None, "slices_shape": (1, 2, 6)}
  needs = [hopper_needs(AttentionMask.full(100, k_len), **call) for k_len in (100, 50)]
  slices = np.zeros((1, 4, 6), np.int32)
  with pytest.raises(jax.errors.JaxRuntimeError, match=message):
    jax.block_until_ready(jax.jit(lambda x: list_tiles(x, needs, 100, sizes))(slices))


def test_failed_launch_does_not_fail_the_next_call():
  """No GPU supports clusters of 64."""
  x = jnp.ones((64, 64), jnp.float32)
  start = jax.jit(lambda x: start_stand_in(x, num_sms=64, num_rounds=1, cluster_size=64))
  for _ in range(2):
    with pytest.raises(jax.errors.JaxRuntimeError, match="stand-in"):
      jax.block_until_ready(start(x))
    y = jax_magi.fused_scale_mask_softmax(x[None, None], implementation="cuda")
    np.testing.assert_allclose(y, jnp.full_like(y, 1 / 64), rtol=1e-6)
