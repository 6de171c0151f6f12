"""The masks of the kernels of a pass, some of which have only a part of a stage's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_magi._src.attention.mask_operand import PassMasks
from jax_magi._src.context_parallel.schedule import (
  ALL_ROWS,
  Step,
  part_of_rows,
  slices_of_keys,
  slices_of_queries,
)


def forward_masks(
  steps: Sequence[Step], tables: Any, lengths: Sequence[int], q_len: int, *, is_whole: bool
) -> PassMasks:
  """The masks of all kernels of the forward pass, by their steps.

  Args:
    steps: the steps of the pass.
    tables: the slices of each stage.
    lengths: the number of keys of each stage.
    q_len: the number of queries, along which kernels are divided.
    is_whole: whether each query is computed in one stage. Otherwise results are merged, and the
      last kernel rounds those of all queries.
  """
  calls = {}
  for step in (step for step in steps if step.stage >= 0):
    slices = tables[step.stage]
    if step.rows != ALL_ROWS:
      slices = slices_of_queries(slices, *part_of_rows(q_len, step.rows))
    calls[step] = slices, lengths[step.stage]
  names = list(calls)
  return PassMasks(calls, keeping_rows=names if is_whole else names[1:-1])


def backward_masks(
  steps: Sequence[Step], tables: Any, lengths: Sequence[int]
) -> tuple[PassMasks, dict[Step, slice]]:
  """The same for the backward pass, whose kernels are divided along keys, and the keys of each."""
  calls, keys = {}, {}
  for step in (step for step in steps if step.stage >= 0):
    slices = tables[step.stage]
    begin, end = part_of_rows(lengths[step.stage], step.rows)
    if step.rows != ALL_ROWS:
      slices = slices_of_keys(slices, begin, end)
    calls[step], keys[step] = (slices, end - begin), slice(begin, end)
  return PassMasks(calls), keys
