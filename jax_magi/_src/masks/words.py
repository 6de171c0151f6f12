"""Descriptions of masks in words."""

from __future__ import annotations

import numpy as np

from jax_magi._src.masks.slices import area_of

# The maximum number of slices that are spelled out.
_MAX_NAMED = 4


def describe_slices(slices: np.ndarray) -> str:
  """The number of visible pairs, and a description of the first slices that are not empty."""
  areas = area_of(slices)
  shown = slices[areas > 0].tolist()
  num_empty = len(slices) - len(shown)
  counts = f"{len(slices)} slice{'' if len(slices) == 1 else 's'}"
  counts += f" ({num_empty} empty)" if num_empty else ""
  first = ", ".join(map(_describe, shown[:_MAX_NAMED]))
  more = ", ..." if len(shown) > _MAX_NAMED else ""
  return f"{int(areas.sum())} visible pairs in {counts}{': ' if shown else ''}{first}{more}"


def _describe(one: list[int]) -> str:
  """`[0, 4) x [0, 4) causal`: queries, keys, and a name of `MaskType` or the band."""
  q_begin, q_end, k_begin, k_end, lo, hi = one
  # Edges that hide no pair are not shown, whatever their value.
  has_lo, has_hi = lo > k_begin - (q_end - 1), hi < k_end - 1 - q_begin
  is_lo_classic, is_hi_classic = lo == k_begin - q_begin, hi == k_end - q_end
  if not has_lo and not has_hi:
    rule = "full"
  elif (is_lo_classic or not has_lo) and (is_hi_classic or not has_hi):
    rule = {(False, True): "causal", (True, False): "inv_causal", (True, True): "bi_causal"}[
      has_lo, has_hi
    ]
  else:
    rule = f"{f'{lo} <= ' if has_lo else ''}k - q{f' <= {hi}' if has_hi else ''}"
  return f"[{q_begin}, {q_end}) x [{k_begin}, {k_end}) {rule}"
