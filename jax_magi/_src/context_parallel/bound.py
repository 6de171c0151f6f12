"""How much any packing of documents can need of a key."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_magi._src.arguments import check_choice, check_flag, check_length
from jax_magi._src.context_parallel.capacities import Capacities, round_up
from jax_magi._src.context_parallel.make_keys import magi_attn_flex_key
from jax_magi._src.masks.mask import AttentionMask


def capacities_of_any_packing(
  length: int,
  cp_size: int,
  max_segments: int,
  window: tuple[int | None, int | None] | None,
  dispatch: Any,
  *,
  causal: bool,
  overlap_degree: int,
  **options: Any,
) -> Capacities:
  """See `Capacities.bound`."""
  check_length("max_segments", max_segments)
  check_choice("overlap_degree", overlap_degree, (0, 1))
  if isinstance(dispatch, str) and dispatch == "area":
    raise NotImplementedError(
      "dispatch='area' chooses the ranks of chunks by the documents, so there is no bound for all "
      "packings; use 'zigzag', or the union of the capacities of representative keys"
    )
  # A packing shows a part of what a single document shows, so it needs no other rows.
  left, right = (None, None) if window is None else window
  right = 0 if check_flag("causal", causal) else right
  mask = AttentionMask.sliding_window(length, left=left, right=right)
  options |= {"cp_size": cp_size, "dispatch": dispatch, "overlap_degree": overlap_degree}
  key = magi_attn_flex_key(mask, **options)
  need = key.capacities
  # Runs of neighbouring chunks that a rank has.
  blocks = int((np.diff(np.asarray(key.q_chunks), axis=1) > 1).sum(axis=1).max()) + 1
  # Documents inside a block are a slice each. On either side, a block sees one document more, whose
  # keys other blocks of the rank cut.
  slices = max_segments + 2 * blocks * (blocks + 2)
  # A rank takes or sends other runs only where a block's document begins or ends. The buffer of a
  # single call has its own keys, too, with padding between documents.
  runs = need.runs + 2 * blocks * cp_size + (max_segments if overlap_degree == 0 else 0)
  return dataclasses.replace(
    need, slices=round_up(max(need.slices, slices)), runs=round_up(max(need.runs, runs))
  )
