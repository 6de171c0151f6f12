"""The plan of a mask over ranks: who owns which tokens, what moves, and what each rank computes.

Everything here is numpy on the host, from ranges to ranges: no array is as long as the sequence, no
process asks another one, and all find the same plan.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_magi._src.context_parallel import assignment
from jax_magi._src.context_parallel.assignment_cost import Units
from jax_magi._src.context_parallel.assignment_pack import document_begins
from jax_magi._src.context_parallel.chunks import Dispatch, num_chunks
from jax_magi._src.context_parallel.hops import Hop, Ranks
from jax_magi._src.context_parallel.intervals import exploded, starts_within
from jax_magi._src.context_parallel.legs import Rows
from jax_magi._src.context_parallel.links import Links
from jax_magi._src.context_parallel.local_slices import key_ranges
from jax_magi._src.context_parallel.pieces import (
  cut_by_chunks,
  needed_rows,
  own_rows,
  pieces_of,
  stage_slices,
)
from jax_magi._src.context_parallel.routes import (
  NEARLY_ALL,
  Runs,
  find_routes,
  gathers_nodes,
  levels_of,
  moved_by_transport,
  runs_of,
  with_transfers,
)
from jax_magi._src.context_parallel.schedule import Order
from jax_magi._src.context_parallel.whole_queries import WholeQueries, whole_queries
from jax_magi._src.masks.slices import Q_BEGIN, area_of


def assign_by_area(
  slices: np.ndarray,
  q_len: int,
  chunk_size: int,
  cp_size: int,
  keys: Dispatch | None,
  links: Links,
  ranks_per_node: int | None = None,
) -> list[np.ndarray]:
  """int32: the rank of each chunk of queries, and of the keys of the same number if keys is None.

  There are several, the most promising first.

  Args:
    slices: int64 `[num_slices, 6]`.
    q_len: number of queries.
    chunk_size: of queries.
    cp_size: number of ranks.
    keys: where keys are, if they are dispatched on their own.
    links: what moving a row costs.
    ranks_per_node: neighbouring ranks that share a node; None is all.
  """
  count = num_chunks(q_len, chunk_size, cp_size)
  pieces, _, chunk = cut_by_chunks(slices, chunk_size)
  work = np.bincount(chunk, area_of(pieces), count)
  units = Units.of_chunks(work, chunk_size, chunk, *key_ranges(pieces))
  owners = documents = None
  if keys is not None:
    owners = np.arange(keys.num_chunks + 1) * keys.chunk_size, keys.ranks
  else:
    documents = _documents(slices, pieces, chunk, count, chunk_size)
  return assignment.by_work(units, cp_size, links, ranks_per_node, owners, documents)


def _documents(
  slices: np.ndarray, pieces: np.ndarray, chunk: np.ndarray, count: int, chunk_size: int
) -> np.ndarray:
  """int64 `[count]`: the document of each chunk; of several, the one that needs the most keys."""
  begins = document_begins(slices)

  def document(position: np.ndarray) -> np.ndarray:
    return np.maximum(np.searchsorted(begins, position, side="right") - 1, 0)

  found = document(np.arange(count) * chunk_size)
  first, last = key_ranges(pieces)
  order = np.argsort(last - first, kind="stable")
  found[chunk[order]] = document(pieces[order, Q_BEGIN])  # The last one counts.
  return found


@dataclasses.dataclass(frozen=True)
class Plan:
  """What the ranks do, as ragged tables.

  A stage is one call of the kernel. Without overlap there is one, over a buffer of all keys that
  the rank needs. With overlap, the first is over the rank's own keys, and each other one over a
  buffer of keys that one transfer brings. Buffers are in the order of the sequence.

  Attributes:
    overlap_degree: stages with a transfer.
    num_stages: calls of the kernel.
    num_transfers: transfers.
    slices: rank * num_stages + stage, and int64 slices of its queries and the stage's buffer.
    hops: of each transfer, with as many rows as are needed.
    send_runs: for each level, sender * num_transfers + transfer, and runs of what it sends.
    take_runs: receiver * num_transfers + transfer, and runs of the stage's buffer.
    sizes: for each level, int64 `[sender, transfer, group size]`, rows.
    num_rows: int64 `[receiver, transfer]`, rows of a stage's buffer.
    transport: how rows travel.
    ranks: of the axis.
    whole: another forward pass with the same transfers, in which no query is divided; or None.
    orders: of the steps of the forward and of the backward pass; None are the default ones.
  """

  overlap_degree: int
  num_stages: int
  num_transfers: int
  slices: tuple[np.ndarray, np.ndarray]
  hops: tuple[tuple[Hop, ...], ...]
  send_runs: tuple[Runs, ...]
  take_runs: Runs
  sizes: tuple[np.ndarray, ...]
  num_rows: np.ndarray
  transport: str
  ranks: Ranks
  whole: WholeQueries | None = None
  orders: tuple[Order | None, Order | None] = (None, None)

  def areas(self) -> np.ndarray:
    """int64 `[ranks, stages]`: visible pairs."""
    group, slices = self.slices
    areas = np.bincount(group, area_of(slices), self.ranks.count * self.num_stages)
    return areas.astype(np.int64).reshape(self.ranks.count, self.num_stages)


def make_plan(
  slices: np.ndarray,
  queries: Dispatch,
  keys: Dispatch,
  overlap_degree: int,
  ranks: Ranks,
  transport: str = "auto",
  given: tuple[tuple[Hop, ...], ...] | None = None,
  links: Links | None = None,
  is_whole: bool | None = None,
) -> Plan:
  """The plan of a mask (int32 slices) on a dispatch.

  Args:
    slices: of the mask.
    queries: where they are.
    keys: likewise.
    overlap_degree: as in `magi_attn_flex_key`.
    ranks: of the axis, and their nodes.
    transport: how rows travel; "auto" is the one that takes the least time.
    given: hops whose kinds the plan has to keep, or None.
    links: what rows cost, for "auto".
    is_whole: whether to plan whole queries, too. None is unless whole parts of all ranks' rows
      move: then most queries would wait for the last transfer.
  """
  of_chunks = pieces_of(slices, queries)
  pieces = of_chunks.joined()
  rows = needed_rows(pieces, keys)
  # Where the caller asked for pairs of equal size, all masks shall travel alike.
  permutes = transport != "all_to_all"
  if transport == "auto":
    transport = _cheapest(rows, keys.local_length, ranks, links or Links())
  gathers = _gathers(rows, keys.local_length, ranks, transport, given)
  num_transfers = max(overlap_degree, 1)
  arguments = keys.local_length, ranks, transport, num_transfers, gathers
  rows = with_transfers(rows, *arguments)
  if overlap_degree:
    rows = rows[rows.owner != rows.rank]  # Own keys are a stage, and travel nowhere.
  rows = rows[np.lexsort((rows.begin, rows.transfer, rows.rank))]
  routes = find_routes(rows, *arguments, permutes, given)

  group = rows.rank * num_transfers + rows.transfer
  places = starts_within(group, rows.size)
  taken = np.stack([np.zeros_like(places), places, *routes.sources.T], axis=1)
  num_rows = np.bincount(group, rows.size, keys.cp_size * num_transfers).astype(np.int64)
  buffers = [(rows[rows.transfer == t], places[rows.transfer == t]) for t in range(num_transfers)]
  if overlap_degree:
    own = own_rows(keys)
    buffers.insert(0, (own, own.local))
  whole = None
  if overlap_degree and (not gathers if is_whole is None else is_whole):
    whole = whole_queries(of_chunks, routes, keys, ranks)
  return Plan(
    overlap_degree=overlap_degree,
    num_stages=len(buffers),
    num_transfers=num_transfers,
    slices=stage_slices([pieces] * len(buffers), buffers),
    hops=routes.hops,
    send_runs=routes.send_runs,
    take_runs=runs_of(group, taken, rows.size),
    sizes=routes.sizes,
    num_rows=num_rows.reshape(keys.cp_size, num_transfers),
    transport=transport,
    ranks=ranks,
    whole=whole,
  )


def _gathers(
  rows: Rows, k_local: int, ranks: Ranks, transport: str, given: tuple[tuple[Hop, ...], ...] | None
) -> bool:
  """Whether whole parts of all ranks' rows move, at least between nodes."""
  if given is not None:
    return any(hop.kind == "all_gather" for hops in given for hop in hops)
  if len(levels_of(transport, ranks)) == 2:
    return gathers_nodes(rows, k_local, ranks)
  return transport == "all_gather"


def _cheapest(rows: Rows, k_local: int, ranks: Ranks, links: Links) -> str:
  """The transport that takes the least time; of those that take about as long, the simplest."""
  if ranks.count == 1:
    return "all_to_all"
  moved = moved_by_transport(rows, k_local, ranks)

  def cost(transport: str) -> float:
    far, near = moved[transport]
    return max(far * links.far_row, near * links.near_row)

  best = min(moved, key=cost)
  return "all_gather" if NEARLY_ALL * cost("all_gather") <= cost(best) else best


def to_table(
  group: np.ndarray, columns: np.ndarray, num_groups: int, capacity: int, fill: int
) -> np.ndarray:
  """int32 `[num_groups, capacity, columns]`: sorted groups side by side, filled up with `fill`."""
  table = np.full((num_groups, capacity, columns.shape[1]), fill, np.int32)
  counts = np.bincount(group, minlength=num_groups)
  rows, places = exploded(counts)
  table[rows, places] = columns
  return table
