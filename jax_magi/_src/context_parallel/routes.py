"""Which rows travel in which transfer and hop, and where each lies on its way.

Everything here is numpy on the host, from ranges of rows to ranges of rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jax_magi._src.context_parallel.hops import ALL, LOCAL, NODE, Hop, Ranks, moved_rows, num_blocks
from jax_magi._src.context_parallel.intervals import STRIDE, cut, joined, starts_within, union
from jax_magi._src.context_parallel.legs import Leg, Rows, legs_of

# A row that is in no buffer. As an index it is out of every array's bounds.
NOWHERE = 1 << 29

# Above this share of a cheaper way's rows, the simpler way is taken: all-gather needs no index.
NEARLY_ALL = 0.9
# Permutations that a hop may be made of. XLA runs two collectives beside one kernel, with the
# options that we recommend: two permutations, or one for each of two levels.
_MOST_SHIFTS = {ALL: 2, NODE: 1, LOCAL: 1}
# Pieces of a rank's rows that go to transfers in turns.
_TURNS = 4


# Runs of a table: the group (rank * num_transfers + transfer), and int64 [n, 4] of to_block,
# to_place, from_block, from_place.
Runs = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Routes:
  """How rows travel.

  Attributes:
    rows: all that ranks need of others, and without overlap of their own, by rank, transfer and
      position.
    hops: of each transfer, with as many rows as there are.
    send_runs: for each level, what ranks send: block and place in what is sent, and the same in
      what it is taken from: 0 for own rows, and one for each block that came before.
    sources: int64 `[len(rows), 2]`, the block and place that each range is taken from at last.
    sizes: for each level, int64 `[sender, transfer, group size]`, rows.
  """

  rows: Rows
  hops: tuple[tuple[Hop, ...], ...]
  send_runs: tuple[Runs, ...]
  sources: np.ndarray
  sizes: tuple[np.ndarray, ...]


def levels_of(transport: str, ranks: Ranks) -> tuple[str, ...]:
  """The levels that rows travel on."""
  is_two = transport == "two_level" and 1 < ranks.per_node < ranks.count
  return (NODE, LOCAL) if is_two else (ALL,)


def part_length(local_length: int, num_parts: int) -> int:
  """Rows that each rank gives to one all-gather; the last ones may have fewer."""
  return math.ceil(local_length / max(num_parts, 1))


# --- which transport ---


def moved_by_transport(rows: Rows, k_local: int, ranks: Ranks) -> dict[str, tuple[int, int]]:
  """Rows that the busiest rank moves between nodes and inside its node, padding included."""
  n, nodes = ranks.count, ranks.num_nodes
  (flat,) = legs_of(rows, k_local, ranks, (ALL,), 1)
  pairs = _moved(flat.sizes()[:, 0], ALL, ranks)
  far = pairs * (n - ranks.per_node) // max(n - 1, 1)
  moved = {
    "all_to_all": (far, pairs - far),
    "all_gather": ((nodes - 1) * k_local, (n - 1) * k_local),
  }
  levels = levels_of("two_level", ranks)
  if len(levels) == 2:
    legs = legs_of(rows, k_local, ranks, levels, 1)
    crossing, near = (_moved(leg.sizes()[:, 0], leg.level, ranks) for leg in legs)
    # As an all-gather over nodes, it is at most this.
    moved["two_level"] = (min(crossing, (nodes - 1) * k_local), near)
  return moved


def _moved(sizes: np.ndarray, level: str, ranks: Ranks) -> int:
  """Rows of an exchange of `[sender, group size]`, in its cheapest form."""
  return moved_rows(_hop("auto", level, sizes, ranks, permutes=True), ranks)


def _by_shift(sizes: np.ndarray, level: str, ranks: Ranks) -> np.ndarray:
  """The most rows that any rank sends to the one that many places further on in its group."""
  group = ranks.group_size(level)
  index = ranks.index(level, np.arange(ranks.count))
  peers = (index[:, None] + np.arange(group)[None]) % group
  return np.take_along_axis(sizes, peers, axis=1).max(axis=0, initial=0).astype(np.int64)


# --- which transfer ---


def with_transfers(
  rows: Rows, k_local: int, ranks: Ranks, transport: str, num_transfers: int, gathers: bool
) -> Rows:
  """Which transfer brings each range.

  Args:
    rows: all that are needed.
    k_local: rows of a rank.
    ranks: of the axis.
    transport: how they travel.
    num_transfers: how often.
    gathers: whether whole parts of all ranks' rows move, at least between nodes.
  """
  levels = levels_of(transport, ranks)
  # What comes from the same node needs one hop only. The first transfer is of that alone, so that
  # what comes from other nodes has crossed by the time it has arrived.
  first = int(is_near_first(levels, num_transfers))
  count = num_transfers - first
  if gathers:
    rows = _in_parts(rows, part_length(k_local, count), count)
  elif count == 1:
    rows = dataclasses.replace(rows, transfer=np.zeros_like(rows.begin))
  else:
    in_order = _in_order(rows, ranks, levels, count)
    in_turns = _in_parts(rows, part_length(k_local, _TURNS * count), count)
    padded = [_padded(way, k_local, ranks, levels, count) for way in (in_order, in_turns)]
    # Slices are fewer in order.
    rows = in_turns if padded[1] < NEARLY_ALL * padded[0] else in_order
  if first:
    is_near = rows.owner // ranks.per_node == rows.rank // ranks.per_node
    rows = dataclasses.replace(rows, transfer=np.where(is_near, 0, rows.transfer + 1))
  return rows


def is_near_first(levels: Sequence[str], num_transfers: int) -> bool:
  """Whether the first transfer is of rows from the same node alone."""
  return len(levels) == 2 and num_transfers > 1


def _in_parts(rows: Rows, unit: int, count: int) -> Rows:
  """Units of every owner's rows, in turns."""
  index, number, local, end = cut(rows.local, rows.local + rows.size, unit)
  rows = rows[index]
  begin = rows.begin + local - rows.local
  return Rows(rows.rank, begin, end - local, rows.owner, local, number % count)


def _in_order(rows: Rows, ranks: Ranks, levels: Sequence[str], count: int) -> Rows:
  """By position, as many rows of each rank, or node, in each."""
  group, owner = (ranks.index(levels[0], x) for x in (rows.rank, rows.owner))
  moving = rows[group != owner]
  g, begin, end = union(group[group != owner], moving.begin, moving.begin + moving.size)
  before = starts_within(g, end - begin)
  totals = np.bincount(g, end - begin, int(group.max(initial=0)) + 1).astype(np.int64)
  transfer = np.zeros_like(rows.begin)
  for number in range(1, count):
    # The position before which there are so many of the group's rows.
    wanted = totals * number // count
    bound = np.zeros(len(totals), np.int64)
    has = (before <= wanted[g]) & (wanted[g] < before + end - begin)
    bound[g[has]] = begin[has] + wanted[g[has]] - before[has]
    rows, transfer, group = _cut_at(rows, transfer, group, bound)
    transfer += rows.begin >= bound[group]
  return dataclasses.replace(rows, transfer=transfer)


def _cut_at(
  rows: Rows, transfer: np.ndarray, group: np.ndarray, bound: np.ndarray
) -> tuple[Rows, np.ndarray, np.ndarray]:
  """Ranges cut in two where their group's bound lies inside."""
  at = bound[group] - rows.begin
  is_cut = (0 < at) & (at < rows.size)
  index = np.repeat(np.arange(len(is_cut)), 1 + is_cut)
  is_second = np.append(False, index[1:] == index[:-1])[: len(index)]
  offset = np.where(is_second, at[index], 0)
  end = np.where(is_cut[index] & ~is_second, at[index], rows.size[index])
  rows = rows[index]
  rows = dataclasses.replace(
    rows, begin=rows.begin + offset, local=rows.local + offset, size=end - offset
  )
  return rows, transfer[index], group[index]


def _padded(rows: Rows, k_local: int, ranks: Ranks, levels: Sequence[str], count: int) -> float:
  """Rows that move in all transfers, padding included; and the largest counts once more.

  The sum alone would be least with everything in one transfer, beside which nothing runs.
  """
  leg = legs_of(rows, k_local, ranks, levels, count)[0]
  most = np.array([_moved(leg.sizes()[:, t], leg.level, ranks) for t in range(count)])
  return float(most.sum() + count * most.max(initial=0))


# --- which way ---


def find_routes(
  rows: Rows,
  k_local: int,
  ranks: Ranks,
  transport: str,
  num_transfers: int,
  gathers: bool,
  permutes: bool,
  given: Sequence[Sequence[Hop]] | None,
) -> Routes:
  """The way of all rows, which are by rank, transfer and position.

  Args:
    rows: with their transfers.
    k_local: as in `with_transfers`, and so the next four.
    ranks: see above.
    transport: see above.
    num_transfers: see above.
    gathers: see above.
    permutes: whether rows that all go to the same neighbours may travel by permutations.
    given: hops whose kinds are taken over; None if each is to be the one that moves least.
  """
  levels = levels_of(transport, ranks)
  legs = legs_of(rows, k_local, ranks, levels, num_transfers)
  sizes = tuple(leg.sizes() for leg in legs)
  first = is_near_first(levels, num_transfers)
  hops = []
  for t in range(num_transfers):
    here = dict(zip(levels, (size[:, t] for size in sizes), strict=True))
    if given is not None:
      hops.append(tuple(_like(hop, here[hop.level], ranks) for hop in given[t]))
      continue
    if first and t == 0:
      del here[NODE]
    part = part_length(k_local, num_transfers - first)
    begin = min((t - first) * part, k_local)
    gathered = Hop(levels[0], "all_gather", (min(part, k_local - begin),), begin=begin)
    hops.append(
      tuple(
        gathered
        if gathers and level == levels[0]
        else _hop(transport, level, size, ranks, permutes)
        for level, size in here.items()
      )
    )
  # Blocks are numbered from a rank's own rows on, through all that its hops bring.
  block = np.ones(num_transfers, np.int64)
  for leg in legs:
    leg.hops = [next((hop for hop in t if hop.level == leg.level), None) for t in hops]
    leg.first_block = block
    block = block + np.array(
      [0 if hop is None else num_blocks(hop, ranks) for hop in leg.hops], np.int64
    )
  sources = np.stack([np.zeros_like(rows.local), rows.local], axis=1)
  for leg in legs:
    arrived = leg.arrived(leg.sender, rows.rank, rows.transfer, leg.row)
    is_last = (leg.sender != rows.rank) & (leg.receiver == rows.rank)
    sources[is_last] = arrived[is_last]
  return Routes(
    rows, tuple(hops), tuple(_send_runs(legs, i) for i in range(len(legs))), sources, sizes
  )


def gathers_nodes(rows: Rows, k_local: int, ranks: Ranks) -> bool:
  """Whether nodes need nearly everything of each other."""
  far = legs_of(rows, k_local, ranks, (NODE, LOCAL), 1)[0].sizes()[:, 0]
  return _moved(far, NODE, ranks) >= NEARLY_ALL * (ranks.num_nodes - 1) * k_local


def _send_runs(legs: list[Leg], number: int) -> Runs:
  """Where what is sent lies, and where it is taken from."""
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


def _hop(transport: str, level: str, size: np.ndarray, ranks: Ranks, permutes: bool) -> Hop:
  """The cheapest one for rows `[sender, group size]`."""
  most = int(size.max(initial=0))
  if transport == "ragged":
    return Hop(level, "ragged", (most,))
  shifts = _by_shift(size, level, ranks)
  used = np.flatnonzero(shifts)
  is_cheaper = shifts.sum() < NEARLY_ALL * (len(shifts) - 1) * most
  if permutes and 0 < len(used) <= _MOST_SHIFTS[level] and is_cheaper:
    return Hop(level, "permute", tuple(shifts[used].tolist()), tuple(used.tolist()))
  return Hop(level, "all_to_all", (most,))


def _like(hop: Hop, size: np.ndarray, ranks: Ranks) -> Hop:
  """A hop of a given kind, with the rows that are needed."""
  if hop.kind == "all_gather":
    return hop
  if hop.kind != "permute":
    return dataclasses.replace(hop, rows=(int(size.max(initial=0)),))
  shifts = _by_shift(size, hop.level, ranks)
  missing = sorted(set(np.flatnonzero(shifts).tolist()).difference(hop.shifts))
  if missing:
    raise ValueError(
      f"capacities.hops have room for rows to ranks {list(hop.shifts)} places further on, but "
      f"this mask needs {missing}: take the union (|) of its own capacities and these"
    )
  return dataclasses.replace(hop, rows=tuple(int(shifts[shift]) for shift in hop.shifts))


def runs_of(group: np.ndarray, columns: np.ndarray, sizes: np.ndarray) -> Runs:
  """Ranges as runs that end where nothing follows, neighbours that stay neighbours joined.

  Args:
    group: sorted.
    columns: int64 `[n, 4]`: to_block, to_place, from_block, from_place; sorted in each group.
    sizes: rows of each.
  """
  ends = columns + sizes[:, None] * np.array([0, 1, 0, 1])
  is_new = np.append(True, (group[1:] != group[:-1]) | (columns[1:] != ends[:-1]).any(axis=1))
  first, last = joined(is_new[: len(group)])
  # After the last one of each block there is nothing.
  blocks = group[last] * STRIDE + columns[last, 0]
  is_last = np.append(blocks[1:] != blocks[:-1], True)[: len(blocks)]
  stops = ends[last[is_last]]
  stops[:, 2:] = 0, NOWHERE
  group = np.concatenate([group[first], group[last[is_last]]])
  columns = np.concatenate([columns[first], stops])
  order = np.lexsort((columns[:, 1], columns[:, 0], group))
  return group[order], columns[order]
