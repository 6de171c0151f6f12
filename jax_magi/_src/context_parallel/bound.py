"""Upper bounds on the capacities that any packing of documents needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_magi._src.arguments import check_choice, check_flag, check_length
from jax_magi._src.context_parallel.capacities import Capacities
from jax_magi._src.context_parallel.hop_choice import round_up
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
  # A packing shows a subset of the pairs of a single document, so it needs no other rows.
  left, right = (None, None) if window is None else window
  right = 0 if check_flag("causal", causal) else right
  mask = AttentionMask.sliding_window(length, left=left, right=right)
  options |= {"cp_size": cp_size, "dispatch": dispatch, "overlap_degree": overlap_degree}
  key = magi_attn_flex_key(mask, **options)
  need = key.capacities
  # The number of runs of neighbouring chunks of a rank.
  blocks = int((np.diff(np.asarray(key.q_chunks), axis=1) > 1).sum(axis=1).max()) + 1
  # Each document inside a block is one slice. On each side, a block also sees part of one more
  # document, whose keys may be cut by the other blocks of the rank.
  slices = max_segments + 2 * blocks * (blocks + 2)
  # The runs of a rank change only where a block's document begins or ends. The buffer of a single
  # call also contains the rank's own keys, with padding between documents.
  runs = need.runs + 2 * blocks * cp_size + (max_segments if overlap_degree == 0 else 0)
  return dataclasses.replace(
    need, slices=round_up(max(need.slices, slices)), runs=round_up(max(need.runs, runs))
  )
