"""Exchanges units between pairs of ranks, many pairs at once, as long as that pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jax_magi._src.context_parallel.assignment_cost import CostModel, Costs, Places
from jax_magi._src.context_parallel.intervals import STRIDE

# The number of rounds of exchanges. With many units, each round takes longer, so there are fewer.
_MAX_ROUNDS, _ROUNDS_TIMES_UNITS, _MIN_ROUNDS = 24, 40960, 8
# The search ends after this many rounds without an exchange.
_MAX_IDLE = 6
# The minimum relative gain of an exchange.
_LEAST_GAIN = 1e-3
# One in _SHARE_OF_WORST ranks, the most expensive ones, tries up to _NUM_PARTNERS partners.
_SHARE_OF_WORST, _NUM_PARTNERS = 8, 8
# The weight of the sum of two ranks' costs. The larger of the two costs has weight 1.
_SHARE_OF_SUM = 1.0
# The maximum number of elements of an array in a round. This bounds the memory.
_MAX_ELEMENTS = 1 << 20


def improved(model: CostModel, ranks: np.ndarray) -> np.ndarray:
  """The ranks of units after the exchanges inside nodes that pay."""
  best, costs = ranks, model.costs(ranks)
  least = costs.objective()
  idle = 0
  num_rounds = max(min(_ROUNDS_TIMES_UNITS // len(ranks), _MAX_ROUNDS), _MIN_ROUNDS)
  for number in range(num_rounds):
    a, b = _pairs(costs.total, model.ranks_per_node, number)
    gain, i, j = _exchanges(model, ranks, costs, a, b)
    chosen = _disjoint(gain, a, b)
    a, b, i, j = a[chosen], b[chosen], i[chosen], j[chosen]
    new, new_costs = ranks, costs
    # Gains were estimated as if the other ranks did not change. Undo exchanges that do not pay.
    for _ in range(2):
      if len(a):
        new = ranks.copy()
        new[i], new[j] = b, a
        new_costs = model.costs(new)
        before, after = (_of_both(c.total[a], c.total[b]) for c in (costs, new_costs))
        pays = after < before * (1.0 - _LEAST_GAIN)
        if pays.all():
          break
        a, b, i, j = a[pays], b[pays], i[pays], j[pays]
    idle = 0 if len(a) else idle + 1
    if len(a):
      ranks, costs = new, new_costs
      if costs.objective() < least:
        best, least = ranks, costs.objective()
    if idle == _MAX_IDLE:
      break
  return best


def _of_both(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """The joint cost of two ranks: the larger one, plus a share of the sum."""
  return np.maximum(a, b) + _SHARE_OF_SUM * (a + b)


def _pairs(total: np.ndarray, width: int, number: int) -> tuple[np.ndarray, np.ndarray]:
  """The pairs of ranks of a node that are examined in a round."""
  nodes = total.reshape(-1, width)
  turn, kind = divmod(number, 4)
  if kind == 2:
    # Pair neighbours first, then ranks further apart: after `width` turns, all pairs were tried.
    a = np.arange(width)
    b = (turn + 1 - a) % width
    a, b = (np.broadcast_to(x[a < b], (len(nodes), (a < b).sum())) for x in (a, b))
  else:
    order = np.argsort(nodes, axis=1, kind="stable")
    if kind == 0:
      # Pair each expensive rank with a cheap one, a different one each turn.
      half = width // 2
      a = order[:, width - half :]
      b = np.roll(order[:, :half][:, ::-1], turn, axis=1)
    else:
      # Pair the most expensive ranks with several others: one of them may need the same keys.
      worst = min(max(width // _SHARE_OF_WORST, 2), width - 1)
      num_partners = min(_NUM_PARTNERS, width - worst)
      a = np.repeat(order[:, width - worst :], num_partners, axis=1)
      place = np.arange(worst)[:, None] * num_partners + np.arange(num_partners)
      place = (place + turn * num_partners * 2 + kind // 2 * num_partners) % (width - worst)
      b = order[:, place.reshape(-1)]
  base = np.arange(len(nodes))[:, None] * width
  a, b = (base + a).reshape(-1), (base + b).reshape(-1)
  if kind % 2:
    # The share refers to all ranks, not to those of each node.
    count = max(len(total) // _SHARE_OF_WORST, 2)
    is_worst = total[a] >= np.partition(total, -count)[-count]
    a, b = a[is_worst], b[is_worst]
  return a, b


def _disjoint(gain: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """The indices of pairs with a gain, largest gain first, so that each rank occurs at most once."""
  used: set[int] = set()
  chosen = []
  order = np.argsort(-gain, kind="stable")
  order = order[: int((gain > 0).sum())]
  for index, i, j in zip(order.tolist(), a[order].tolist(), b[order].tolist(), strict=True):
    if i not in used and j not in used:
      used |= {i, j}
      chosen.append(index)
  return np.array(chosen, np.int64)


def _exchanges(
  model: CostModel, ranks: np.ndarray, costs: Costs, a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """For each pair of ranks: the estimated gain of the best exchange, and its two units."""
  members = np.argsort(ranks.astype(np.uint16), kind="stable").reshape(model.num_ranks, -1)
  num_units, num_ranges = members.shape[1], model.units.begin.shape[1]
  at_once = max(_MAX_ELEMENTS // (4 * num_units**2 * num_ranges), 1)
  places = Places(model.key_bounds, model.owners(ranks) % model.ranks_per_node)
  sizes = model.units.sizes
  gain = np.zeros(len(a))
  chosen = np.zeros((2, len(a)), np.int64)
  for first in range(0, len(a), at_once):
    some = slice(first, first + at_once)
    both = np.stack([a[some], b[some]])
    ours, theirs = members[both]
    after = _after(model, costs, places, both.reshape(-1), np.append(ours, theirs, axis=0))
    after_a, after_b = after.reshape(2, -1, num_units, num_units)
    after = _of_both(after_a, after_b.transpose(0, 2, 1))
    after[sizes[ours][:, :, None] != sizes[theirs][:, None, :]] = np.inf
    after = after.reshape(len(ours), -1)
    which = after.argmin(axis=1)
    index = np.arange(len(ours))
    gain[some] = _of_both(*costs.total[both]) * (1.0 - _LEAST_GAIN) - after[index, which]
    chosen[:, some] = ours[index, which // num_units], theirs[index, which % num_units]
  return gain, *chosen


def _after(
  model: CostModel, costs: Costs, places: Places, rank: np.ndarray, ours: np.ndarray
) -> np.ndarray:
  """`[ranks, ours, theirs]`: the cost of a rank that exchanges one of its units for another.

  The second half of the ranks are the partners of the first half.
  """
  theirs = np.roll(ours, len(ours) // 2, axis=0)

  def changed(before: np.ndarray, of_unit: np.ndarray | None) -> np.ndarray:
    before = before[rank][:, None, None]
    if of_unit is None:  # Keys do not move with queries.
      return before
    return before + (of_unit[theirs][:, None, :] - of_unit[ours][:, :, None])

  return model.total(
    changed(costs.load, model.units.work),
    changed(costs.received, None) + _new_rows(model, places, rank, ours, theirs),
    changed(costs.sent, costs.unit_sent),
    changed(costs.far_received, None),
    changed(costs.far_sent, costs.unit_far_sent),
  )


def _new_rows(
  model: CostModel, places: Places, rank: np.ndarray, ours: np.ndarray, theirs: np.ndarray
) -> np.ndarray:
  """`[ranks, ours, theirs]`: the additional rows that ranks receive after an exchange."""
  units = model.units
  place = (rank % model.ranks_per_node)[:, None]

  def ranges(members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return tuple(x[members].reshape(len(members), -1) for x in (units.begin, units.end))

  def remote(
    x: np.ndarray,
  ) -> np.ndarray:  # Positions without the rank's own keys, which need no transfer.
    return x - places.before(place, x)

  needed = _Needed(ranges(ours), ours.shape[1])
  begin, end = ranges(theirs)
  alone, shared, covered = needed.shares(remote, begin, end)
  new = (remote(end) - remote(begin) - covered).reshape(*theirs.shape, -1).sum(axis=2)
  rows = shared + (new[:, None, :] - alone[:, :, None])
  if model.keys is None:
    # The keys of the unit that leaves become remote, and those of the unit that arrives local.
    both = np.concatenate([ours, theirs], axis=1)
    by_some, by_several = needed.rows(units.bounds[both], units.bounds[both + 1])
    own = units.own_rows[both]
    # The rows that remain necessary after a unit leaves, and after one arrives.
    went = np.maximum(by_several, by_some - own)[:, : ours.shape[1]]
    came = np.maximum(by_some, own)[:, ours.shape[1] :]
    rows += went[:, :, None] - came[:, None, :]
  return rows


class _Needed:
  """The keys that each rank needs, as segments between the ends of its units' ranges."""

  def __init__(self, ranges: tuple[np.ndarray, np.ndarray], num_units: int) -> None:
    """`ranges` are the begins and ends of key ranges, `[ranks, units * ranges]` each."""
    num_ranks, num_ranges = ranges[0].shape
    points = np.concatenate(ranges, axis=1)
    order = np.argsort(points, axis=1, kind="stable")
    sign = np.where(order < num_ranges, 1, -1)
    unit = order % num_ranges // (num_ranges // num_units)
    # No unit needs the segment before the first point.
    first = np.zeros((num_ranks, 1), np.int64)
    self.points = np.append(first, np.take_along_axis(points, order, axis=1), axis=1)
    # The number of units that need the segment after each point.
    self.count = np.append(first, np.cumsum(sign, axis=1), axis=1)
    # The unit that needs it, if there is exactly one.
    only = np.append(first, np.cumsum(sign * unit, axis=1), axis=1)
    self.only = np.where(self.count == 1, only, num_units)
    self.num_units = num_units
    self._rank = np.arange(num_ranks)[:, None]
    self._sorted = (self.points + self._rank * STRIDE).reshape(-1)

  def shares(
    self, measure: Callable[[np.ndarray], np.ndarray], begin: np.ndarray, end: np.ndarray
  ) -> tuple[np.ndarray, ...]:
    """Returns three lengths: keys that only one unit needs, in total and in each range; and keys of
    each range that any unit needs.

    `measure` maps positions to numbers whose differences are lengths. The results are
    `[ranks, units]`, `[ranks, units, other units]`, and `[ranks, ranges]`.
    """
    points = measure(self.points)
    # [ranks, points, units]: the positions before each point that only this unit needs. The last
    # column has the positions that several units need, or none.
    table = np.zeros((*points.shape, self.num_units + 1), np.int32)
    place = np.arange(1, points.shape[1])
    table[self._rank, place, self.only[:, :-1]] = np.diff(points)
    np.cumsum(table, axis=1, out=table)
    ends = [(self._index(x), measure(x)) for x in (begin, end)]
    parts = []
    for index, value in ends:
      part = table[self._rank, index]
      inside = value - points[self._rank, index]
      part[self._rank, np.arange(index.shape[1]), self.only[self._rank, index]] += inside
      parts.append(part)
    shared = (parts[1] - parts[0])[:, :, :-1]
    shared = shared.reshape(len(points), self.num_units, -1, self.num_units).sum(axis=2)
    return table[:, -1, :-1], shared.transpose(0, 2, 1), self._covered(1, points, ends)

  def rows(self, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many keys of each range, `[ranks, ranges]`, any unit needs, and several units need."""
    ends = [(self._index(x), x) for x in (begin, end)]
    return self._covered(1, self.points, ends), self._covered(2, self.points, ends)

  def _covered(self, least: int, points: np.ndarray, ends: Any) -> np.ndarray:
    """The length between two ends, each an index and a measure, that `least` units or more need."""
    is_in = self.count >= least
    before = np.zeros_like(points)
    np.cumsum(np.diff(points) * is_in[:, :-1], axis=1, out=before[:, 1:])
    begin, end = (
      before[self._rank, index] + (value - points[self._rank, index]) * is_in[self._rank, index]
      for index, value in ends
    )
    return end - begin

  def _index(self, position: np.ndarray) -> np.ndarray:
    """The index of the last point at or before each position."""
    found = np.searchsorted(self._sorted, position + self._rank * STRIDE, side="right")
    return found - 1 - self._rank * self.points.shape[1]
