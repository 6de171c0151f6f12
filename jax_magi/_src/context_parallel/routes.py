"""Finds the hops that bring the rows of each transfer, and the position of each row on its way.

Everything here is numpy on the host, from ranges of rows to ranges of rows.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_magi._src.context_parallel.hop_choice import cheapest_hop, hop_like, padded_rows
from jax_magi._src.context_parallel.hops import NODE, Hop, num_blocks
from jax_magi._src.context_parallel.intervals import STRIDE, joined
from jax_magi._src.context_parallel.legs import Leg, Rows, legs_of
from jax_magi._src.context_parallel.transport import Transport

# Marks a row that is in no buffer. As an index, it is out of the bounds of every array.
NOWHERE = 1 << 29

# Runs of a table: the group (rank * num_transfers + transfer), and int64 [n, 4] of to_block,
# to_place, from_block, from_place.
Runs = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Routes:
  """How rows travel.

  Attributes:
    rows: the rows that ranks need from others (without overlap, their own rows, too), sorted by
      rank, transfer and position.
    hops: the hops of each transfer, with as many rows as are needed.
    send_runs: for each level, runs of the rows that ranks send: block and place in the sent array,
      and block and place of the source. Source block 0 has own rows, and the blocks that arrived
      earlier follow.
    sources: int64 `[len(rows), 2]`, the block and place that each range is finally taken from.
    sizes: for each level, int64 `[sender, transfer, group size]`, the number of rows.
  """

  rows: Rows
  hops: tuple[tuple[Hop, ...], ...]
  send_runs: tuple[Runs, ...]
  sources: np.ndarray
  sizes: tuple[np.ndarray, ...]


def find_routes(rows: Rows, transport: Transport) -> Routes:
  """The routes of rows that have transfers, and are sorted by rank, transfer and position."""
  legs = legs_of(rows, transport)
  sizes = tuple(leg.sizes() for leg in legs)
  hops = [
    _hops(t, [size[:, t] for size in sizes], transport) for t in range(transport.num_transfers)
  ]
  # Block 0 has the rank's own rows. The blocks that its hops bring follow.
  block = np.ones(transport.num_transfers, np.int64)
  for leg in legs:
    leg.hops = [next((hop for hop in t if hop.level == leg.level), None) for t in hops]
    leg.first_block = block
    block = block + np.array(
      [0 if hop is None else num_blocks(hop, leg.ranks) for hop in leg.hops], np.int64
    )
  sources = np.stack([np.zeros_like(rows.local), rows.local], axis=1)
  for leg in legs:
    arrived = leg.arrived(leg.sender, rows.rank, rows.transfer, leg.row)
    is_last = (leg.sender != rows.rank) & (leg.receiver == rows.rank)
    sources[is_last] = arrived[is_last]
  return Routes(
    rows, tuple(hops), tuple(_send_runs(legs, i) for i in range(len(legs))), sources, sizes
  )


def _hops(number: int, sizes: list[np.ndarray], transport: Transport) -> tuple[Hop, ...]:
  """The hops of a transfer, from the rows that each level moves: int64 `[sender, group size]`."""
  ranks, levels = transport.ranks, transport.levels
  by_level = dict(zip(levels, sizes, strict=True))
  if transport.given is not None:
    return tuple(hop_like(hop, by_level[hop.level], ranks) for hop in transport.given[number])
  if number < transport.num_near:
    del by_level[NODE]

  def hop(level: str, size: np.ndarray) -> Hop:
    if transport.gathers and level == levels[0]:
      begin = min((number - transport.num_near) * transport.part_length, transport.k_local)
      length = min(transport.part_length, transport.k_local - begin)
      return Hop(level, "all_gather", (length,), begin=begin)
    if number < transport.num_near:
      most = int(size.max(initial=0))
      # A node's ranks may need nearly all rows of each other. Then there is nothing to pack.
      if padded_rows(level, most) >= transport.k_local:
        return Hop(level, "all_gather", (transport.k_local,))
    if transport.name == "ragged":
      return Hop(level, "ragged", (int(size.max(initial=0)),))
    return cheapest_hop(level, size, ranks, permutes=transport.permutes)

  return tuple(hop(level, size) for level, size in by_level.items())


def _send_runs(legs: list[Leg], number: int) -> Runs:
  """The runs of the rows that are sent, with their sources."""
  leg = legs[number]
  sender, transfer, receiver, row, size, place = leg.content()
  taken = np.stack([np.zeros_like(row), row % leg.stride], axis=1)
  if number:
    before = legs[number - 1]
    node = row // leg.stride  # Of its owner, whose place in the node is the sender's.
    owner = node * leg.ranks.per_node + sender % leg.ranks.per_node
    came = owner != sender
    taken[came] = before.arrived(owner, sender, transfer, row)[came]
  block = leg.block(transfer, leg.index(sender), receiver, is_sent=True)
  is_sent = ~leg.gathers()[transfer]
  columns = np.stack([block, place, *taken.T], axis=1)
  group = sender * leg.num_transfers + transfer
  return runs_of(group[is_sent], columns[is_sent], size[is_sent])


def runs_of(group: np.ndarray, columns: np.ndarray, sizes: np.ndarray) -> Runs:
  """Converts ranges to runs: joins ranges that stay adjacent, and marks gaps as empty.

  Args:
    group: the group of each range, sorted.
    columns: int64 `[n, 4]`: to_block, to_place, from_block, from_place; sorted in each group.
    sizes: the number of rows of each range.
  """
  ends = columns + sizes[:, None] * np.array([0, 1, 0, 1])
  is_new = np.append(True, (group[1:] != group[:-1]) | (columns[1:] != ends[:-1]).any(axis=1))
  first, last = joined(is_new[: len(group)])
  # The rows after the last run of a block are empty.
  blocks = group[last] * STRIDE + columns[last, 0]
  is_last = np.append(blocks[1:] != blocks[:-1], True)[: len(blocks)]
  stops = ends[last[is_last]]
  stops[:, 2:] = 0, NOWHERE
  group = np.concatenate([group[first], group[last[is_last]]])
  columns = np.concatenate([columns[first], stops])
  order = np.lexsort((columns[:, 1], columns[:, 0], group))
  return group[order], columns[order]
