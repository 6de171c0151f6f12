"""The plan of a mask over ranks: who owns which tokens, what moves, and what each rank computes.

Everything here is numpy on the host, and works on ranges: no array is as long as the sequence. All
processes compute the same plan without communication.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_magi._src.context_parallel.hops import Hop, Ranks
from jax_magi._src.context_parallel.intervals import exploded, starts_within
from jax_magi._src.context_parallel.links import Links
from jax_magi._src.context_parallel.pieces import Needs, stage_slices
from jax_magi._src.context_parallel.routes import Runs, find_routes, runs_of
from jax_magi._src.context_parallel.schedule import Order
from jax_magi._src.context_parallel.transfers import with_transfers
from jax_magi._src.context_parallel.transport_choice import choose_transport
from jax_magi._src.context_parallel.whole_queries import WholeQueries, whole_queries
from jax_magi._src.masks.slices import area_of


@dataclasses.dataclass(frozen=True)
class Plan:
  """What the ranks do, as ragged tables.

  A stage is one call of the kernel. Without overlap, there is one stage, over a buffer of all keys
  that the rank needs. With overlap, the first stage is over the rank's own keys, and each other
  stage over a buffer of keys that one transfer brings. Buffers are in the order of the sequence.

  Attributes:
    overlap_degree: the number of stages with a transfer.
    num_stages: the number of kernel calls.
    num_transfers: the number of transfers.
    slices: rank * num_stages + stage, and int64 slices over the rank's queries and the buffer.
    hops: the hops of each transfer, with as many rows as are needed.
    send_runs: for each level, sender * num_transfers + transfer, and runs of the rows to send.
    take_runs: receiver * num_transfers + transfer, and runs of the stage's buffer.
    sizes: for each level, int64 `[sender, transfer, group size]`, the number of rows.
    num_rows: int64 `[receiver, transfer]`, the number of rows of a stage's buffer.
    transport: how rows travel.
    ranks: the ranks of the axis.
    whole: another forward pass with the same transfers, which computes each query in one stage; or
      None.
    orders: the orders of steps in the forward and the backward pass. None means the default orders.
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
    """int64 `[ranks, stages]`: the number of visible pairs."""
    group, slices = self.slices
    areas = np.bincount(group, area_of(slices), self.ranks.count * self.num_stages)
    return areas.astype(np.int64).reshape(self.ranks.count, self.num_stages)


def make_plan(
  needs: Needs,
  overlap_degree: int,
  ranks: Ranks,
  transport: str,
  given: tuple[tuple[Hop, ...], ...] | None,
  links: Links,
  is_whole: bool | None,
) -> Plan:
  """Makes the plan for the needs of ranks.

  Args:
    needs: the needs of a mask on a dispatch.
    overlap_degree: as in `magi_attn_flex_key`.
    ranks: the ranks of the axis, and their nodes.
    transport: how rows travel. "auto" takes the transport with the shortest predicted time.
    given: hops whose kinds the plan must keep, or None.
    links: the speeds that determine the cost of rows, for "auto".
    is_whole: whether to plan whole queries, too. None means yes, unless all ranks' rows are
      gathered: most queries would then wait for the last transfer.
  """
  rows, k_local, num_transfers = needs.rows, needs.keys.local_length, max(overlap_degree, 1)
  way = choose_transport(rows, transport, ranks, k_local, num_transfers, given, links)
  rows = with_transfers(rows, way)
  if overlap_degree:
    rows = rows[rows.owner != rows.rank]  # A rank's own keys are stage 0 and are not sent.
  rows = rows[np.lexsort((rows.begin, rows.transfer, rows.rank))]
  routes = find_routes(rows, way)

  group = rows.rank * num_transfers + rows.transfer
  places = starts_within(group, rows.size)
  taken = np.stack([np.zeros_like(places), places, *routes.sources.T], axis=1)
  num_rows = np.bincount(group, rows.size, ranks.count * num_transfers).astype(np.int64)
  buffers = [(rows[rows.transfer == t], places[rows.transfer == t]) for t in range(num_transfers)]
  if overlap_degree:
    buffers.insert(0, (needs.own, needs.own.local))
  whole = None
  if overlap_degree and (not way.gathers if is_whole is None else is_whole):
    whole = whole_queries(needs, routes, ranks)
  return Plan(
    overlap_degree=overlap_degree,
    num_stages=len(buffers),
    num_transfers=num_transfers,
    slices=stage_slices([needs.pieces] * len(buffers), buffers),
    hops=routes.hops,
    send_runs=routes.send_runs,
    take_runs=runs_of(group, taken, rows.size),
    sizes=routes.sizes,
    num_rows=num_rows.reshape(ranks.count, num_transfers),
    transport=way.name,
    ranks=ranks,
    whole=whole,
  )


def to_table(
  group: np.ndarray, columns: np.ndarray, num_groups: int, capacity: int, fill: int
) -> np.ndarray:
  """Pads sorted groups with `fill` to int32 `[num_groups, capacity, columns]`."""
  table = np.full((num_groups, capacity, columns.shape[1]), fill, np.int32)
  counts = np.bincount(group, minlength=num_groups)
  rows, places = exploded(counts)
  table[rows, places] = columns
  return table
