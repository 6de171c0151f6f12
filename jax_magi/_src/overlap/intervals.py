"""Sets of points on a line of integers, as sorted, disjoint, non-empty half-open intervals."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
  """The set that any intervals cover together, in any order, overlapping or empty."""
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
  """What is in both of two sets. Fast where `a` is much the smaller."""
  out = []
  for begin, end in a:
    for other_begin, other_end in _meeting(b, begin, end):
      out.append((max(begin, other_begin), min(end, other_end)))
  return out


def difference(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
  """What is in set `a` but not in set `b`. Fast where `a` is much the smaller."""
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
  """The intervals of a set that share a point with another."""
  index = bisect.bisect_right(a, begin, key=lambda interval: interval[1])
  while index < len(a) and a[index][0] < end:
    yield a[index]
    index += 1


def length(a: Sequence[Interval]) -> int:
  """How many points a set has."""
  return sum(end - begin for begin, end in a)
