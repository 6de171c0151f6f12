"""How the work of a stage's kernel is divided among its parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_magi._src.context_parallel.schedule import ALL_ROWS, WHOLE, part_of_rows
from jax_magi._src.masks.slices import K_BEGIN, Q_BEGIN, area_of

_EIGHTH = WHOLE // 8


class PartShares:
  """The share of a stage's visible pairs that a part of its kernel has, on each rank.

  Kernels are divided by rows of their buffers, and the last rows of a buffer are often empty.
  """

  def __init__(
    self,
    group: np.ndarray,
    slices: np.ndarray,
    num_ranks: int,
    lengths: Sequence[int],
    *,
    is_backward: bool,
  ):
    """Takes the mask on the buffers of all stages.

    Args:
      group: rank * num_stages + stage, for each slice.
      slices: int64 `[n, 6]`.
      num_ranks: the number of ranks.
      lengths: for each stage, the number of rows that are divided: keys in the backward pass,
        queries in the forward pass.
      is_backward: which of these.
    """
    self._ranks, stages = np.divmod(group, len(lengths))
    self._slices, self._num_ranks, self._lengths = slices, num_ranks, lengths
    self._of_stage = [np.flatnonzero(stages == stage) for stage in range(len(lengths))]
    self._column = K_BEGIN if is_backward else Q_BEGIN
    self._found: dict[tuple[int, tuple[int, int]], np.ndarray] = {}

  @classmethod
  def of_tables(
    cls, tables: np.ndarray, lengths: Sequence[int], *, is_backward: bool
  ) -> PartShares:
    """For slices `[ranks, stages, num_slices, 6]`."""
    num_ranks, num_stages, num_slices, _ = tables.shape
    group = np.repeat(np.arange(num_ranks * num_stages), num_slices)
    slices = tables.reshape(-1, 6).astype(np.int64)
    return cls(group, slices, num_ranks, lengths, is_backward=is_backward)

  def share(self, stage: int, rows: tuple[int, int]) -> np.ndarray:
    """float64 `[ranks]`: the share of the part with these rows, in 24ths of the buffer."""
    if rows == ALL_ROWS:  # Even if there is no pair: the kernel runs.
      return np.ones(self._num_ranks)
    return self._areas(stage, rows) / np.maximum(self._areas(stage, ALL_ROWS), 1)

  def cuts(self, stage: int, num_parts: int) -> tuple[int, ...]:
    """Where to divide a stage so that its parts have about as many pairs each, in 24ths.

    Cuts are at eighths: with finer ones, almost every mask would have a program of its own.
    """
    places = range(_EIGHTH, WHOLE, _EIGHTH)
    total = max(self._areas(stage, ALL_ROWS).sum(), 1)
    shares = np.array([self._areas(stage, (0, place)).sum() for place in places]) / total
    nearest = [int(np.abs(shares - part / num_parts).argmin()) for part in range(1, num_parts)]
    return tuple(places[i] for i in nearest) if len({*nearest}) == len(nearest) else ()

  def _areas(self, stage: int, rows: tuple[int, int]) -> np.ndarray:
    """float64 `[ranks]`: the visible pairs of a part."""
    if (stage, rows) not in self._found:
      index = self._of_stage[stage]
      slices = self._slices[index]
      column = slice(self._column, self._column + 2)
      slices[:, column] = np.clip(slices[:, column], *part_of_rows(self._lengths[stage], rows))
      areas = np.bincount(self._ranks[index], area_of(slices), self._num_ranks)
      self._found[stage, rows] = areas
    return self._found[stage, rows]
