"""The tile lists of known masks that the CUDA kernels get; runs without a GPU."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask
from jax_magi._src.masks.slices import grouped_by_keys
from jax_magi._src.native import attention
from jax_magi._src.native.backends import CUDA
from tests.needs import (
  HEADER_WORDS,
  KEY,
  TILE_WORDS,
  WEIGHTS,
  hopper_needs,
  most_tile_rows,
  stamped_blocks,
)

if CUDA.module is None:
  pytest.skip("built without the CUDA kernels", allow_module_level=True)

MASKS = {
  "full": AttentionMask.full(1000),
  "causal": AttentionMask.causal(1000),
  "window": AttentionMask.sliding_window(3000, left=1023),
  "documents": AttentionMask.from_cu_seqlens([0, 700, 1700, 1900, 3000], causal=True),
  "odd_documents": AttentionMask.from_cu_seqlens([0, 701, 1597, 1804, 3000]),
  "tiny_documents": AttentionMask.from_cu_seqlens(np.arange(0, 1001, 10), causal=True),
  "rectangle": AttentionMask.causal(300, 1000),
  "few_queries": AttentionMask.causal(5, 1000),
  "nothing": AttentionMask.full(1000).crop(0, 1000, 2000, 3000),
}


def _tiles(mask, **call):
  words = np.frombuffer(hopper_needs(mask, **call).tile_list, np.int32)
  header, tiles = words[:HEADER_WORDS], words[HEADER_WORDS:].reshape(-1, TILE_WORDS)
  assert header[0] == len(tiles)
  assert (header[WEIGHTS] == 0).all(), "the device alone classifies tiles"
  batch, begin, num_rows, num_blocks = tiles[:, :4].T
  assert (batch == 0).all()
  assert header[1] == num_blocks[-1]
  return begin, num_rows, num_blocks


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_lists_say_what_they_are_made_for(name, is_backward):
  """Stamp, slice lists, slices and lengths: kernels reject the list of another call."""
  mask = MASKS[name]
  needs = hopper_needs(mask, is_backward=is_backward)
  key = np.frombuffer(needs.tile_list, np.int32)[KEY].tolist()
  lengths = (mask.k_len, mask.q_len) if is_backward else (mask.q_len, mask.k_len)
  stamp = needs.tile_stamp - CUDA.module.stamp_of_blocks(stamped_blocks(needs))
  assert key == [stamp, 1, len(mask.slices), *lengths, 0], "no tile is left out"


def _with_bias(mask):
  return {"bias_shape": (1, 1, mask.q_len, mask.k_len), "bias_dtype": "bfloat16"}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_every_row_is_in_one_tile(name, is_backward, has_bias):
  mask = MASKS[name]
  changes = _with_bias(mask) if has_bias else {}
  begin, num_rows, num_blocks = _tiles(mask, is_backward=is_backward, **changes)
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


def _aligned(position):
  return -(-position // 8) * 8


@pytest.mark.parametrize("head_dim", [128, 256])
def test_tiles_of_keys_are_aligned_where_there_is_a_bias(head_dim):
  """TMA loads boxes of a bias only from multiples of 16 bytes, and so do stores of 16 bytes."""
  mask = MASKS["odd_documents"]
  begin, _, _ = _tiles(mask, is_backward=True, head_dim=head_dim, **_with_bias(mask))
  assert (begin % 8 == 0).all()
  assert {0, 696, 1592, 1800} <= set(begin.tolist())


@pytest.mark.parametrize(("head_dim", "columns"), [(128, 128), (256, 64)])
def test_blocks_of_keys_are_aligned_where_there_is_a_bias(head_dim, columns):
  """They are laid from right to left, starting at a multiple of 8."""
  mask = MASKS["odd_documents"]
  dense, num_more = mask.to_dense(), 0
  tiles = _tiles(mask, is_backward=False, head_dim=head_dim, **_with_bias(mask))
  for first, count, blocks in zip(*tiles, strict=True):
    documents = {tuple(np.flatnonzero(row)[[0, -1]]) for row in dense[first : first + count]}
    assert blocks == sum(-(-(_aligned(end + 1) - begin) // columns) for begin, end in documents)
    num_more += blocks - sum(-(-(end + 1 - begin) // columns) for begin, end in documents)
  assert num_more > 0, "no end was moved into another block"


def test_tiles_are_cut_where_documents_begin():
  begin, _, _ = _tiles(MASKS["documents"], is_backward=False)
  assert {0, 700, 1700, 1900} <= set(begin.tolist())


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 71])
@pytest.mark.parametrize("q_len", [1, 5, 32, 33, 64, 65, 1000])
def test_few_queries_share_a_tile_with_other_heads(q_len, group):
  """A tile has 128 rows. It holds as many query heads as fit, but only those of one kv head."""
  needs = hopper_needs(AttentionMask.causal(q_len, 1000), is_backward=False, group=group)
  num_rows = most_tile_rows(needs)
  pack = 128 // num_rows
  assert pack in (1, 2, 4, 8, 16, 32, 64, 128) and pack * num_rows == 128
  assert pack == 1 or (pack * q_len <= 128 and pack < 2 * group)
  assert pack >= group or 2 * pack * q_len > 128, "another head would fit"


def test_stamps_tell_tilings_apart():
  calls = [
    {"is_backward": is_backward, "head_dim": head_dim, "has_softcap": has_softcap}
    for is_backward in (False, True)
    for head_dim in (64, 128, 256)
    for has_softcap in (False, True)
  ]
  stamps = [hopper_needs(AttentionMask.causal(8192), **call).tile_stamp for call in calls]
  assert 0 not in stamps and set(stamps[:6]).isdisjoint(stamps[6:])
  # Head dims 64 and 128 have tiles of 192 and 128 rows.
  assert stamps[0] != stamps[2]


@pytest.mark.parametrize("is_backward", [False, True])
def test_stamps_tell_aligned_keys(is_backward):
  mask = AttentionMask.causal(8192)
  stamps = [
    hopper_needs(mask, is_backward=is_backward, **terms).tile_stamp
    for terms in (_with_bias(mask), {})
  ]
  assert [CUDA.module.read_tile_stamp(s)["aligns_keys"] for s in stamps] == [True, False]


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("name", [*MASKS, "long"])
def test_stamps_tell_the_number_of_blocks(name, is_backward):
  """Approximately, rounded down to three bits, so that launches know whether there is much work."""
  mask = (MASKS | {"long": AttentionMask.full(1 << 17)})[name]
  call = {"is_backward": is_backward, "deterministic": is_backward}
  known, traced = (hopper_needs(mask, **call, **more) for more in ({}, {"static_slices": None}))
  blocks = _tiles(mask, **call)[2].sum()
  assert 0.8 * blocks <= stamped_blocks(known) <= blocks
  assert stamped_blocks(traced) == 0
  share = CUDA.module.stamp_of_blocks(stamped_blocks(known))
  assert traced.tile_stamp == known.tile_stamp - share


@pytest.mark.parametrize(
  ("mask", "is_long"),
  [
    (AttentionMask.full(8192), True),
    (AttentionMask.causal(16384), True),
    (AttentionMask.full(4096), False),
    (AttentionMask.sliding_window(16384, left=1023), False),
    (AttentionMask.from_cu_seqlens(np.arange(0, 16385, 2048)), False),
  ],
  ids=["full_8k", "causal_16k", "full_4k", "window", "documents"],
)
def test_stamps_tell_long_tiles_of_keys(mask, is_long):
  """With 64 blocks each, few heads are processed at once if dq is summed in order."""
  needs = hopper_needs(mask, is_backward=True, deterministic=True)
  assert (stamped_blocks(needs) >= 64 * mask.k_len // 128) == is_long


@pytest.mark.parametrize(
  ("mask", "is_long"),
  [
    (AttentionMask.full(2048), True),
    (AttentionMask.causal(4096), True),
    (AttentionMask.sliding_window(4096, left=1023), True),
    (AttentionMask.from_cu_seqlens(np.arange(0, 16385, 2048)), True),
    (AttentionMask.full(1024), False),
    (AttentionMask.causal(2048), False),
    (AttentionMask.sliding_window(2048, left=1023), False),
  ],
  ids=["full_2k", "causal_4k", "window_4k", "documents", "full_1k", "causal_2k", "window_2k"],
)
def test_stamps_tell_much_work(mask, is_long):
  """The forward kernel then runs in clusters: 60 blocks for each of 66, with 24 pairs of heads."""
  needs = hopper_needs(mask, is_backward=False)
  assert (stamped_blocks(needs) * 24 >= 60 * 66) == is_long


@pytest.mark.parametrize(
  ("head_dim", "mask", "is_in_clusters"),
  [
    (128, AttentionMask.full(4096), True),
    (128, AttentionMask.causal(8192), True),
    (128, AttentionMask.full(2048), False),
    (128, AttentionMask.causal(4096), False),
    (128, AttentionMask.sliding_window(16384, left=1023), False),
    (128, AttentionMask.from_cu_seqlens(np.arange(0, 16385, 2048)), False),
    (128, AttentionMask.from_cu_seqlens(np.arange(0, 6) * 4900), False),
    (128, AttentionMask.from_cu_seqlens(np.arange(0, 6) * 5120), True),
    # No tile may see queries but leave one of the two CTAs without keys.
    (128, AttentionMask.full(8192, 256 * 30 + 129), True),
    (128, AttentionMask.full(8192, 256 * 30 + 128), False),
    (128, AttentionMask.full(8192, 256 * 30).crop(0, 8192, 0, 256 * 30 + 128), True),
    (64, AttentionMask.full(8192), True),
    (64, AttentionMask.causal(16384), True),
    (64, AttentionMask.causal(8192), False),
    (256, AttentionMask.full(8192), False),
  ],
)
def test_backward_runs_in_clusters_where_tiles_are_long(head_dim, mask, is_in_clusters):
  """And if tiles of 256 keys have few blocks that one half does not see."""

  def most_rows(**changes):
    return most_tile_rows(hopper_needs(mask, is_backward=True, head_dim=head_dim, **changes))

  usual = 64 if head_dim == 256 else 128
  assert most_rows() == (256 if is_in_clusters else usual)
  assert most_rows(deterministic=True) == most_rows(static_slices=None) == usual
  assert most_rows(has_softcap=True) == usual
  if is_in_clusters:
    begin, num_rows, num_blocks = _tiles(mask, is_backward=True, head_dim=head_dim)
    assert num_rows.max() == 256 and num_rows.sum() == mask.k_len
    columns = 128 if head_dim == 64 else 80
    tiles = list(zip(begin, begin + num_rows, num_blocks, strict=True))
    for first, end, blocks in tiles[:4]:
      seen = mask.crop(0, mask.q_len, first, end).to_dense().any(axis=1).sum()
      assert seen <= blocks * columns < seen + 2 * columns


@pytest.mark.parametrize("name", ["full", "causal", "unknown"])
@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 65536])
def test_parts_of_dk_and_dv_fill_the_gpu(length, name):
  """48 query heads in 8 groups: a part has whole heads, and all multiprocessors have work."""
  mask = AttentionMask.causal(length) if name == "causal" else AttentionMask.full(length)
  changes = {"static_slices": None} if name == "unknown" else {}
  needs = hopper_needs(mask, is_backward=True, group=6, num_kv_heads=8, **changes)
  parts, num_tiles = needs.num_dkv_parts, 8 * (length // 128)
  assert 6 % parts == 0
  if name == "full":  # Waves of equal work: no other number ends much earlier.
    waves = {n: -(-num_tiles * n // 132) / n for n in (1, 2, 3, 6)}
    assert waves[parts] <= 1.3 * min(waves.values())
  else:  # Uneven tiles: those of one wave would end with the heaviest.
    assert parts == 6 or num_tiles * parts > 132
  assert parts == 1 or num_tiles < 8 * 132, "with plenty of tiles, sums are in vain"


@pytest.mark.parametrize("num_sms", [78, 114, 132])
@pytest.mark.parametrize("length", [1024, 2048, 4096])
def test_parts_of_dk_and_dv_fill_gpus_of_any_size(length, num_sms):
  """An H20 has 78 SMs, and an H100 for PCIe 114: the waves of one are not those of another."""
  options = {"is_backward": True, "group": 6, "num_kv_heads": 8, "num_sms": num_sms}
  parts = hopper_needs(AttentionMask.full(length), **options).num_dkv_parts
  waves = {n: -(-8 * (length // 128) * n // num_sms) / n for n in (1, 2, 3, 6)}
  assert waves[parts] <= 1.3 * min(waves.values())


def test_parts_are_for_the_gpu_that_is_there(monkeypatch):
  seen = []
  monkeypatch.setattr(attention, "num_multiprocessors", lambda: 78)
  backend = types.SimpleNamespace(
    module=types.SimpleNamespace(attention_needs=lambda **call: seen.append(call)),
    architecture=types.SimpleNamespace(name="sm90"),
    shared_memory_bytes=lambda: 227 << 10,
  )
  x = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
  slices = jax.ShapeDtypeStruct((1, 1, 6), np.int32)
  attention._needs(backend, x, x, x, slices, softcap=0.0, is_backward=True)
  assert seen[0]["num_sms"] == 78


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("length", [512, 2048])
def test_tiles_that_are_cut_by_the_device_have_no_parts(length, head_dim):
  """If dk and dv are float32 and the mask is unknown, they are added to memory."""
  mask = AttentionMask.causal(length)
  options = {"is_backward": True, "group": 6, "head_dim": head_dim, "num_kv_heads": 1}
  traced = {"static_slices": None, "has_float_grads": True}
  one_part = hopper_needs(mask, **options | {"group": 1}, **traced)
  needs = hopper_needs(mask, **options, **traced)
  assert needs.num_dkv_parts == one_part.num_dkv_parts == 1
  # Except for the counter, each query head takes the same amount.
  counter_bytes = 64  # The work counter, to the next piece of the workspace.
  assert needs.workspace_bytes - counter_bytes == 6 * (one_part.workspace_bytes - counter_bytes)
  for changes in (
    {"has_float_grads": False},
    {"deterministic": True},
    {"static_slices": np.asarray(mask.slices).tobytes()},
    {"has_alibi": True},
  ):
    assert hopper_needs(mask, **options, **traced | changes).num_dkv_parts > 1


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_parts_of_keys_have_room_where_there_may_be_any(head_dim):
  """The same for any number of heads: 264 parts of 128 or 192 rows, in float32."""
  rows = 192 if head_dim == 64 else 128
  for num_kv_heads in (1, 8):
    options = {"is_backward": False, "head_dim": head_dim, "num_kv_heads": num_kv_heads}
    small, large = (
      hopper_needs(AttentionMask.full(n), **options).workspace_bytes for n in (64, 8192)
    )
    assert small < 1024
    assert 264 * rows * head_dim * 4 < large < 1.2 * 264 * rows * head_dim * 4 + 2**20


def test_parts_depend_on_the_mask():
  options = {"is_backward": True, "group": 6, "num_kv_heads": 8}
  assert hopper_needs(AttentionMask.full(2048), **options).num_dkv_parts == 1
  assert hopper_needs(AttentionMask.causal(2048), **options).num_dkv_parts in (2, 3)


@pytest.mark.parametrize("deterministic", [False, True])
def test_lists_in_the_workspace_are_aligned(deterministic):
  """The statistics of queries precede them, an odd number of words here."""
  options = {"is_backward": True, "group": 1, "num_kv_heads": 1, "deterministic": deterministic}
  for changes in ({}, {"static_slices": None}):
    needs = hopper_needs(AttentionMask.causal(129, 131), **options, **changes)
    assert needs.workspace_bytes % 32 == 0


@pytest.mark.parametrize("is_backward", [False, True])
def test_room_for_a_list_that_the_device_makes(is_backward):
  """There may be cuts at both ends of each slice, one tile size, and an unsorted list."""
  mask = AttentionMask.from_cu_seqlens([0, 700, 1700, 1900, 3000])
  needs = hopper_needs(mask, is_backward=is_backward, static_slices=None)
  most_rows = most_tile_rows(needs)
  assert needs.tile_list_words == HEADER_WORDS + TILE_WORDS * (
    2 * (-(-3000 // most_rows) + 2 * mask.slices.shape[0])
  )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_masks_that_are_not_known_have_an_operation_that_makes_the_list(is_known, deterministic):
  mask = AttentionMask.causal(256)
  x = jax.ShapeDtypeStruct((256, 2, 64), jnp.bfloat16)

  def loss(q, slices):
    used = mask if is_known else AttentionMask(slices, 256, 256)
    return jax_magi.attention(q, q, q, used, deterministic=deterministic)[0].sum()

  traced = jax.jit(jax.grad(loss)).trace(x, jax.ShapeDtypeStruct(mask.slices.shape, np.int32))
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert (
    text.count("@jax_magi_attention_forward") == text.count("@jax_magi_attention_backward") == 1
  )
  assert text.count("@jax_magi_attention_tile_list") == (0 if is_known else 2)


@pytest.mark.parametrize(("length", "most_rows"), [(1024, 128), (1100, 192), (8192, 192)])
def test_short_queries_of_head_dim_64_have_small_tiles(length, most_rows):
  _, num_rows, _ = _tiles(AttentionMask.full(length), is_backward=False, head_dim=64)
  assert num_rows.max() == most_rows


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("length", [5, 100, 1100, 2048, 16384])
def test_plans_do_not_depend_on_batch_and_heads(length, head_dim, is_backward):
  """Plans are made before batch and heads are sharded."""
  mask = AttentionMask.causal(length)
  one, many = (
    hopper_needs(mask, batch=batch, num_kv_heads=heads, is_backward=is_backward, head_dim=head_dim)
    for batch, heads in ((1, 1), (8, 16))
  )
  assert (one.tile_list, one.tile_stamp) == (many.tile_list, many.tile_stamp)


def test_block_causal_cut_by_keys_computes_little_in_vain():
  mask = AttentionMask.block_causal(256, 4096)
  grouped = AttentionMask(grouped_by_keys(np.asarray(mask.slices)), 4096, 4096)
  pairs = [_tiles(m, is_backward=True)[2].sum() * 128 * 80 for m in (mask, grouped)]
  assert pairs[0] > 1.2 * mask.area() and pairs[1] < 1.05 * mask.area()


def test_tiles_are_cut_where_it_pays():
  """Blocks of 256 queries fill 4/3 tiles of 192, so cutting at each would be wasteful."""
  mask = AttentionMask.block_causal(256, 8192)
  grouped = AttentionMask(grouped_by_keys(np.asarray(mask.slices)), 8192, 8192)
  costs = [
    hopper_needs(m, is_backward=False, head_dim=64, group=1).tile_cost for m in (mask, grouped)
  ]
  assert costs[1] < 0.75 * costs[0]
  _, _, num_blocks = _tiles(grouped, is_backward=False, head_dim=64, group=1)
  assert num_blocks.sum() * 192 * 128 < 1.05 * mask.area()


@pytest.mark.parametrize("group", [1, 6])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seed", range(20))
def test_tiles_of_random_documents_cover_every_row(seed, head_dim, group):
  rng = np.random.default_rng(seed)
  length = int(rng.integers(1, 5000))
  bounds = np.unique([0, length, *rng.integers(0, length, rng.integers(0, 40))])
  mask = AttentionMask.from_cu_seqlens(bounds, causal=bool(seed % 2))
  tiles = _tiles(mask, is_backward=False, head_dim=head_dim, group=group)
  order = np.argsort(tiles[0])
  begin, num_rows, num_blocks = (x[order] for x in tiles)
  assert begin[0] == 0 and (begin[1:] == (begin + num_rows)[:-1]).all()
  assert begin[-1] + num_rows[-1] == length and (num_rows > 0).all()
  dense = mask.to_dense()
  for first, count, blocks in zip(begin, num_rows, num_blocks, strict=True):
    assert 128 * blocks >= dense[first : first + count].any(axis=0).sum()


def test_slices_of_another_length_are_refused():
  with pytest.raises(ValueError, match="one slice list"):
    hopper_needs(AttentionMask.causal(8), is_backward=False, static_slices=b"1234")
