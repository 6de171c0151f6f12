"""Sets of integers, as sorted, disjoint, non-empty half-open intervals."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
  """The union of intervals, which may be unsorted, overlapping or empty."""
  out: list[Interval] = []
  for begin, end in sorted(intervals):
    if begin >= end:
      continue
    if out and begin <= out[-1][1]:
      out[-1] = (out[-1][0], max(out[-1][1], end))
    else:
      out.append((begin, end))
  return out


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
  """The intersection of two sets. Fast if `a` is much smaller than `b`."""
  out = []
  for begin, end in a:
    for other_begin, other_end in _meeting(b, begin, end):
      out.append((max(begin, other_begin), min(end, other_end)))
  return out


def difference(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
  """The points of set `a` that are not in set `b`. Fast if `a` is much smaller than `b`."""
  out = []
  for begin, end in a:
    for other_begin, other_end in _meeting(b, begin, end):
      if begin < other_begin:
        out.append((begin, other_begin))
      begin = other_end
    if begin < end:
      out.append((begin, end))
  return out


def _meeting(a: Sequence[Interval], begin: int, end: int) -> Iterator[Interval]:
  """Yields the intervals of a set that share a point with [begin, end)."""
  index = bisect.bisect_right(a, begin, key=lambda interval: interval[1])
  while index < len(a) and a[index][0] < end:
    yield a[index]
    index += 1


def length(a: Sequence[Interval]) -> int:
  """The number of points in a set."""
  return sum(end - begin for begin, end in a)
