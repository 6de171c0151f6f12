"""Forward stages without merging: each query is computed once, after all its keys have arrived.

By default, a stage computes with the keys of one transfer. The results of a query are then merged
over several calls, each of which reads and writes them in float32. If many queries need few keys of
other ranks, it is faster to let queries wait:

    stage 0    queries that need only keys of their own rank
    stage s    queries whose last keys arrive with transfer s, over all keys that they need

Everything here is numpy on the host, and works on ranges.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_magi._src.context_parallel.hops import Ranks, num_blocks
from jax_magi._src.context_parallel.intervals import overlapping, starts_within, union
from jax_magi._src.context_parallel.legs import Rows
from jax_magi._src.context_parallel.local_slices import key_ranges
from jax_magi._src.context_parallel.pieces import Needs, Pieces, needed_rows, stage_slices
from jax_magi._src.context_parallel.routes import Routes, Runs, runs_of
from jax_magi._src.masks.slices import HI, K_BEGIN, K_END, LO, Q_BEGIN, Q_END, area_of

# The number of queries that are assigned to a stage together: two tiles of the kernels.
_UNIT = 256


@dataclasses.dataclass(frozen=True)
class WholeQueries:
  """The forward pass of a plan that computes each query in one stage.

  Attributes:
    slices: rank * num_stages + stage, and int64 slices over the rank's queries and the buffer.
      Stage 0 also has a slice without keys: see `_with_unseen`.
    take_runs: rank * num_transfers + transfer, and runs of the buffer of the stage after this
      transfer. Block 0 has the rank's own rows. The blocks of all transfers follow in order.
    num_rows: int64 `[rank, transfer]`, the number of rows of these buffers.
  """

  slices: tuple[np.ndarray, np.ndarray]
  take_runs: Runs
  num_rows: np.ndarray

  def areas(self) -> np.ndarray:
    """int64 `[ranks, stages]`: the number of visible pairs."""
    num_ranks, num_transfers = self.num_rows.shape
    group, slices = self.slices
    areas = np.bincount(group, area_of(slices), num_ranks * (num_transfers + 1))
    return areas.astype(np.int64).reshape(num_ranks, -1)


def whole_queries(needs: Needs, routes: Routes, ranks: Ranks) -> WholeQueries:
  """The stages of whole queries, for transfers that are already planned.

  Args:
    needs: the needs of the ranks.
    routes: the routes of the rows that ranks need from others.
    ranks: the ranks of the axis.
  """
  num_transfers = len(routes.hops)
  order = np.lexsort((routes.rows.begin, routes.rows.rank))
  rows, sources = routes.rows[order], routes.sources[order].copy()
  # Block 0 has the rank's own rows. The blocks of all transfers follow.
  counts = [sum(num_blocks(hop, ranks) for hop in hops) for hops in routes.hops]
  sources[:, 0] += np.cumsum([0, *counts])[rows.transfer]
  pieces = needs.of_chunks.cut_in_chunks(_UNIT)
  stage = _stages(pieces, rows)
  parts = [pieces[stage == s].joined() for s in range(num_transfers + 1)]
  buffers = [(needs.own, needs.own.local)]
  groups, columns, sizes = [], [], []
  for transfer, part in enumerate(parts[1:]):
    needed = needed_rows(part, needs.keys)
    buffers.append((needed, starts_within(needed.rank, needed.size)))
    needed, taken = _with_sources(needed, rows, sources)
    places = starts_within(needed.rank, needed.size)
    groups.append(needed.rank * num_transfers + transfer)
    columns.append(np.stack([np.zeros_like(places), places, *taken.T], axis=1))
    sizes.append(needed.size)
  group, size = np.concatenate(groups), np.concatenate(sizes)
  order = np.argsort(group, kind="stable")
  num_rows = np.bincount(group, size, ranks.count * num_transfers).astype(np.int64)
  return WholeQueries(
    _with_unseen(*stage_slices(parts, buffers), ranks.count, len(buffers), needs.q_local),
    runs_of(group[order], np.concatenate(columns)[order], size[order]),
    num_rows.reshape(ranks.count, num_transfers),
  )


def _with_unseen(
  group: np.ndarray, slices: np.ndarray, num_ranks: int, num_stages: int, q_local: int
) -> tuple[np.ndarray, np.ndarray]:
  """Adds a slice without keys to stage 0 of each rank, over all queries that see no key.

  No stage computes such queries. The first one fills their rows, and leaves those of other queries
  to the other stages. If all queries see keys, the slice is empty.
  """
  s, rank = slices, group // num_stages
  begin = np.maximum(s[:, Q_BEGIN], s[:, K_BEGIN] - s[:, HI])
  end = np.minimum(s[:, Q_END], s[:, K_END] - s[:, LO])
  sees = (begin < end) & (s[:, K_BEGIN] < s[:, K_END]) & (s[:, LO] <= s[:, HI])
  # With an interval before and one after all queries, gaps are between neighbours.
  edges, every = np.repeat([[-1], [q_local]], num_ranks, axis=1), np.arange(num_ranks)
  rank, begin, end = union(
    np.concatenate([rank[sees], every, every]),
    np.concatenate([begin[sees], *edges]),
    np.concatenate([end[sees], *(edges + 1)]),
  )
  is_gap = rank[1:] == rank[:-1]
  rank, begin, end = rank[1:][is_gap], end[:-1][is_gap], begin[1:][is_gap]
  unseen = np.zeros((num_ranks, 6), np.int64)
  unseen[rank[::-1], Q_BEGIN] = begin[::-1]  # Of several gaps, the first one's.
  unseen[rank, Q_END] = end  # The last one's.
  group, slices = np.append(group, every * num_stages), np.concatenate([slices, unseen])
  order = np.argsort(group, kind="stable")
  return group[order], slices[order]


def _stages(pieces: Pieces, rows: Rows) -> np.ndarray:
  """int64: the stage of each piece, after the last transfer that any piece of its queries needs."""
  index, run = overlapping(
    pieces.rank, *key_ranges(pieces.slices), rows.rank, rows.begin, rows.begin + rows.size
  )
  units, unit = np.unique(pieces.begin, return_inverse=True)
  stages = np.zeros(len(units), np.int64)
  np.maximum.at(stages, unit[index], rows.transfer[run] + 1)
  return stages[unit]


def _with_sources(needed: Rows, rows: Rows, sources: np.ndarray) -> tuple[Rows, np.ndarray]:
  """Needed ranges, cut where their sources change, and the source of each, int64 `[n, 2]`.

  `rows` are rows of other ranks, sorted by rank and position. They come from `sources` (block and
  place).
  """
  is_own = needed.owner == needed.rank
  own = needed[is_own]
  others = needed[~is_own]
  ends, row_ends = others.begin + others.size, rows.begin + rows.size
  index, run = overlapping(others.rank, others.begin, ends, rows.rank, rows.begin, row_ends)
  begin = np.maximum(others.begin[index], rows.begin[run])
  found = dataclasses.replace(
    rows[run], begin=begin, size=np.minimum(ends[index], row_ends[run]) - begin
  )
  taken = sources[run] + np.stack([np.zeros_like(begin), begin - rows.begin[run]], axis=1)
  every = Rows(
    *(
      np.concatenate([getattr(x, field.name) for x in (own, found)])
      for field in dataclasses.fields(Rows)
    )
  )
  of_own = np.stack([np.zeros_like(own.local), own.local], axis=1)
  order = np.lexsort((every.begin, every.rank))
  return every[order], np.concatenate([of_own, taken])[order]
