"""Which rank gets which chunk: the model of costs is exact, and the search follows it."""

import tracemalloc

import numpy as np
import pytest

from jax_magi import AttentionMask
from jax_magi._src.context_parallel.assignment import by_work
from jax_magi._src.context_parallel.assignment_cost import CostModel, Places, Units
from jax_magi._src.context_parallel.assignment_pack import document_begins, packed
from jax_magi._src.context_parallel.assignment_search import _new_rows
from jax_magi._src.context_parallel.chunks import num_chunks
from jax_magi._src.context_parallel.dispatch_choice import assign_by_area
from jax_magi._src.context_parallel.links import Links
from jax_magi._src.context_parallel.pieces import cut_by_chunks
from tests.cases import random_documents


def _random_units(seed, num_chunks, chunk_size, k_len, ranges=2):
  rng = np.random.default_rng(seed)
  chunk = np.repeat(np.arange(num_chunks), ranges)
  begin = rng.integers(0, k_len, len(chunk))
  end = np.minimum(begin + rng.integers(1, k_len // 3, len(chunk)), k_len)
  work = rng.integers(1, 10_000, num_chunks).astype(np.float64)
  return Units.of_chunks(work, chunk_size, chunk, begin, end), (chunk, begin, end)


def _random_ranks(seed, count, cp_size):
  ranks = np.repeat(np.arange(cp_size), count // cp_size)
  return np.random.default_rng(seed).permutation(ranks).astype(np.int32)


def _needs(needs, num_chunks, k_len):
  dense = np.zeros((num_chunks, k_len), bool)
  for chunk, begin, end in zip(*needs, strict=True):
    dense[chunk, begin:end] = True
  return dense


def _rows_token_by_token(needs, ranks, owners, cp_size, width):
  """Rows received, sent, received from other nodes, and sent to other nodes."""
  rows = np.zeros((4, cp_size), np.int64)
  needed = np.stack([needs[ranks == rank].any(axis=0) for rank in range(cp_size)])
  for token, owner in enumerate(owners):
    for node in range(cp_size // width):
      receivers = np.flatnonzero(needed[node * width : (node + 1) * width, token]) + node * width
      relay = node * width + owner % width
      if len(receivers) and node != owner // width:
        rows[2, relay] += 1
        rows[3, owner] += 1
      receivers = receivers[receivers != relay]
      rows[0, receivers] += 1
      rows[1, relay] += len(receivers)
  return rows


@pytest.mark.parametrize("is_cross", [False, True], ids=["same_tokens", "other_keys"])
@pytest.mark.parametrize("width", [1, 2, 3, 6])
@pytest.mark.parametrize("seed", range(3))
def test_costs_are_those_of_each_row(seed, width, is_cross):
  cp_size, num_chunks, chunk_size = 6, 24, 5
  k_len = 90 if is_cross else num_chunks * chunk_size
  units, needs = _random_units(seed, num_chunks, chunk_size, k_len)
  ranks = _random_ranks(seed, num_chunks, cp_size)
  owners, keys = np.repeat(ranks, chunk_size), None
  if is_cross:
    key_ranks = _random_ranks(seed + 1, 18, cp_size)
    owners, keys = np.repeat(key_ranks, 5), (np.arange(19) * 5, key_ranks)
  costs = CostModel(units, cp_size, width, 3.0, 7.0, keys).costs(ranks)
  expected = _rows_token_by_token(_needs(needs, num_chunks, k_len), ranks, owners, cp_size, width)
  found = costs.received, costs.sent, costs.far_received, costs.far_sent
  np.testing.assert_array_equal(found, expected)
  np.testing.assert_array_equal(costs.load, np.bincount(ranks, units.work))
  moved = np.maximum(3.0 * np.maximum(*expected[:2]), 7.0 * np.maximum(*expected[2:]))
  if not moved.any():
    return
  assert (costs.total >= np.maximum(costs.load, moved)).all()


@pytest.mark.parametrize("width", [2, 6])
def test_exchanges_are_foreseen(width):
  """The prediction is exact if keys stay. The search examines all pairs of two ranks' units."""
  cp_size, num_chunks = 6, 24
  units, _ = _random_units(0, num_chunks, 5, 90)
  keys = np.arange(19) * 5, _random_ranks(1, 18, cp_size)
  model = CostModel(units, cp_size, width, 1.0, 1.0, keys)
  ranks = _random_ranks(2, num_chunks, cp_size)
  ours, theirs = (np.flatnonzero(ranks == rank)[None] for rank in (0, 1))
  places = Places(model.key_bounds, keys[1] % width)
  rows = _new_rows(model, places, np.array([0]), ours, theirs)[0]
  before = model.costs(ranks).received[0]
  for i, mine in enumerate(ours[0]):
    for j, other in enumerate(theirs[0]):
      after = ranks.copy()
      after[mine], after[other] = 1, 0
      assert model.costs(after).received[0] - before == rows[i, j]


@pytest.mark.parametrize("chunks_of_rank", [1, 2, 7, 37, 64, 150])
@pytest.mark.parametrize("cp_size, width", [(2, None), (3, None), (8, 4), (12, 3), (5, 1)])
def test_all_ranks_have_equally_many_chunks(chunks_of_rank, cp_size, width):
  count = chunks_of_rank * cp_size
  units, _ = _random_units(0, count, 4, count * 4)
  for ranks in by_work(units, cp_size, Links(), width):
    assert ranks.dtype == np.int32
    np.testing.assert_array_equal(np.bincount(ranks), chunks_of_rank)


def test_documents_begin_where_nothing_is_seen_across():
  mask = AttentionMask.from_cu_seqlens([0, 5, 9, 30], causal=True)
  np.testing.assert_array_equal(document_begins(mask.slices), [0, 5, 9])
  # Queries of the third see keys of the first, and the slices are in no order.
  slices = [[9, 30, 2, 5], [5, 9, 5, 9], [0, 5, 0, 5], [30, 40, 30, 40]]
  np.testing.assert_array_equal(document_begins(np.array(slices)), [0, 30])


def test_documents_that_fit_stay_whole():
  """Only one combination fills each node: 6 + 2, 5 + 3, and 4 + 4 chunks."""
  sizes = [2, 4, 6, 3, 4, 5]
  document = np.repeat(np.arange(6), sizes)
  ranks = packed(np.ones(24), document, 3, 4)
  np.testing.assert_array_equal(np.bincount(ranks), 2)
  nodes = [np.unique(ranks[document == d] // 4).tolist() for d in range(6)]
  assert nodes[0] == nodes[2] and nodes[3] == nodes[5] and nodes[1] == nodes[4]
  assert sorted(node for (node,) in nodes) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("num_nodes, per_node", [(1, 4), (2, 4), (3, 2), (8, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_packed_documents_are_balanced(seed, num_nodes, per_node):
  """A document that is larger than a node is on nearly all nodes. Most others are on one."""
  count, size = num_nodes * per_node * 32, 256
  cu = np.array(random_documents(count * size, seed))
  document = np.searchsorted(cu, np.arange(count) * size, side="right") - 1
  work = np.arange(count) * size - cu[document] + size / 2.0  # Keys before the chunk's middle.
  ranks = packed(work, document, num_nodes, per_node)
  np.testing.assert_array_equal(np.bincount(ranks), 32)
  loads = np.bincount(ranks // per_node, work)
  assert loads.max() < 1.05 * loads.mean()
  share = np.bincount(document, work) / loads.mean()
  spread = np.array([len(set(ranks[document == d] // per_node)) for d in range(document.max() + 1)])
  assert (spread[share > 1.0] >= 0.75 * num_nodes).all()
  assert np.median(spread) == 1


def test_rows_cross_to_other_nodes_less_if_nodes_are_known():
  cp_size, size = 32, 256
  for seed in range(3):
    documents = random_documents(cp_size * 8192, seed)
    slices = AttentionMask.from_cu_seqlens(documents, causal=True).slices
    crossing = []
    for width in (None, 8):
      ranks = assign_by_area(
        cut_by_chunks(slices, size), documents[-1], size, cp_size, None, Links(), width
      )[0]
      begins, ends = np.array(documents[:-1]), np.array(documents[1:])
      chunk = np.arange(len(ranks))
      document = np.searchsorted(ends, chunk * size, side="right")
      units = Units.of_chunks(
        np.ones(len(ranks)), size, chunk, begins[document], (chunk + 1) * size
      )
      costs = CostModel(units, cp_size, 8, 1.0, 1.0).costs(ranks)
      crossing.append(np.maximum(costs.far_received, costs.far_sent).max())
    assert crossing[1] < 0.7 * crossing[0]


MANY = {
  "causal, 512 ranks": (AttentionMask.causal(1 << 21), 512, 128, None),
  "causal, 64 nodes": (AttentionMask.causal(1 << 21), 512, 128, 8),
  "causal, small chunks": (AttentionMask.causal(1 << 20), 8, 64, None),
  "documents, 64 nodes": (
    AttentionMask.from_cu_seqlens(random_documents(1 << 21, 0, median=450), causal=True),
    512,
    128,
    8,
  ),
}


@pytest.mark.parametrize(
  "name",
  [pytest.param(name, marks=pytest.mark.long) if "documents" in name else name for name in MANY],
)
def test_memory_of_many_chunks(name):
  mask, cp_size, chunk_size, width = MANY[name]
  tracemalloc.start()
  pieces = cut_by_chunks(mask.slices, chunk_size)
  ranks = assign_by_area(pieces, mask.q_len, chunk_size, cp_size, None, Links(), width)[0]
  peak_bytes = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert len(ranks) == num_chunks(mask.q_len, chunk_size, cp_size) == 16384
  # A byte for each pair of chunks would be 268 MB.
  assert peak_bytes < 200e6
