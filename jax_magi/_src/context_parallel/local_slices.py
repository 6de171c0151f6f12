"""Converts slices of the whole mask to slices of a rank's buffers, as few as possible."""

from __future__ import annotations

import numpy as np

from jax_magi._src.context_parallel.intervals import joined
from jax_magi._src.masks.slices import HI, K_BEGIN, K_END, LO, Q_BEGIN, Q_END, UNBOUNDED


def key_ranges(slices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The range of keys that each slice (int64) makes visible to some query, as begin and end."""
  begin = np.maximum(slices[:, K_BEGIN], slices[:, Q_BEGIN] + slices[:, LO])
  end = np.minimum(slices[:, K_END], slices[:, Q_END] + slices[:, HI])
  return begin, end


def moved(slices: np.ndarray, q_shift: np.ndarray, k_shift: np.ndarray) -> np.ndarray:
  """Shifts slices. Bands that hide no pair become unbounded."""
  s = slices.copy()
  s[:, [Q_BEGIN, Q_END]] += q_shift[:, None]
  s[:, [K_BEGIN, K_END]] += k_shift[:, None]
  bands = slices[:, [LO, HI]]
  bands = np.where(np.abs(bands) >= UNBOUNDED, bands, bands + (k_shift - q_shift)[:, None])
  s[:, LO] = np.where(_lets_pass_low(s, bands[:, 0]), -UNBOUNDED, bands[:, 0])
  s[:, HI] = np.where(_lets_pass_high(s, bands[:, 1]), UNBOUNDED, bands[:, 1])
  return s


def _lets_pass_low(s: np.ndarray, lo: np.ndarray) -> np.ndarray:
  return lo <= s[:, K_BEGIN] - (s[:, Q_END] - 1)


def _lets_pass_high(s: np.ndarray, hi: np.ndarray) -> np.ndarray:
  return hi >= s[:, K_END] - 1 - s[:, Q_BEGIN]


def merged(group: np.ndarray, slices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Merges neighbouring slices of each group, first along keys, then along queries.

  Slices must be as `moved` returns them. Stairs, which do not merge, are cut along keys. The
  result is sorted by group.
  """
  while True:
    count = len(slices)
    for near, far in ((K_BEGIN, Q_BEGIN), (Q_BEGIN, K_BEGIN)):
      group, slices = _merged_along(near, far, group, slices)
    if len(slices) == count:
      return _cut_along_keys(group, slices)


def _merged_along(
  near: int, far: int, group: np.ndarray, s: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Merges along the axis whose ranges begin in column `near`; `far` is the other axis.

  One band must fit both neighbours. Their ranges on the other axis begin at the same place. If one
  ends earlier, the band must hide the difference: causal queries do not see later keys.
  """
  order = np.lexsort((s[:, near], s[:, far + 1], s[:, far], group))
  group, s = group[order], s[order]
  while len(s) > 1:
    a, b = s[:-1], s[1:]
    union = a.copy()
    union[:, near + 1] = b[:, near + 1]
    union[:, far + 1] = np.maximum(a[:, far + 1], b[:, far + 1])
    union[:, LO] = np.maximum(a[:, LO], b[:, LO])
    union[:, HI] = np.minimum(a[:, HI], b[:, HI])
    can = (group[:-1] == group[1:]) & (a[:, far] == b[:, far]) & (a[:, near + 1] == b[:, near])
    for part in (a, b):
      can &= (part[:, LO] == union[:, LO]) | _lets_pass_low(part, union[:, LO])
      can &= (part[:, HI] == union[:, HI]) | _lets_pass_high(part, union[:, HI])
      can &= (part[:, far + 1] == union[:, far + 1]) | _hides_rest(part, union, far)
    if not can.any():
      break
    # In a run of neighbours, every other one absorbs its successor. The next round does the rest.
    index = np.arange(len(can))
    place = index - np.maximum.accumulate(np.where(can, -1, index)) - 1
    taken = np.flatnonzero(can & (place % 2 == 0))
    s[taken] = union[taken]
    group, s = np.delete(group, taken + 1), np.delete(s, taken + 1, axis=0)
  return group, s


def _hides_rest(s: np.ndarray, union: np.ndarray, far: int) -> np.ndarray:
  """Whether the band of the union hides what is beyond the end of a slice along axis `far`."""
  last = s[:, K_END] - s[:, Q_END]  # Of the slice's last key and query.
  return union[:, HI] <= last if far == K_BEGIN else union[:, LO] >= last


def _cut_along_keys(group: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Cuts stairs along keys instead of queries: the same pairs, in as many slices.

  A chunk of queries of a causal document sees the keys of another rank that the chunk before it
  sees, and more:

      1 1 . .        1 1 . .
      2 2 2 .   ->   1 1 2 .
      3 3 3 3        1 1 2 3

  The backward kernel goes through the queries of a key tile in blocks, slice by slice. With one
  slice, only its last block is not full.
  """
  order = np.lexsort((s[:, Q_BEGIN], s[:, K_BEGIN], group))
  group, s = group[order], s[order]
  a, b = s[:-1], s[1:]
  goes_on = (group[:-1] == group[1:]) & (a[:, K_BEGIN] == b[:, K_BEGIN])
  goes_on &= (a[:, Q_END] == b[:, Q_BEGIN]) & (a[:, K_END] < b[:, K_END])
  for part in (a, b):
    goes_on &= (part[:, LO] == -UNBOUNDED) & (part[:, HI] == UNBOUNDED)
  _, last = joined(np.append(True, ~goes_on)[: len(s)])
  steps = s.copy()
  steps[1:, K_BEGIN] = np.where(goes_on, a[:, K_END], b[:, K_BEGIN])
  steps[:, Q_END] = s[last[np.searchsorted(last, np.arange(len(s)))], Q_END]
  return group, steps
