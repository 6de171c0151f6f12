"""Sets of points on a line of integers, as sorted, disjoint, non-empty half-open intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
  """What is in both of two sets."""
  out = []
  i = j = 0
  while i < len(a) and j < len(b):
    begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
    if begin < end:
      out.append((begin, end))
    if a[i][1] < b[j][1]:
      i += 1
    else:
      j += 1
  return out


def difference(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
  """What is in set `a` but not in set `b`."""
  out = []
  j = 0
  for begin, end in a:
    while j < len(b) and b[j][1] <= begin:
      j += 1
    i = j
    while i < len(b) and b[i][0] < end:
      if begin < b[i][0]:
        out.append((begin, b[i][0]))
      begin = b[i][1]
      i += 1
    if begin < end:
      out.append((begin, end))
  return out


def length(a: Sequence[Interval]) -> int:
  """How many points a set has."""
  return sum(end - begin for begin, end in a)
