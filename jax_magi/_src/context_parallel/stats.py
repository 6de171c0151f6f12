"""Statistics of a plan: work and traffic."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_magi._src.context_parallel.capacities import RECEIVED, SENT, KeySpec
from jax_magi._src.context_parallel.hops import ALL, LOCAL, NODE, Hop, moved_rows
from jax_magi._src.masks.slices import area_of


@dataclasses.dataclass(frozen=True)
class LevelStats:
  """Traffic on one level: among all ranks, between nodes, or inside nodes.

  Attributes:
    rows_sent: int64 `[cp_size]`, the rows that each rank sends, including rows that it forwards.
    rows_received: int64 `[cp_size]`, the rows that each rank receives.
    padded_rows: the rows that each rank sends and receives including padding, which is what moves.
    collectives: the collectives of each transfer.
  """

  rows_sent: np.ndarray
  rows_received: np.ndarray
  padded_rows: int
  collectives: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PlanStats:
  """Work and traffic of each rank, for one pass over keys and values.

  Attributes:
    area: int64 `[cp_size]`, the number of visible pairs that each rank computes.
    balance: the largest area of a rank, divided by the mean. 1 is even.
    num_slices: int64 `[cp_size, stages]`.
    rows_sent: int64 `[cp_size]`, rows of keys (and values) that each rank sends, on all levels.
    rows_received: int64 `[cp_size]`, rows that each rank receives, on all levels.
    rows_needed: int64 `[cp_size]`, rows of other ranks that a rank's queries see.
    all_gather_rows: rows that each rank would receive in an all-gather.
    ring_rows: rows that each rank would receive in a ring, which is the same number.
    share: the mean of `rows_needed`, divided by `all_gather_rows`.
    busiest_share: the largest of `rows_needed`, divided by `all_gather_rows`.
    padded_rows: rows that each rank receives on all levels, including padding.
    transport: "all_to_all", "all_gather", "two_level" or "ragged".
    levels: `LevelStats` of "all"; or of "node" (between nodes) and "local" (inside them).
  """

  area: np.ndarray
  balance: float
  num_slices: np.ndarray
  rows_sent: np.ndarray
  rows_received: np.ndarray
  rows_needed: np.ndarray
  all_gather_rows: int
  ring_rows: int
  share: float
  busiest_share: float
  padded_rows: int
  transport: str
  levels: dict[str, LevelStats]


def stats_of(
  spec: KeySpec, areas: np.ndarray, slices: Any, take_runs: Any, pairs: tuple[Any, ...]
) -> PlanStats:
  """See `PlanStats`. The arguments are what a key has; `areas` are `[cp_size, stages]`."""
  area = areas.sum(axis=1)
  everything = (spec.cp_size - 1) * spec.k_local
  levels = {
    level: _level_stats(spec, level, np.asarray(of_level, np.int64))
    for level, of_level in zip(spec.levels, pairs, strict=True)
  }
  needed = _rows_needed(np.asarray(take_runs, np.int64))
  return PlanStats(
    area=area,
    balance=float(area.max() / area.mean()) if area.any() else 1.0,
    num_slices=(area_of(np.asarray(slices)) > 0).sum(axis=2),
    rows_sent=np.sum([level.rows_sent for level in levels.values()], axis=0),
    rows_received=np.sum([level.rows_received for level in levels.values()], axis=0),
    rows_needed=needed,
    all_gather_rows=everything,
    ring_rows=everything,
    share=float(needed.mean() / everything) if everything else 0.0,
    busiest_share=float(needed.max() / everything) if everything else 0.0,
    padded_rows=sum(level.padded_rows for level in levels.values()),
    transport=spec.transport,
    levels=levels,
  )


def _level_stats(spec: KeySpec, level: str, pairs: np.ndarray) -> LevelStats:
  sent, received = pairs[:, :, SENT].sum(axis=2), pairs[:, :, RECEIVED].sum(axis=2)
  padded, collectives = 0, []
  for t, hops in enumerate(spec.capacities.hops):
    for hop in hops:
      if hop.level == level:
        moved = moved_rows(hop, spec.ranks)
        padded += moved
        collectives.append(_name(hop))
        if hop.kind == "all_gather":
          sent[:, t] = received[:, t] = moved
  return LevelStats(sent.sum(axis=1), received.sum(axis=1), padded, tuple(collectives))


def _name(hop: Hop) -> str:
  if hop.kind != "permute":
    return f"{hop.kind} of {hop.rows[0]}"
  return " and ".join(
    f"permute of {rows} by {shift}" for rows, shift in zip(hop.rows, hop.shifts, strict=True)
  )


def _rows_needed(runs: np.ndarray) -> np.ndarray:
  """int64 `[cp_size]`: the rows of stage buffers that come from other ranks."""
  lengths = np.diff(runs[:, :, :, 1], axis=2)
  return np.where(runs[:, :, :-1, 2] > 0, lengths, 0).sum(axis=(1, 2))


def pair_rows(spec: KeySpec, pairs: tuple[Any, ...]) -> np.ndarray:
  """int64 `[sender, receiver]`: the rows that move between ranks, on all levels."""
  total = np.zeros((spec.cp_size, spec.cp_size), np.int64)
  for number, level in enumerate(spec.levels):
    groups = spec.ranks.groups(level) or [list(range(spec.cp_size))]
    sent = np.asarray(pairs[number], np.int64)[:, :, SENT].sum(axis=1)
    for group in groups:
      total[np.ix_(group, group)] += sent[group]
  if spec.transport == "all_gather":
    total = np.where(np.eye(spec.cp_size, dtype=bool), 0, spec.k_local)
  return total


# The levels in words.
LEVEL_NAMES = {ALL: "among all ranks", NODE: "between nodes", LOCAL: "inside nodes"}
