"""Converts windows around the diagonal to bands of slices."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_magi._src.masks.slices import UNBOUNDED

# An edge of a band as an offset from the diagonal. None is no limit.
Edge = int | None


def sizes_band(
  left: Any, right: Any, *, is_causal: bool = False, name: str = ""
) -> tuple[Edge, Edge]:
  """(lo, hi) of a window of `left` keys before a query's own key and `right` keys after it.

  Args:
    left: an integer, or None for no limit.
    right: an integer, or None for no limit.
    is_causal: whether keys after the query's own key are hidden regardless of `right`.
    name: the name of the argument with both sizes, if they are not separate arguments.
  """
  for side, size in (("left", left), ("right", right)):
    is_integer = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
    if size is not None and not (is_integer and 0 <= size < UNBOUNDED):
      where = f"{name}: {side}" if name else side
      raise ValueError(f"{where} must be None or an integer in [0, 2**30), got {size!r}")
  if is_causal:
    right = 0
  return None if left is None else -int(left), None if right is None else int(right)


def window_band(name: str, window: Any, *, is_causal: bool = False) -> tuple[Edge, Edge]:
  """(lo, hi) from one argument: (left, right), an integer for both, or None for no window."""
  sizes = (window, window) if window is None or isinstance(window, (int, np.integer)) else window
  if not isinstance(sizes, (tuple, list)) or len(sizes) != 2:
    raise ValueError(f"{name} must be an integer or a pair (left, right), got {window!r}")
  return sizes_band(*sizes, is_causal=is_causal, name=name)


def band_around(diagonal: Any, band: tuple[Edge, Edge]) -> tuple[Any, Any]:
  """lo and hi of slices in which the own key of query i is `j = i + diagonal` (number or array).

  An edge without a limit stays without a limit.
  """
  diagonal = np.int32(diagonal) if isinstance(diagonal, int) else diagonal
  lo, hi = band
  return (
    diagonal * 0 - UNBOUNDED if lo is None else (diagonal + lo).clip(-UNBOUNDED, UNBOUNDED),
    diagonal * 0 + UNBOUNDED if hi is None else (diagonal + hi).clip(-UNBOUNDED, UNBOUNDED),
  )
