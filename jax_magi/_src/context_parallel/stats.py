"""What a plan costs, in numbers."""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_magi._src.arguments import concrete
from jax_magi._src.context_parallel.key import RECEIVE_SIZES, SEND_SIZES, DistAttnKey
from jax_magi._src.masks.slices import area_of


@dataclasses.dataclass(frozen=True)
class PlanStats:
  """Work and traffic of each rank, for one pass over keys and values.

  Attributes:
    area: int64 `[cp_size]`, visible pairs that each rank computes.
    balance: the largest of them over the mean: 1 is even.
    num_slices: int64 `[cp_size, stages]`.
    rows_sent: int64 `[cp_size]`, rows of keys (and values) that each rank sends.
    rows_received: int64 `[cp_size]`.
    all_gather_rows: what each rank would receive if all rows went to all ranks.
    ring_rows: what each rank receives if all keys go round a ring: the same.
    share: mean of rows_received over all_gather_rows.
    busiest_share: the largest of rows_received over all_gather_rows.
    padded_rows: what each rank receives, padding included, where there is no ragged all-to-all.
    exchange: "all_gather", or "needed" for the rows that are.
  """

  area: np.ndarray
  balance: float
  num_slices: np.ndarray
  rows_sent: np.ndarray
  rows_received: np.ndarray
  all_gather_rows: int
  ring_rows: int
  share: float
  busiest_share: float
  padded_rows: int
  exchange: str


def stats_of(key: DistAttnKey) -> PlanStats:
  """See `PlanStats`."""
  slices, pairs = concrete(key.slices), concrete(key.pairs)
  spec = key.spec
  if slices is None or pairs is None or slices.ndim != 4 or slices.shape[0] != spec.cp_size:
    raise ValueError(f"stats needs one concrete key of all {spec.cp_size} ranks, got {key}")
  areas = area_of(slices)
  area = areas.sum(axis=(1, 2))
  everything = (spec.cp_size - 1) * spec.k_local
  sent = pairs[:, :, SEND_SIZES].astype(np.int64).sum(axis=(1, 2))
  received = pairs[:, :, RECEIVE_SIZES].astype(np.int64).sum(axis=(1, 2))
  pair = min(spec.k_local, spec.capacities.rows)
  padded = (spec.cp_size - 1) * pair * spec.num_transfers
  if spec.capacities.all_gather:
    sent, received = (np.full(spec.cp_size, everything) for _ in range(2))
    padded = everything
  return PlanStats(
    area=area,
    balance=float(area.max() / area.mean()) if area.any() else 1.0,
    num_slices=(areas > 0).sum(axis=2),
    rows_sent=sent,
    rows_received=received,
    all_gather_rows=everything,
    ring_rows=everything,
    share=float(received.mean() / everything) if everything else 0.0,
    busiest_share=float(received.max() / everything) if everything else 0.0,
    padded_rows=padded,
    exchange="all_gather" if spec.capacities.all_gather else "needed",
  )
