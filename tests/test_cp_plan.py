"""Plans of context parallelism: every pair once, only needed rows, even work."""

import itertools
import tracemalloc

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jax_magi
from jax_magi import AttentionMask, magi_attn_flex_key, magi_attn_varlen_key
from tests.cases import CASES, random_documents
from tests.plan_checks import execute

DISPATCHES = ("area", "zigzag", "contiguous")

# Free plans then compute each query in one stage.
MERGING_IS_SLOW = jax_magi.Links(merge_seconds=1.0)


def _check(key, mask):
  done = execute(key)
  np.testing.assert_array_equal(done.counts, mask.to_dense().astype(np.int32))
  for received, owned, shown in zip(done.received, done.owned, done.shown, strict=True):
    assert not np.isin(received, owned).any(), "a row came that the rank has"
    if len(key.spec.levels) == 1:
      assert len(np.unique(received)) == len(received), "a row came twice"
      assert np.isin(received, shown).all(), "a row came that is not needed"
  _check_crossings(key, done)
  return done


def _check_crossings(key, done):
  """A row crosses to a node at most once, and only if a rank there needs it."""
  per_node = key.spec.ranks_per_node
  crossings = [(relay // per_node, token) for relay, token in done.crossings]
  gathers = {hop.kind for hops in key.capacities.hops for hop in hops if hop.level == "node"}
  if "all_gather" in gathers:  # It brings what a node has itself, too, and what it does not need.
    assert len(set(crossings)) == len(crossings)
    return
  needed = {
    (rank // per_node, token)
    for rank, tokens in enumerate(done.shown)
    for token in tokens
    if key.spec.levels != ("all",)
  }
  owned = {(rank // per_node, token) for rank, x in enumerate(done.owned) for token in x}
  assert sorted(crossings) == sorted(needed - owned)


_DEGREES = (0, 1, 2, 4)
_COMBINATIONS = list(itertools.product((1, 2, 3, 4, 8), _DEGREES))


def _half_of_combinations(number):
  """Each size with two degrees; the next size, and the next case, meets the others."""
  return [
    combination
    for i, combination in enumerate(_COMBINATIONS)
    if (number + i + i // len(_DEGREES)) % 2 == 0
  ]


@pytest.mark.parametrize(
  ("case", "combinations"),
  [
    *((case, _half_of_combinations(number)) for number, case in enumerate(CASES)),
    *(pytest.param(case, _COMBINATIONS, marks=pytest.mark.long) for case in CASES),
  ],
  ids=lambda x: getattr(x, "name", None) or f"{len(x)} combinations",
)
def test_named_masks(case, combinations):
  for cp_size, overlap_degree in combinations:
    dispatch = DISPATCHES[_COMBINATIONS.index((cp_size, overlap_degree)) % 3]
    key = magi_attn_flex_key(
      case.mask, cp_size=cp_size, overlap_degree=overlap_degree, dispatch=dispatch
    )
    _check(key, case.mask)


@st.composite
def document_masks(draw):
  lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=12))
  types = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
  ends = np.cumsum(lengths)
  ranges = np.stack([ends - lengths, ends], axis=1)
  length = int(ends[-1]) + draw(st.integers(0, 20))
  return AttentionMask.from_ranges(ranges, ranges, types, q_len=length, k_len=length)


def test_chunks_of_a_causal_document_share_slices():
  """Own keys have one slice. Those of the other rank are cut where more queries see them."""
  key = magi_attn_flex_key(
    AttentionMask.causal(1024), cp_size=2, overlap_degree=1, dispatch=[0, 1, 1, 0, 0, 1, 1, 0]
  )
  free = -(2**30), 2**30
  own = [(0, 512, 0, 512, -(2**30), 0)]
  others = (
    [(128, 512, 0, 256, *free), (384, 512, 256, 512, *free)],
    [(0, 512, 0, 128, *free), (256, 512, 128, 384, *free)],
  )
  for tables, of_others in zip(np.asarray(key.slices), others, strict=True):
    for table, expected in zip(tables, (own, of_others), strict=True):
      assert [tuple(row) for row in table.tolist() if row[0] < row[1]] == expected


@settings(max_examples=100, deadline=None)
@given(
  mask=document_masks(),
  cp_size=st.integers(1, 4),
  overlap_degree=st.integers(0, 4),
  dispatch=st.sampled_from(DISPATCHES),
  transport=st.sampled_from(["auto", "all_to_all", "all_gather", "two_level"]),
  nodes=st.integers(1, 4),
  is_free=st.booleans(),
  links=st.sampled_from([None, MERGING_IS_SLOW]),
)
def test_documents(mask, cp_size, overlap_degree, dispatch, transport, nodes, is_free, links):
  key = magi_attn_flex_key(
    mask,
    cp_size=nodes * cp_size,
    overlap_degree=(overlap_degree,) if is_free else overlap_degree,
    dispatch=dispatch,
    transport=transport,
    ranks_per_node=cp_size,
    links=links,
  )
  assert key.whole_slices is None or is_free
  done = _check(key, mask)
  stats = key.stats()
  assert stats.area.sum() == mask.area()
  assert (stats.rows_needed <= stats.all_gather_rows).all()
  for rank, shown in enumerate(done.shown):
    assert stats.rows_needed[rank] == (~np.isin(shown, done.owned[rank])).sum()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_assignment(data):
  """Any assignment of chunks, for masks with several key ranges per row, and with other keys."""
  cp_size = data.draw(st.integers(1, 5))
  chunks = data.draw(st.integers(1, 4))
  ranks = data.draw(st.permutations(list(range(cp_size)) * chunks))
  case = data.draw(st.sampled_from(CASES))
  degree = data.draw(st.integers(0, 3))
  key = magi_attn_flex_key(case.mask, cp_size=cp_size, dispatch=ranks, overlap_degree=degree)
  _check(key, case.mask)
  again = jax_magi.key_for_new_mask(key, case.mask)
  for name in ("q_chunks", "k_chunks", "slices", "send_runs", "take_runs", "pairs"):
    jax.tree.map(np.testing.assert_array_equal, getattr(again, name), getattr(key, name))


def test_one_causal_document_is_even():
  for cp_size in (2, 3, 8, 16, 64):
    length = cp_size * 32 * 64
    key = magi_attn_flex_key(AttentionMask.causal(length), cp_size=cp_size, chunk_size=64)
    stats = key.stats()
    assert stats.balance <= 1.01, cp_size
    assert stats.busiest_share <= 1.0


@pytest.mark.parametrize("cp_size", [8, 32, pytest.param(64, marks=pytest.mark.long)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_documents_are_even_and_move_little(cp_size, causal):
  shares, busiest = [], []
  for seed in range(4):
    documents = random_documents(cp_size * 8192, seed)
    stats = magi_attn_varlen_key(documents, causal=causal, cp_size=cp_size).stats()
    assert stats.balance <= 1.05
    shares.append(stats.share)
    busiest.append(stats.busiest_share)
  if cp_size >= 32:
    assert np.mean(shares) <= 1 / 3
    assert max(busiest) <= 0.6


def test_ranks_of_a_node_share_what_crosses():
  """Between nodes, each pair of ranks moves as many rows as the busiest pair, which must be few."""
  documents = random_documents(32 * 2048, 0)
  key = magi_attn_varlen_key(
    documents, causal=True, cp_size=32, ranks_per_node=8, transport="two_level"
  )
  crossing = key.pairs[0][:, 0, 0].reshape(4, 8, 4)  # [node, place, other node]
  even = crossing.sum(axis=1).max() / 8
  assert crossing.max() <= 1.6 * even
  assert key.stats().balance <= 1.06


@pytest.mark.parametrize("transport", ["two_level", "all_to_all"])
def test_queries_stay_whole_where_merging_is_slow(transport):
  mask = AttentionMask.from_cu_seqlens(random_documents(1 << 10, 1, median=80), causal=True)
  options = {"cp_size": 8, "ranks_per_node": 4, "transport": transport, "links": MERGING_IS_SLOW}
  for degree in (1, 2, 4):
    whole = magi_attn_flex_key(mask, overlap_degree=(degree,), **options)
    merged = magi_attn_flex_key(mask, overlap_degree=degree, **options)
    assert whole.whole_slices is not None and merged.whole_slices is None
    assert whole.areas(is_forward=True).sum() == whole.areas().sum() == mask.area()
    assert whole.predict(MERGING_IS_SLOW).forward < merged.predict(MERGING_IS_SLOW).forward
    # Room for both is that of stages that merge, which any plan has.
    both = whole.capacities | merged.capacities
    assert both.whole_rows is None
    _check(magi_attn_flex_key(mask, capacities=both, **options | {"overlap_degree": degree}), mask)
    stacked = jax_magi.stack_keys([whole, merged])
    assert stacked.whole_slices is None


def test_queries_between_documents_are_marked_in_whole_plans():
  """The first stage fills their rows; see `plan_checks`. The first rank has two such ranges."""
  documents = [[0, 100], [130, 420], [460, 700], [720, 1000]]
  mask = AttentionMask.from_ranges(documents, documents, [1] * 4, q_len=1024, k_len=1024)
  options = {"cp_size": 2, "dispatch": "contiguous", "links": MERGING_IS_SLOW}
  key = magi_attn_flex_key(mask, overlap_degree=(1,), **options)
  is_marker = (key.whole_slices[..., 3] == 0) & (key.whole_slices[..., 1] > 0)
  assert key.whole_slices[is_marker][:, :2].tolist() == [[100, 460], [700 - 512, 512]]
  _check(key, mask)


def test_slices_stay_few():
  stats = magi_attn_flex_key(AttentionMask.causal(64 * 8192), cp_size=64, overlap_degree=2).stats()
  assert stats.num_slices.max() <= 4 * 32
  documents = random_documents(64 * 8192, 0)
  key = magi_attn_varlen_key(documents, causal=True, cp_size=64, overlap_degree=2)
  starts = np.searchsorted(documents, np.arange(0, 64 * 8192, key.spec.q_chunk_size), side="right")
  chunks = np.asarray(key.q_chunks)
  for rank in range(64):
    ends = np.searchsorted(documents, (chunks[rank] + 1) * key.spec.q_chunk_size, side="left")
    touched = (ends - starts[chunks[rank]] + 1).sum()
    assert key.stats().num_slices[rank].max() <= 4 * touched


def test_a_million_tokens():
  documents = random_documents(1 << 20, 0, median=230)
  assert len(documents) > 2000
  tracemalloc.start()
  key = magi_attn_varlen_key(documents, causal=True, cp_size=64)
  peak_bytes = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert key.stats().balance < 1.05
  assert peak_bytes < 200e6


def test_plans_are_the_same_every_time():
  documents = random_documents(1 << 16, 3)
  first, second = (magi_attn_varlen_key(documents, causal=True, cp_size=8) for _ in range(2))
  assert first.spec == second.spec
  for name in ("q_chunks", "slices", "send_runs", "take_runs", "pairs"):
    jax.tree.map(np.testing.assert_array_equal, getattr(first, name), getattr(second, name))


def test_capacities_pin_a_bucket():
  small = magi_attn_varlen_key([0, 500, 1024], causal=True, cp_size=4, transport="all_to_all")
  large = magi_attn_varlen_key(
    list(range(0, 1025, 8)), causal=True, cp_size=4, dispatch="zigzag", transport="all_to_all"
  )
  both = small.capacities | large.capacities
  pinned = magi_attn_varlen_key([0, 500, 1024], causal=True, cp_size=4, capacities=both)
  assert pinned.capacities == both
  _check(pinned, AttentionMask.from_cu_seqlens([0, 500, 1024], causal=True))
  with pytest.raises(ValueError, match=r"capacities.slices must be at least \d+"):
    magi_attn_varlen_key(
      list(range(0, 1025, 8)), causal=True, cp_size=4, capacities=small.capacities
    )


def test_zigzag_and_contiguous_orders():
  mask = AttentionMask.causal(64)
  zigzag = magi_attn_flex_key(mask, cp_size=4, dispatch="zigzag")
  np.testing.assert_array_equal(zigzag.q_chunks, [[0, 7], [1, 6], [2, 5], [3, 4]])
  tokens = np.arange(64)
  contiguous = magi_attn_flex_key(mask, cp_size=4, dispatch="contiguous")
  np.testing.assert_array_equal(jax_magi.dispatch(tokens, contiguous), tokens)
  small = magi_attn_flex_key(mask, cp_size=4, dispatch="zigzag", chunk_size=4)
  order = jax_magi.get_position_ids(zigzag)
  np.testing.assert_array_equal(jax_magi.get_position_ids(small), order)


@pytest.mark.parametrize("length", [64, 61, 1, 7])
def test_dispatch_and_back(length):
  key = magi_attn_flex_key(AttentionMask.causal(length), cp_size=4)
  x = np.random.default_rng(0).standard_normal((length, 3))
  ranks = jax_magi.dispatch(x, key)
  assert isinstance(ranks, np.ndarray)
  positions = jax_magi.get_position_ids(key)
  np.testing.assert_array_equal(ranks[positions < length], x[positions[positions < length]])
  assert not ranks[positions >= length].any()
  np.testing.assert_array_equal(jax_magi.undispatch(ranks, key), x)


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_padding_has_the_value_that_is_asked_for(xp):
  key = magi_attn_flex_key(AttentionMask.causal(61), cp_size=4)
  labels = jax_magi.dispatch(xp.arange(61), key, pad_value=-100)
  positions = jax_magi.get_position_ids(key)
  np.testing.assert_array_equal(labels, np.where(positions < 61, positions, -100))


def test_the_busiest_rank_is_that_which_receives_most():
  """All ranks need the first one's rows, which sends three times what each of them gets."""
  mask = AttentionMask.from_ranges([[0, 64]], [[0, 16]], q_len=64, k_len=64)
  stats = magi_attn_flex_key(mask, cp_size=4, dispatch="contiguous", transport="all_to_all").stats()
  np.testing.assert_array_equal(stats.rows_received, [0, 16, 16, 16])
  assert stats.busiest_share == pytest.approx(1 / 3)


@pytest.mark.parametrize("ranks", [[0, 1, 2, 0, 1, 2], [0, 1, -1, 0, 1, -1]], ids=str)
def test_ranks_that_do_not_exist(ranks):
  with pytest.raises(ValueError, match="each of 2 ranks equally many chunks"):
    magi_attn_flex_key(AttentionMask.causal(60), cp_size=2, dispatch=ranks)


BAD = {
  "cp_size must be positive": {"cp_size": 0},
  "chunk_size must be positive": {"chunk_size": 0},
  "at least a chunk for each rank": {"chunk_size": 100},
  "overlap_degree must lie in": {"overlap_degree": -1},
  "overlap_degree must be numbers or 'auto'": {"overlap_degree": "most"},
  "dispatch must be one of": {"dispatch": "striped"},
  "equally many chunks": {"dispatch": [0, 0, 0, 1]},
  "total_seqlen is 70": {"total_seqlen": 70},
  "capacities must be Capacities": {"capacities": 3},
  "transport must be one of": {"transport": "pigeon"},
  "ranks_per_node must be positive": {"ranks_per_node": 0},
  "ranks_per_node must divide cp_size=3": {"ranks_per_node": 2, "cp_size": 3},
  "'ragged' is for the GPUs of one node": {"transport": "ragged", "ranks_per_node": 1},
  "k_ranges and attn_type_map cannot be combined": {"k_ranges": [[0, 64]]},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
  arguments = {"q_ranges": AttentionMask.causal(64), "cp_size": 2, **BAD[message]}
  with pytest.raises(ValueError, match=message):
    magi_attn_flex_key(**arguments)


def test_both_lengths_do_not_make_it_cross_attention():
  documents = [0, 40, 128]
  for key in (
    magi_attn_varlen_key(documents, documents, causal=True, cp_size=2),
    magi_attn_flex_key([[0, 128]], [[0, 128]], total_seqlen=128, total_seqlen_k=128, cp_size=2),
  ):
    assert not key.spec.is_cross
    np.testing.assert_array_equal(key.q_chunks, key.k_chunks)
  key = magi_attn_flex_key(AttentionMask.causal(128), cp_size=2, cross_attention=True)
  assert key.spec.is_cross
  _check(key, AttentionMask.causal(128))


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_transfers_are_of_a_size(dispatch):
  key = magi_attn_flex_key(
    AttentionMask.causal(65536),
    cp_size=8,
    overlap_degree=4,
    dispatch=dispatch,
    transport="all_to_all",
  )
  received = key.pairs[0][:, :, 1].sum(axis=2)  # [rank, transfer]
  busiest = received[received.sum(axis=1).argmax()]
  assert busiest.max() <= 1.5 * busiest.mean()


def test_more_bad_arguments():
  with pytest.raises(ValueError, match="slices 0 and 1 overlap"):
    magi_attn_flex_key([[0, 8], [4, 12]], [[0, 8], [4, 12]], total_seqlen=16, cp_size=2)
  with pytest.raises(ValueError, match="the same tokens unless cross_attention"):
    magi_attn_flex_key(AttentionMask.full(8, 16), cp_size=2, cross_attention=False)
  key = magi_attn_flex_key(AttentionMask.causal(64), cp_size=2)
  with pytest.raises(ValueError, match="but the new mask has 65"):
    jax_magi.key_for_new_mask(key, AttentionMask.causal(65))
  with pytest.raises(ValueError, match="64 tokens of the key's mask"):
    jax_magi.dispatch(np.zeros(63), key)
  with pytest.raises(ValueError, match="rows of all ranks"):
    jax_magi.undispatch(np.zeros(63), key)


def test_a_picture():
  pytest.importorskip("matplotlib")
  key = magi_attn_varlen_key([0, 500, 1024], causal=True, cp_size=4)
  assert len(key.plot()) == 3
