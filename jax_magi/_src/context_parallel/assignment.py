"""Assigns chunks of queries to ranks, with even work and few rows to move.

Everything here is numpy on the host and depends only on the arguments, so every process finds the
same assignment.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from jax_magi._src.context_parallel.assignment_cost import CostModel, Units
from jax_magi._src.context_parallel.assignment_level import levelled
from jax_magi._src.context_parallel.assignment_pack import packed
from jax_magi._src.context_parallel.assignment_search import improved
from jax_magi._src.context_parallel.intervals import starts_within
from jax_magi._src.context_parallel.links import Links

# Among candidates whose cost and rows are within these factors of the best, the planner takes the
# one with the most even work.
_SAME_COST, _SAME_ROWS = 1.02, 1.1
# Candidates within this factor of the best cost are planned, too.
_WORTH_A_PLAN = 1.25
# There is no search if a simple candidate is within this factor of the lower bound of the cost.
_GOOD_ENOUGH = 1.02
# The number of units that are merged into one for the next coarser search.
_FACTOR = 4
# Limits of the finest search: units of a rank, and key ranges of all units.
_UNITS_OF_RANK, _MAX_RANGES = 64, 16384
# With at least this many units, the search ends as soon as work is nearly as even as required.
_ENOUGH_UNITS, _NEARLY = 4096, 1.01
# Units of a rank when nodes are filled. Chunks would be too fine.
_UNITS_OF_RANK_FOR_NODES = 4

# How far the work of a node may exceed the mean. The limit for ranks is higher, which leaves room
# for choices inside a node.
_TOLERANCE_OF_NODES = 0.02


def contiguous(num_chunks: int, cp_size: int) -> np.ndarray:
  """int32 `[num_chunks]`: the rank of each chunk, in order."""
  return (np.arange(num_chunks) // (num_chunks // cp_size)).astype(np.int32)


def zigzag(num_chunks: int, cp_size: int) -> np.ndarray:
  """The rank of each chunk, if each rank gets the i-th block from the front and from the back."""
  block = np.arange(num_chunks) // (num_chunks // (2 * cp_size))
  return np.minimum(block, 2 * cp_size - 1 - block).astype(np.int32)


def by_work(
  chunks: Units,
  cp_size: int,
  links: Links,
  ranks_per_node: int | None = None,
  keys: tuple[np.ndarray, np.ndarray] | None = None,
  documents: np.ndarray | None = None,
) -> list[np.ndarray]:
  """A few candidates: int32 `[num_chunks]`, the rank of each chunk, equally many for each rank.

  The first candidate is the best by the rows that are needed. With padding, another one may be
  better; `plan_choice.py` decides.

  Args:
    chunks: units of one chunk.
    cp_size: the number of ranks, which divides the number of chunks.
    links: the speeds that determine the cost of rows.
    ranks_per_node: the number of neighbouring ranks that share a node, which divides `cp_size`.
      None means all ranks.
    keys: bounds and ranks of chunks of keys. None if keys are on the ranks of their queries.
    documents: int64 `[num_chunks]`, the document of each chunk. None without documents.
  """
  width = ranks_per_node or cp_size
  if cp_size == 1:
    return [contiguous(len(chunks), 1)]
  model = _model(chunks, cp_size, width, links, keys)
  candidates = _simple_candidates(chunks, cp_size)
  costs = [model.costs(ranks) for ranks in candidates]
  searched: list[np.ndarray] = []
  if min(c.objective() for c in costs) > _GOOD_ENOUGH * model.least():
    if width < cp_size and documents is not None and documents.min() < documents.max():
      ranks = packed(chunks.work, documents, cp_size // width, width)
      searched = [improved(model, ranks)]
    else:
      searched = [_near(chunks, cp_size, width, links, keys)]
    if width < cp_size and keys is None:
      searched += [levelled(model, ranks) for ranks in searched]
    candidates += searched
    costs += [model.costs(ranks) for ranks in searched]
  best = min(costs, key=lambda c: c.objective())
  good = [
    i
    for i, c in enumerate(costs)
    if c.objective() <= _SAME_COST * best.objective() and c.rows() <= _SAME_ROWS * best.rows()
  ]
  first = min(good, key=lambda i: (costs[i].imbalance(), costs[i].total.mean()))
  num_simple = len(candidates) - len(searched)
  if first < num_simple:
    return [candidates[first]]
  # The candidate "largest first" is left out: its chunks are scattered, and planning their many
  # ranges takes long.
  others = [
    i
    for i in (0, *range(num_simple, len(costs)))
    if i != first and costs[i].objective() <= _WORTH_A_PLAN * best.objective()
  ]
  return [candidates[i] for i in (first, *others)]


def _model(
  units: Units, cp_size: int, width: int, links: Links, keys: tuple[np.ndarray, np.ndarray] | None
) -> CostModel:
  """The cost model of assignments to ranks."""
  rows = links.near_row, links.far_row
  return CostModel(units, cp_size, width, *rows, keys, expand_row=links.expand_row)


def _simple_candidates(chunks: Units, cp_size: int) -> list[np.ndarray]:
  """Assignments without a search: in order, largest first, and zigzag if it fits."""
  candidates = [contiguous(len(chunks), cp_size), _largest_first(chunks.work, cp_size)]
  if len(chunks) % (2 * cp_size) == 0:
    candidates.append(zigzag(len(chunks), cp_size))
  return candidates


def _near(
  chunks: Units, cp_size: int, width: int, links: Links, keys: tuple[np.ndarray, np.ndarray] | None
) -> np.ndarray:
  """An assignment by a search among ever smaller units, which keeps neighbours together."""
  levels = _levels(chunks, cp_size)
  num_nodes = cp_size // width
  nodes = np.zeros(len(levels[0]), np.int32)
  if num_nodes > 1:
    # First assign units to nodes, each treated as one rank with the links of all its ranks.
    fine = (len(level) >= _UNITS_OF_RANK_FOR_NODES * cp_size for level in levels)
    last = next((i for i, is_fine in enumerate(fine) if is_fine), len(levels) - 1)
    node_keys = None if keys is None else (keys[0], keys[1] // width)

    def node_model(units: Units) -> CostModel:
      return CostModel(
        units, num_nodes, num_nodes, links.far_row, 0.0, node_keys, _TOLERANCE_OF_NODES
      )

    nodes = _refined(levels[: last + 1], _split(levels[0], nodes, num_nodes), node_model)
    levels = levels[last:]

  def rank_model(units: Units) -> CostModel:
    return _model(units, cp_size, width, links, keys)

  ranks = _refined(levels, _split(levels[0], nodes, width), rank_model)
  return _finer(ranks, levels[-1], chunks)


def _levels(chunks: Units, cp_size: int) -> list[Units]:
  """The levels of the search, from the coarsest units to the finest."""
  units = chunks
  while len(units) > _UNITS_OF_RANK * cp_size or units.begin.size > _MAX_RANGES:
    coarser = units.grouped(2, cp_size)
    if not _FACTOR * cp_size <= len(coarser) < len(units):
      break
    units = coarser
  levels = [units]
  while True:
    coarser = levels[0].grouped(_FACTOR, cp_size)
    if not cp_size < len(coarser) < len(levels[0]):
      return levels
    levels.insert(0, coarser)


def _refined(
  levels: list[Units], ranks: np.ndarray, make_model: Callable[[Units], CostModel]
) -> np.ndarray:
  """Refines the ranks of the coarsest units to those of the finest."""
  for number, units in enumerate(levels):
    if number:
      ranks = _finer(ranks, levels[number - 1], units)
    model = make_model(units)
    ranks = improved(model, ranks)
    if len(units) >= _ENOUGH_UNITS and model.costs(ranks).load.max() <= _NEARLY * model.limit:
      break
  return _finer(ranks, units, levels[-1])


def _split(units: Units, parts: np.ndarray, width: int) -> np.ndarray:
  """Splits the units of each part over `width` ranks in order; ranks get equally many per size."""
  order = np.lexsort((units.sizes, parts))
  group = parts[order] * (units.sizes.max() + 1) + units.sizes[order]
  count = np.bincount(group)[group]
  place = starts_within(group, np.ones_like(group))
  ranks = np.empty(len(units), np.int32)
  ranks[order] = parts[order] * width + place * width // count
  return ranks


def _finer(ranks: np.ndarray, coarse: Units, fine: Units) -> np.ndarray:
  """The ranks of the finer units that coarse units consist of."""
  return ranks[np.searchsorted(coarse.bounds, fine.bounds[:-1], side="right") - 1]


def _largest_first(work: np.ndarray, cp_size: int) -> np.ndarray:
  """Assigns the largest remaining chunk to the rank with the least work among those with room."""
  room = len(work) // cp_size
  ranks = np.empty(len(work), np.int32)
  heap = [(0.0, room, rank) for rank in range(cp_size)]
  for chunk in np.argsort(-work, kind="stable").tolist():
    load, left, rank = heapq.heappop(heap)
    ranks[chunk] = rank
    if left > 1:
      heapq.heappush(heap, (load + float(work[chunk]), left - 1, rank))
  return ranks
