"""The cost of an assignment of chunks to ranks: work, and rows over each kind of link.

A unit is a chunk of queries, or a few neighbouring ones. Rows and work are whole numbers, so sums
are exact in any order, and every machine computes the same costs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from jax_magi._src.context_parallel.intervals import STRIDE, joined, union, union_of_sorted

# How far the work of a rank may exceed the mean if that saves rows.
TOLERANCE = 0.04
# The weight of each pair of work above that limit.
_PENALTY = 10.0
# The share of computing or moving, whichever is shorter, that does not overlap with the other.
_EXPOSED = 0.3
# The weight of the mean cost in the objective. The largest cost has weight 1.
_MEAN_SHARE = 0.1
# The maximum number of key ranges of a unit, for few units and for many. If a unit has more, which
# is rare, the narrowest gaps between them are closed.
_MAX_RANGES, _FEWER_RANGES, _MANY_UNITS = 8, 4, 2048


@dataclasses.dataclass(frozen=True)
class Units:
  """Neighbouring chunks that stay together.

  Attributes:
    sizes: int64 `[num_units]`, the size of each unit in chunks.
    bounds: int64 `[num_units + 1]`, the bounds of the units in tokens.
    work: float64 `[num_units]`.
    begin: int64 `[num_units, num_ranges]`, the begins of the key ranges that each unit needs. The
      ranges are disjoint and ascending, and empty ones come last.
    end: int64 `[num_units, num_ranges]`, the ends of these ranges.
  """

  sizes: np.ndarray
  bounds: np.ndarray
  work: np.ndarray
  begin: np.ndarray
  end: np.ndarray

  @classmethod
  def of_chunks(
    cls, work: np.ndarray, chunk_size: int, chunk: np.ndarray, begin: np.ndarray, end: np.ndarray
  ) -> Units:
    """Units of one chunk each. Chunk number `chunk[i]` needs keys `begin[i]` to `end[i]`."""
    bounds = np.arange(len(work) + 1, dtype=np.int64) * chunk_size
    table = _table(len(work), *union(chunk, begin, end))
    return cls(np.ones(len(work), np.int64), bounds, work.astype(np.float64), *table)

  def __len__(self) -> int:
    return len(self.sizes)

  @functools.cached_property
  def own_rows(self) -> np.ndarray:
    """int64 `[num_units]`: the number of keys at a unit's own positions that it needs."""
    begin = np.maximum(self.begin, self.bounds[:-1, None])
    end = np.minimum(self.end, self.bounds[1:, None])
    return np.maximum(end - begin, 0).sum(axis=1)

  def grouped(self, factor: int, cp_size: int) -> Units:
    """Groups neighbouring units, equally many for each rank. The last units stay as they are.

    The number of units of each size is then a multiple of the number of ranks, largest size first.
    """
    num_largest = int((self.sizes == self.sizes[0]).sum())
    num_whole = num_largest // cp_size // factor * cp_size
    group = np.arange(num_whole).repeat(factor)
    group = np.append(group, num_whole + np.arange(len(self) - len(group)))
    first = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    index, column = np.nonzero(self.begin < self.end)
    ranges = union(group[index], self.begin[index, column], self.end[index, column])
    return Units(
      np.add.reduceat(self.sizes, first),
      np.append(self.bounds[first], self.bounds[-1]),
      np.add.reduceat(self.work, first),
      *_table(len(first), *ranges),
    )


def _table(
  num_units: int, unit: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Arranges sorted, disjoint ranges as `[num_units, num_ranges]`."""
  gap = begin - np.append(0, end[:-1])
  gap[np.append(True, unit[1:] != unit[:-1])[: len(unit)]] = STRIDE  # Never closed.
  order = np.lexsort((-gap, unit))
  counts = np.bincount(unit, minlength=num_units)
  starts = np.cumsum(counts) - counts
  limit = _MAX_RANGES if num_units <= _MANY_UNITS else _FEWER_RANGES
  is_wide = np.empty(len(unit), bool)
  is_wide[order] = np.arange(len(unit)) - starts[unit[order]] < limit
  first, last = joined(is_wide)
  unit, begin, end = unit[first], begin[first], end[last]
  counts = np.bincount(unit, minlength=num_units)
  place = np.arange(len(unit)) - (np.cumsum(counts) - counts)[unit]
  tables = np.zeros((2, num_units, max(int(counts.max(initial=0)), 1)), np.int64)
  tables[:, unit, place] = begin, end
  return tables[0], tables[1]


@dataclasses.dataclass(frozen=True)
class Costs:
  """The costs of one assignment. Rows are whole numbers in float64.

  Attributes:
    load: `[num_ranks]`, work.
    received: `[num_ranks]`, rows that arrive from the same node.
    sent: `[num_ranks]`, rows that leave for the same node.
    far_received: `[num_ranks]`, rows that arrive from other nodes.
    far_sent: `[num_ranks]`, rows that leave for other nodes.
    total: `[num_ranks]`, the cost of each rank.
    unit_sent: `[num_units]`, rows of a unit's keys that leave for ranks of the same node. None if
      keys have their own dispatch.
    unit_far_sent: `[num_units]`, rows of a unit's keys that leave for other nodes.
  """

  load: np.ndarray
  received: np.ndarray
  sent: np.ndarray
  far_received: np.ndarray
  far_sent: np.ndarray
  total: np.ndarray
  unit_sent: np.ndarray | None
  unit_far_sent: np.ndarray | None

  def objective(self) -> float:
    """The cost of the most expensive rank, plus a share of the mean cost."""
    return float(self.total.max() + _MEAN_SHARE * self.total.mean())

  def rows(self) -> float:
    """The mean number of rows that a rank receives."""
    return float((self.received + self.far_received).mean())

  def imbalance(self) -> int:
    """How far the largest work exceeds the mean, in steps of half a percent."""
    return int(200.0 * (self.load.max() / max(self.load.mean(), 1.0) - 1.0))


class CostModel:
  """Computes the costs of assignments of `units` to ranks in nodes.

  A row that another node needs crosses to it once, to the rank with the owner's index in that node,
  and spreads from there. Inside a node, a rank therefore sends the keys of all ranks with the same
  index in their nodes, and receives all other keys that it needs.
  """

  def __init__(
    self,
    units: Units,
    num_ranks: int,
    ranks_per_node: int,
    near_row: float,
    far_row: float,
    keys: tuple[np.ndarray, np.ndarray] | None = None,
    tolerance: float = TOLERANCE,
    expand_row: float = 0.0,
  ) -> None:
    """`keys` are bounds and ranks of chunks of keys; None if keys are with their queries."""
    self.units = units
    self.num_ranks, self.ranks_per_node = num_ranks, ranks_per_node
    self.num_nodes = num_ranks // ranks_per_node
    self.near_row, self.far_row, self.expand_row = near_row, far_row, expand_row
    self.keys = keys
    self.key_bounds = units.bounds if keys is None else keys[0]
    self.limit = units.work.sum() / num_ranks * (1.0 + tolerance)
    self._last: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    unit, column = np.nonzero(units.begin < units.end)
    begin = units.begin[unit, column]
    order = np.argsort(begin, kind="stable")
    # The unit, begin and end of each key range, sorted by begin.
    self._ranges = unit[order], begin[order], units.end[unit, column][order]

  def least(self) -> float:
    """A lower bound of the objective, for even work and units with equal needs on one rank."""
    load = self.units.work.sum() / self.num_ranks
    num_keys = int(self.key_bounds[-1])
    need = np.sort((self.units.end - self.units.begin).sum(axis=1))
    # The largest need of each rank, and of each node.
    need = need.reshape(self.num_ranks, -1)[:, -1]
    rows = np.maximum(need - num_keys // self.ranks_per_node, 0)
    far = need.reshape(self.num_nodes, -1)[:, -1:] - num_keys // self.num_nodes
    far = np.repeat(np.maximum(far, 0) / self.ranks_per_node, self.ranks_per_node, axis=1)
    total = self.total(load, rows, 0.0, far.reshape(-1), 0.0)
    return float(total.mean() + _MEAN_SHARE * total.mean())

  def owners(self, ranks: np.ndarray) -> np.ndarray:
    """The rank of each chunk of keys."""
    return ranks if self.keys is None else self.keys[1]

  def total(
    self, load: Any, received: Any, sent: Any, far_received: Any, far_sent: Any
  ) -> np.ndarray:
    """The cost of a rank. Both kinds of links work at the same time; expansion overlaps nothing."""
    moved = self.near_row * np.maximum(received, sent)
    if self.num_nodes > 1:
      moved = np.maximum(moved, self.far_row * np.maximum(far_received, far_sent))
    longer, shorter = np.maximum(load, moved), np.minimum(load, moved)
    total = longer + _EXPOSED * shorter + _PENALTY * np.maximum(load - self.limit, 0.0)
    return np.rint(total + self.expand_row * received)

  def costs(self, ranks: np.ndarray) -> Costs:
    """The costs of an assignment. `ranks` is the rank of each unit."""
    n, width = self.num_ranks, self.ranks_per_node
    load = np.bincount(ranks, self.units.work, n)
    owners = self.owners(ranks)
    places = Places(self.key_bounds, owners % width)

    rank, begin, end = self._needed_by(ranks, n)
    own = places.owned(rank % width, begin, end)
    received = np.bincount(rank, end - begin - own, n)
    rows = self._rows_of_keys(rank // width, begin, end)
    sent = places.summed(rows).reshape(-1) - np.bincount(rank, own, n)
    unit_sent = rows[owners // width, np.arange(len(owners))]
    far_rows, unit_far_sent = self._far_rows(ranks // width, owners // width)
    far_received = places.summed(far_rows).reshape(-1)
    far_sent = np.bincount(owners, unit_far_sent, n)
    total = self.total(load, received, sent, far_received, far_sent)
    of_units = (unit_sent, unit_far_sent) if self.keys is None else (None, None)
    return Costs(load, received, sent, far_received, far_sent, total, *of_units)

  def far_rows(self, ranks: np.ndarray) -> np.ndarray:
    """`[num_nodes, num_key_chunks]`: rows of each chunk of keys that cross to each node."""
    width = self.ranks_per_node
    return self._far_rows(ranks // width, self.owners(ranks) // width)[0]

  def _far_rows(self, nodes: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of each chunk of keys that cross, `[num_nodes, num_key_chunks]`, and their sum.

    Args:
      nodes: the node of each unit.
      owners: the node of each chunk of keys.
    """
    if self.num_nodes == 1:
      return np.zeros((1, len(owners))), np.zeros(len(owners))
    # Exchanges inside a node do not change the result, so the last one is kept.
    if self._last is None or not np.array_equal(nodes, self._last[0]):
      rows = self._rows_of_keys(*self._needed_by(nodes, self.num_nodes))
      rows[owners, np.arange(len(owners))] = 0.0
      self._last = nodes, rows, rows.sum(axis=0)
    return self._last[1:]

  def _needed_by(self, group: np.ndarray, num_groups: int) -> tuple[np.ndarray, ...]:
    """Disjoint (group, begin, end) of the keys that each group of units needs."""
    unit, begin, end = self._ranges
    # Small integers are sorted in linear time.
    of_range = group.astype(np.uint16 if num_groups <= 1 << 16 else np.int64)[unit]
    order = np.argsort(of_range, kind="stable")
    return union_of_sorted(of_range[order].astype(np.int64), begin[order], end[order])

  def _rows_of_keys(self, node: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """`[num_nodes, num_key_chunks]`: rows of each chunk of keys in ranges of each node, summed."""
    bounds = self.key_bounds
    shape = self.num_nodes, len(bounds)
    first = np.searchsorted(bounds, begin, side="right") - 1
    last = np.searchsorted(bounds, end, side="right") - 1
    # Count each range in whole chunks first, then correct its first and its last chunk.
    index = np.concatenate([node * shape[1] + first, node * shape[1] + last])
    sign = np.repeat([1.0, -1.0], len(first))
    part = np.concatenate([bounds[first] - begin, end - bounds[last]])
    rows = np.bincount(index, sign, shape[0] * shape[1]).reshape(shape)
    np.cumsum(rows, axis=1, out=rows)
    rows[:, :-1] *= np.diff(bounds)
    np.add.at(rows.reshape(-1), index, part)
    return rows[:, :-1]


class Places:
  """Chunks of keys, by the index of their owner in its node (its place)."""

  def __init__(self, bounds: np.ndarray, place: np.ndarray) -> None:
    self._place = place
    order = np.argsort(place.astype(np.uint16), kind="stable")
    place = place[order].astype(np.int64)
    self._begin = bounds[:-1][order]
    self._size = np.diff(bounds)[order]
    self._before = np.cumsum(self._size) - self._size
    self._sorted = place * STRIDE + self._begin
    self._firsts = np.flatnonzero(np.append(True, place[1:] != place[:-1]))

  def before(self, place: np.ndarray, position: np.ndarray) -> np.ndarray:
    """The number of keys of that place before a position, plus an offset for each place."""
    last = np.searchsorted(self._sorted, place * STRIDE + position, side="right") - 1
    last = np.maximum(last, self._firsts[place])
    inside = np.clip(position - self._begin[last], 0, self._size[last])
    return self._before[last] + inside

  def owned(self, place: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The number of keys from begin to end whose owners have that place."""
    return self.before(place, end) - self.before(place, begin)

  def summed(self, rows: np.ndarray) -> np.ndarray:
    """Sums `[num_nodes, num_key_chunks]` over places to `[num_nodes, num_places]`."""
    num_places = len(self._firsts)
    if len(rows) == 1:
      return np.bincount(self._place, rows[0], num_places)[None]
    return rows @ (self._place[:, None] == np.arange(num_places)).astype(np.float64)
