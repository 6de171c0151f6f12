"""Operations on vectors of intervals, in int64 numpy."""

from __future__ import annotations

import numpy as np

# The distance between the positions of different groups, which therefore never overlap.
STRIDE = 1 << 31


def exploded(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Repeats each i `counts[i]` times; returns i, and the number of the copy."""
  index = np.repeat(np.arange(len(counts)), counts)
  return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


def starts_within(group: np.ndarray, sizes: np.ndarray) -> np.ndarray:
  """The begin of each element in its group, laid out in order. `group` must be sorted."""
  ends = np.cumsum(sizes)
  is_first = np.append(True, group[1:] != group[:-1])[: len(group)]
  base = np.where(is_first, ends - sizes, 0)
  return ends - sizes - np.maximum.accumulate(base)


def joined(is_new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The first and the last index of each run of elements. A run begins where `is_new` is True."""
  first = np.flatnonzero(is_new)
  return first, np.append(first[1:], len(is_new))[: len(first)] - 1


def union(group: np.ndarray, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, ...]:
  """The union of intervals in each group, as sorted, disjoint (group, begin, end)."""
  order = np.lexsort((begin, group))
  return union_of_sorted(group[order], begin[order], end[order])


def union_of_sorted(
  group: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, ...]:
  """`union` of intervals that are sorted by group and begin."""
  reach = np.maximum.accumulate(group * STRIDE + end)
  is_new = np.append(True, group[1:] * STRIDE + begin[1:] > reach[:-1])[: len(group)]
  first, last = joined(is_new)
  return group[first], begin[first], reach[last] - group[first] * STRIDE


def cut(begin: np.ndarray, end: np.ndarray, size: int) -> tuple[np.ndarray, ...]:
  """Cuts non-empty intervals at multiples of `size`: interval, block, begin, end of each part."""
  first = begin // size
  index, block = exploded((end - 1) // size - first + 1)
  block = first[index] + block
  return (
    index,
    block,
    np.maximum(begin[index], block * size),
    np.minimum(end[index], (block + 1) * size),
  )


def overlapping(
  group: np.ndarray,
  begin: np.ndarray,
  end: np.ndarray,
  run_group: np.ndarray,
  run_begin: np.ndarray,
  run_end: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
  """The indices of intervals and of runs in the same group that share a position.

  Runs are disjoint and sorted by group and begin.
  """
  low = np.searchsorted(run_group * STRIDE + run_end, group * STRIDE + begin, side="right")
  high = np.searchsorted(run_group * STRIDE + run_begin, group * STRIDE + end, side="left")
  index, copy = exploded(np.maximum(high - low, 0))
  return index, low[index] + copy
