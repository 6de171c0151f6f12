"""Chooses the collective of a hop, from the rows that each rank sends to each other rank."""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_magi._src.context_parallel.hops import ALL, LOCAL, NODE, Hop, Ranks, moved_rows

# The simpler collective is used unless another one moves less than this share of its rows.
NEARLY_ALL = 0.9
# The maximum number of permutations of a hop. With the recommended options, XLA overlaps two
# collectives with a kernel: two permutations, or one for each of two levels.
_MOST_SHIFTS = {ALL: 2, NODE: 1, LOCAL: 1}


def cheapest_hop(level: str, size: np.ndarray, ranks: Ranks, *, permutes: bool = True) -> Hop:
  """The hop that moves the fewest rows, for rows `[sender, group size]`."""
  most = int(size.max(initial=0))
  shifts = _by_shift(size, level, ranks)
  used = np.flatnonzero(shifts)
  is_cheaper = shifts.sum() < NEARLY_ALL * (len(shifts) - 1) * most
  if permutes and 0 < len(used) <= _MOST_SHIFTS[level] and is_cheaper:
    return Hop(level, "permute", tuple(shifts[used].tolist()), tuple(used.tolist()))
  return Hop(level, "all_to_all", (most,))


def cheapest_rows(level: str, size: np.ndarray, ranks: Ranks) -> int:
  """The number of rows that the cheapest hop moves, including padding."""
  return moved_rows(cheapest_hop(level, size, ranks), ranks)


def round_up(count: int) -> int:
  """Rounds up to a power of two."""
  return 1 << max(count - 1, 0).bit_length()


def padded_rows(level: str, rows: int) -> int:
  """The capacity of a block that has room for these rows, so that similar masks share programs."""
  # Unused rows are moved, too, and between nodes they are expensive.
  parts = 8 if level == NODE else 4
  step = max(round_up(rows) // parts, 1)
  return max(-(-rows // step) * step, 1)


def hop_like(hop: Hop, size: np.ndarray, ranks: Ranks) -> Hop:
  """A hop of the same kind, with the rows that are needed."""
  if hop.kind == "all_gather":
    return hop
  if hop.kind != "permute":
    return dataclasses.replace(hop, rows=(int(size.max(initial=0)),))
  shifts = _by_shift(size, hop.level, ranks)
  missing = sorted(set(np.flatnonzero(shifts).tolist()).difference(hop.shifts))
  if missing:
    raise ValueError(
      f"capacities.hops have room for rows to ranks {list(hop.shifts)} places ahead, but "
      f"this mask needs {missing}: take the union (|) of its own capacities and these"
    )
  return dataclasses.replace(hop, rows=tuple(int(shifts[shift]) for shift in hop.shifts))


def _by_shift(sizes: np.ndarray, level: str, ranks: Ranks) -> np.ndarray:
  """For each shift, the most rows that any rank sends that many places ahead in its group."""
  group = ranks.group_size(level)
  index = ranks.index(level, np.arange(ranks.count))
  peers = (index[:, None] + np.arange(group)[None]) % group
  return np.take_along_axis(sizes, peers, axis=1).max(axis=0, initial=0).astype(np.int64)
