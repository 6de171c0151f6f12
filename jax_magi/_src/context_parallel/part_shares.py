"""How the work of a stage's kernel is divided among its parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_magi._src.context_parallel.schedule import part_of_rows
from jax_magi._src.masks.slices import K_BEGIN, Q_BEGIN, area_of


class PartShares:
  """The share of a stage's visible pairs that a part of its kernel has, on each rank.

  Kernels are divided by rows of their buffers, and the last rows of a buffer are often empty.
  """

  def __init__(
    self, group: np.ndarray, slices: np.ndarray, lengths: Sequence[int], *, is_backward: bool
  ):
    """Takes the mask on the buffers of all stages.

    Args:
      group: rank * num_stages + stage, for each slice.
      slices: int64 `[n, 6]`.
      lengths: for each stage, the number of rows that are divided: keys in the backward pass,
        queries in the forward pass.
      is_backward: which of these.
    """
    self._ranks, stages = np.divmod(group, len(lengths))
    self._slices, self._lengths = slices, lengths
    self._of_stage = [np.flatnonzero(stages == stage) for stage in range(len(lengths))]
    self._column = K_BEGIN if is_backward else Q_BEGIN
    self._found: dict[tuple[int, int, int], np.ndarray] = {}

  @classmethod
  def of_tables(
    cls, tables: np.ndarray, lengths: Sequence[int], *, is_backward: bool
  ) -> PartShares:
    """For slices `[ranks, stages, num_slices, 6]`."""
    count = tables.shape[0] * tables.shape[1]
    group = np.repeat(np.arange(count), tables.shape[2])
    return cls(group, tables.reshape(-1, 6).astype(np.int64), lengths, is_backward=is_backward)

  def share(self, stage: int, part: int, num_parts: int, num_ranks: int) -> np.ndarray:
    """float64 `[ranks]`: the share of a part; 1 if there is only one."""
    if num_parts == 1:
      return np.ones(num_ranks)
    if (place := (stage, part, num_parts)) not in self._found:
      index = self._of_stage[stage]
      whole = self._slices[index]
      cut = whole.copy()
      rows = slice(self._column, self._column + 2)
      cut[:, rows] = np.clip(cut[:, rows], *part_of_rows(self._lengths[stage], part, num_parts))
      of_part, of_stage = (
        np.bincount(self._ranks[index], area_of(x), num_ranks) for x in (cut, whole)
      )
      self._found[place] = of_part / np.maximum(of_stage, 1)
    return self._found[place]
