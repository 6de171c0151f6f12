"""The plan of a mask over ranks: who owns which tokens, what moves, and what each rank computes.

Everything here is numpy on the host, from ranges to ranges: no array is as long as the sequence, no
process asks another one, and all find the same plan.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jax_magi._src.context_parallel import assignment
from jax_magi._src.context_parallel.intervals import (
  cut,
  exploded,
  joined,
  overlapping,
  starts_within,
  union,
)
from jax_magi._src.context_parallel.local_slices import merged, moved, shown_keys
from jax_magi._src.masks.slices import K_BEGIN, K_END, Q_BEGIN, Q_END, area_of

# A row that is in no buffer. As an index it is out of every array's bounds.
NOWHERE = 1 << 29

# Transfers take chunks in turns where that leaves so much of what the busiest ranks move.
_IN_TURNS = 0.9
# All-gather moves all rows at full speed without an index; from this share of them on, it is used.
_NEARLY_ALL = 0.9


@dataclasses.dataclass(frozen=True)
class Dispatch:
  """One axis of the mask over ranks: chunks of `chunk_size` tokens, and the rank of each.

  A rank holds its chunks in ascending order.
  """

  length: int
  chunk_size: int
  cp_size: int
  ranks: np.ndarray  # int32 [num_chunks]

  @property
  def num_chunks(self) -> int:
    """Of all ranks, those of padding included."""
    return len(self.ranks)

  @property
  def chunks(self) -> np.ndarray:
    """int32 `[cp_size, chunks of a rank]`: the chunks that each rank holds."""
    return np.argsort(self.ranks, kind="stable").reshape(self.cp_size, -1).astype(np.int32)

  @property
  def local_length(self) -> int:
    """Tokens of a rank, padding included."""
    return self.num_chunks // self.cp_size * self.chunk_size

  def local_begins(self) -> np.ndarray:
    """int64 `[num_chunks]`: where each chunk begins in its rank's buffer."""
    begins = np.empty(self.num_chunks, np.int64)
    begins[self.chunks] = np.arange(self.num_chunks // self.cp_size) * self.chunk_size
    return begins


def num_chunks(length: int, chunk_size: int, cp_size: int, multiple: int = 1) -> int:
  """Chunks that hold `length` tokens, equally many (and a multiple of `multiple`) on each rank."""
  of_rank = math.ceil(length / (chunk_size * cp_size * multiple)) * multiple
  return max(of_rank, multiple) * cp_size


def assign_by_area(
  slices: np.ndarray,
  q_len: int,
  chunk_size: int,
  cp_size: int,
  keys: Dispatch | None,
  links: assignment.Links,
  ranks_per_node: int | None = None,
) -> np.ndarray:
  """int32: the rank of each chunk of queries, and of the keys of the same number if keys is None.

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
  pieces, _, chunk = _pieces(slices, chunk_size)
  work = np.bincount(chunk, area_of(pieces), count)
  units = assignment.Units.of_chunks(work, chunk_size, chunk, *shown_keys(pieces))
  owners = None
  if keys is not None:
    owners = np.arange(keys.num_chunks + 1) * keys.chunk_size, keys.ranks
  return assignment.by_work(units, cp_size, links, ranks_per_node, owners)


def _pieces(slices: np.ndarray, chunk_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Non-empty slices cut by chunks of queries: the pieces that show a key, whose, and the chunk."""
  index, chunk, begin, end = cut(slices[:, Q_BEGIN], slices[:, Q_END], chunk_size)
  pieces = slices[index]
  pieces[:, Q_BEGIN], pieces[:, Q_END] = begin, end
  first, last = shown_keys(pieces)
  shows = first < last
  return pieces[shows], index[shows], chunk[shows]


@dataclasses.dataclass(frozen=True)
class Plan:
  """What the ranks do, as ragged tables.

  A stage is one call of the kernel. Without overlap there is one, over a buffer of all keys that
  the rank needs. With overlap, the first is over the rank's own keys, and each other one over a
  buffer of keys that one transfer brings. Buffers are in the order of the sequence.

  Attributes:
    num_stages: calls of the kernel.
    num_transfers: transfers.
    slices: rank * num_stages + stage, and int64 slices of its queries and the stage's buffer.
    sizes: int64 `[sender, transfer, receiver]`, rows.
    send_runs: sender * num_transfers + transfer, where a run begins among the rows that it sends,
      and where in its own; by receiver.
    take_runs: receiver * num_transfers + transfer, where a run begins in the stage's buffer, and
      where among what the stage takes from: what arrived, by sender; all ranks' rows of the
      transfer, for an all-gather; and before either its own rows, without overlap.
    num_rows: int64 `[receiver, transfer]`, rows of a stage's buffer.
    is_all_gather: whether everything moves everywhere.
  """

  num_stages: int
  num_transfers: int
  slices: tuple[np.ndarray, np.ndarray]
  sizes: np.ndarray
  send_runs: tuple[np.ndarray, np.ndarray, np.ndarray]
  take_runs: tuple[np.ndarray, np.ndarray, np.ndarray]
  num_rows: np.ndarray
  is_all_gather: bool


@dataclasses.dataclass(frozen=True)
class _Rows:
  """Ranges of keys that ranks need, by rank and position: none crosses a chunk."""

  rank: np.ndarray
  begin: np.ndarray
  size: np.ndarray
  owner: np.ndarray
  local: np.ndarray  # Where the owner has it.
  transfer: np.ndarray

  def __getitem__(self, index) -> _Rows:
    return _Rows(*(getattr(self, field.name)[index] for field in dataclasses.fields(self)))


def make_plan(
  slices: np.ndarray,
  queries: Dispatch,
  keys: Dispatch,
  overlap_degree: int,
  *,
  all_gather: bool | None = None,
) -> Plan:
  """The plan of a mask (int32 slices) on a dispatch. `all_gather` is decided by rows where None."""
  s = slices[area_of(slices) > 0].astype(np.int64)
  pieces, index, chunk = _pieces(s, queries.chunk_size)
  rank = queries.ranks[chunk].astype(np.int64)
  # Neighbouring chunks of a rank are neighbours in its buffer, and their pieces of a slice are one.
  is_new = (index[1:] != index[:-1]) | (chunk[1:] != chunk[:-1] + 1) | (rank[1:] != rank[:-1])
  first, last = joined(np.append(True, is_new)[: len(index)])
  rank, chunk, q_ends = rank[first], chunk[first], pieces[last, Q_END]
  pieces = pieces[first]
  pieces[:, Q_END] = q_ends
  q_shift = queries.local_begins()[chunk] - chunk * queries.chunk_size

  rows = _needed_rows(rank, pieces, keys)
  if all_gather is None:
    remote = rows.size[rows.owner != rows.rank].sum()
    everything = (keys.cp_size - 1) * keys.num_chunks * keys.chunk_size
    all_gather = keys.cp_size > 1 and bool(remote >= _NEARLY_ALL * everything)
  num_transfers = max(overlap_degree, 1)
  rows = _with_transfers(rows, keys, num_transfers, all_gather)
  own = _own_rows(keys) if overlap_degree else None
  if own is not None:
    rows = rows[rows.owner != rows.rank]
  order = np.lexsort((rows.begin, rows.transfer, rows.rank))
  rows = rows[order]

  group = rows.rank * num_transfers + rows.transfer
  places = starts_within(group, rows.size)
  sources, sizes, send_runs = _exchange(rows, keys, num_transfers, all_gather)
  if own is None:
    is_own = rows.owner == rows.rank
    sources = np.where(is_own, rows.local, sources + keys.local_length)
  num_rows = np.bincount(group, rows.size, keys.cp_size * num_transfers).astype(np.int64)

  buffers = [(rows[rows.transfer == t], places[rows.transfer == t]) for t in range(num_transfers)]
  if own is not None:
    buffers.insert(0, (own, own.local))
  parts = [_slices_of(pieces, rank, q_shift, *buffer) for buffer in buffers]
  stage = np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts])
  group_of_slices = np.concatenate([part[0] for part in parts]) * len(parts) + stage
  return Plan(
    len(parts),
    num_transfers,
    merged(group_of_slices, np.concatenate([part[1] for part in parts])),
    sizes,
    send_runs,
    _runs(group, places, sources, rows.size),
    num_rows.reshape(keys.cp_size, num_transfers),
    all_gather,
  )


def _needed_rows(rank: np.ndarray, pieces: np.ndarray, keys: Dispatch) -> _Rows:
  """What each rank's pieces show, each row once."""
  rank, begin, end = union(rank, *shown_keys(pieces))
  index, chunk, begin, end = cut(begin, end, keys.chunk_size)
  local = keys.local_begins()[chunk] + begin - chunk * keys.chunk_size
  owner = keys.ranks[chunk].astype(np.int64)
  return _Rows(rank[index], begin, end - begin, owner, local, np.zeros_like(begin))


def _own_rows(keys: Dispatch) -> _Rows:
  """Every rank's own chunks."""
  rank = np.repeat(np.arange(keys.cp_size), keys.num_chunks // keys.cp_size)
  chunk = keys.chunks.reshape(-1).astype(np.int64)
  size = np.full_like(chunk, keys.chunk_size)
  local = keys.local_begins()[chunk]
  return _Rows(rank, chunk * keys.chunk_size, size, rank, local, np.zeros_like(chunk))


def _with_transfers(rows: _Rows, keys: Dispatch, num_transfers: int, all_gather: bool) -> _Rows:
  """Which transfer brings each range."""
  part = part_length(keys.local_length, num_transfers)
  if num_transfers == 1:
    return dataclasses.replace(rows, transfer=np.zeros_like(rows.begin))
  # Small enough to be spread over all transfers.
  unit = part if all_gather else min(part, keys.chunk_size)
  index, number, local, end = cut(rows.local, rows.local + rows.size, unit)
  rows = rows[index]
  begin = rows.begin + local - rows.local
  rows = dataclasses.replace(rows, begin=begin, local=local, size=end - local)
  if all_gather:  # The same part of every rank's rows.
    return dataclasses.replace(rows, transfer=number)
  size = np.where(rows.owner == rows.rank, 0, rows.size)
  # In order, as many rows in each; or in turns, so that every rank sends some of each.
  before = starts_within(rows.rank, size)
  total = np.bincount(rows.rank, size, keys.cp_size)[rows.rank]
  in_order = before * num_transfers // np.maximum(total, 1)
  in_order = np.minimum(in_order, num_transfers - 1).astype(np.int64)
  in_turns = number % num_transfers
  order_rows, turns_rows = (
    _busiest(rows, size, t, num_transfers, keys.cp_size) for t in (in_order, in_turns)
  )
  # Slices are fewer in order.
  transfer = in_turns if turns_rows < _IN_TURNS * order_rows else in_order
  return dataclasses.replace(rows, transfer=transfer)


def _busiest(
  rows: _Rows, size: np.ndarray, transfer: np.ndarray, num_transfers: int, cp_size: int
) -> float:
  """Rows of the rank that moves most, in or out, of each transfer: the sum, and the largest.

  The sum alone would be least with everything in one transfer, beside which nothing runs.
  """
  count = cp_size * num_transfers
  received = np.bincount(transfer * cp_size + rows.rank, size, count)
  sent = np.bincount(transfer * cp_size + rows.owner, size, count)
  most = np.maximum(received, sent).reshape(-1, cp_size).max(axis=1)
  return float(most.sum() + num_transfers * most.max())


def part_length(local_length: int, num_transfers: int) -> int:
  """Rows that each rank gives to one all-gather; the last ones may have fewer."""
  return math.ceil(local_length / num_transfers)


def _exchange(rows: _Rows, keys: Dispatch, num_transfers: int, all_gather: bool):
  """Where each range lies when it has arrived; rows between ranks; runs of what ranks send."""
  n = keys.cp_size
  nothing = np.zeros(0, np.int64)
  sizes = np.zeros((n, num_transfers, n), np.int64)
  if all_gather:
    part = part_length(keys.local_length, num_transfers)
    length = np.minimum(part, keys.local_length - rows.transfer * part)
    arrived = rows.owner * length + rows.local - rows.transfer * part
    return arrived, sizes, (nothing, nothing, nothing)
  remote = np.flatnonzero(rows.owner != rows.rank)
  moving = rows[remote]
  np.add.at(sizes, (moving.owner, moving.transfer, moving.rank), moving.size)

  group = moving.rank * num_transfers + moving.transfer
  order = np.lexsort((moving.local, moving.owner, group))
  arrived = np.zeros(len(rows.rank), np.int64)
  arrived[remote[order]] = starts_within(group[order], moving.size[order])

  group = moving.owner * num_transfers + moving.transfer
  order = np.lexsort((moving.local, moving.rank, group))
  group, sent = group[order], moving[order]
  runs = _runs(group, starts_within(group, sent.size), sent.local, sent.size)
  return arrived, sizes, runs


def _runs(group: np.ndarray, places: np.ndarray, sources: np.ndarray, sizes: np.ndarray):
  """(group, place, source) of runs, with neighbours that stay neighbours joined."""
  is_new = (group[1:] != group[:-1]) | (sources[1:] != sources[:-1] + sizes[:-1])
  first, _ = joined(np.append(True, is_new)[: len(group)])
  return group[first], places[first], sources[first]


def _slices_of(pieces, rank, q_shift, rows: _Rows, places) -> tuple[np.ndarray, np.ndarray]:
  """Pieces of the mask on a buffer: rank, and slices of its queries and the buffer's keys."""
  ends = rows.begin + rows.size
  is_new = (rows.rank[1:] != rows.rank[:-1]) | (rows.begin[1:] != ends[:-1])
  first, last = joined(np.append(True, is_new)[: len(rows.rank)])
  begins, ends, places = rows.begin[first], ends[last], places[first]
  shown_begin, shown_end = shown_keys(pieces)
  index, run = overlapping(rank, shown_begin, shown_end, rows.rank[first], begins, ends)
  s = pieces[index]
  s[:, K_BEGIN] = np.maximum(shown_begin[index], begins[run])
  s[:, K_END] = np.minimum(shown_end[index], ends[run])
  return rank[index], moved(s, q_shift[index], places[run] - begins[run])


def to_table(group: np.ndarray, columns: np.ndarray, num_groups: int, capacity: int, fill: int):
  """int32 `[num_groups, capacity, columns]`: sorted groups side by side, filled up with `fill`."""
  table = np.full((num_groups, capacity, columns.shape[1]), fill, np.int32)
  counts = np.bincount(group, minlength=num_groups)
  rows, places = exploded(counts)
  table[rows, places] = columns
  return table
