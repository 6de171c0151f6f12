"""Cuts the mask by ranks: the pieces of each rank, the rows they need, and slices of buffers.

Everything here is numpy on the host, from ranges to ranges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_magi._src.context_parallel.chunks import Dispatch
from jax_magi._src.context_parallel.intervals import cut, exploded, joined, overlapping, union
from jax_magi._src.context_parallel.legs import Rows
from jax_magi._src.context_parallel.local_slices import key_ranges, merged, moved
from jax_magi._src.masks.slices import K_BEGIN, K_END, Q_BEGIN, Q_END, area_of


@dataclasses.dataclass(frozen=True)
class ChunkPieces:
  """The slices of the mask, cut by chunks of queries. Each piece has a visible pair.

  The planner uses nothing else of a mask. Pieces are sorted by slice and query.

  Attributes:
    slices: int64 `[n, 6]`, in positions of the whole mask.
    index: the slice of the mask that each piece is a part of.
    chunk: the chunk of queries of each piece.
  """

  slices: np.ndarray
  index: np.ndarray
  chunk: np.ndarray


def cut_by_chunks(slices: np.ndarray, chunk_size: int) -> ChunkPieces:
  """The pieces of a mask with slices int32 `[num_slices, 6]`."""
  slices = slices[area_of(slices) > 0].astype(np.int64)
  index, chunk, begin, end = cut(slices[:, Q_BEGIN], slices[:, Q_END], chunk_size)
  pieces = slices[index]
  pieces[:, Q_BEGIN], pieces[:, Q_END] = begin, end
  shows = _shows(pieces)
  return ChunkPieces(pieces[shows], index[shows], chunk[shows])


@dataclasses.dataclass(frozen=True)
class Pieces:
  """Pieces of the mask's slices, sorted by slice and query. Each piece has a visible pair.

  Attributes:
    rank: the rank that has the queries of each piece.
    slices: int64 `[n, 6]`, in positions of the whole mask.
    index: the slice of the mask that each piece is a part of.
    begin: the begin of the chunk of queries that contains each piece.
    q_shift: the offset from positions of queries to rows of the rank's buffer.
  """

  rank: np.ndarray
  slices: np.ndarray
  index: np.ndarray
  begin: np.ndarray
  q_shift: np.ndarray

  def __getitem__(self, index: Any) -> Pieces:
    return Pieces(*(getattr(self, field.name)[index] for field in dataclasses.fields(self)))

  def cut_in_chunks(self, size: int) -> Pieces:
    """The same pieces, cut at multiples of `size` from the begin of each chunk."""
    begins, ends = self.slices[:, Q_BEGIN] - self.begin, self.slices[:, Q_END] - self.begin
    index, _, begins, ends = cut(begins, ends, size)
    found = self[index]
    found.slices[:, Q_BEGIN] = found.begin + begins
    found.slices[:, Q_END] = found.begin + ends
    begin = found.begin + begins // size * size
    return dataclasses.replace(found, begin=begin)[_shows(found.slices)]

  def joined(self) -> Pieces:
    """The same pairs in fewer pieces: joins pieces whose queries are adjacent on a rank."""
    s = self.slices
    is_new = (self.index[1:] != self.index[:-1]) | (self.rank[1:] != self.rank[:-1])
    is_new |= (s[1:, Q_BEGIN] != s[:-1, Q_END]) | (self.q_shift[1:] != self.q_shift[:-1])
    first, last = joined(np.append(True, is_new)[: len(s)])
    found = self[first]
    found.slices[:, Q_END] = s[last, Q_END]
    return found


@dataclasses.dataclass(frozen=True)
class Needs:
  """What ranks compute, and the keys that they need: everything in a plan except the transport.

  Attributes:
    keys: the dispatch of keys.
    q_local: the number of rows that each rank has for its queries.
    of_chunks: the pieces of each chunk of queries.
    pieces: the same pairs in fewer pieces.
    rows: the keys that each rank needs, each row once, sorted by rank and position.
    own: the runs of chunks of each rank, sorted by rank and position.
  """

  keys: Dispatch
  q_local: int
  of_chunks: Pieces
  pieces: Pieces
  rows: Rows
  own: Rows


def needs_of(pieces: ChunkPieces, queries: Dispatch, keys: Dispatch) -> Needs:
  """The needs of ranks that hold these chunks of queries and of keys."""
  begin = pieces.chunk * queries.chunk_size
  shift = queries.local_begins()[pieces.chunk] - begin
  rank = queries.ranks[pieces.chunk].astype(np.int64)
  of_chunks = Pieces(rank, pieces.slices, pieces.index, begin, shift)
  joined = of_chunks.joined()
  rows, own = needed_rows(joined, keys), _own_rows(keys)
  return Needs(keys, queries.local_length, of_chunks, joined, rows, own)


def _shows(slices: np.ndarray) -> np.ndarray:
  first, last = key_ranges(slices)
  return first < last


def needed_rows(pieces: Pieces, keys: Dispatch) -> Rows:
  """The keys that the pieces of each rank need, each row once, sorted by rank and position."""
  rank, begin, end = union(pieces.rank, *key_ranges(pieces.slices))
  run_begin, run_end, run_owner, run_local = keys.runs()
  nobody = np.zeros_like(run_begin)
  index, run = overlapping(np.zeros_like(begin), begin, end, nobody, run_begin, run_end)
  rank = rank[index]
  begin, end = np.maximum(begin[index], run_begin[run]), np.minimum(end[index], run_end[run])
  local = run_local[run] + begin - run_begin[run]
  return Rows(rank, begin, end - begin, run_owner[run], local, np.zeros_like(begin))


def _own_rows(keys: Dispatch) -> Rows:
  begin, end, rank, local = keys.runs()
  order = np.lexsort((begin, rank))
  rows = Rows(rank, begin, end - begin, rank, local, np.zeros_like(begin))
  return rows[order]


def stage_slices(
  pieces: Sequence[Pieces], buffers: Sequence[tuple[Rows, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
  """The mask on the buffers of all stages: rank * num_stages + stage, and slices.

  Args:
    pieces: the pieces of each stage.
    buffers: for each stage, rows sorted by rank and position, and the begin of each range in the
      buffer.
  """
  parts = [_slices_of(*stage) for stage in zip(pieces, buffers, strict=True)]
  stage, _ = exploded(np.array([len(part[0]) for part in parts]))
  group = np.concatenate([part[0] for part in parts]) * len(parts) + stage
  return merged(group, np.concatenate([part[1] for part in parts]))


def _slices_of(pieces: Pieces, buffer: tuple[Rows, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
  """Pieces of the mask on a buffer: the rank, and slices over its queries and the buffer's keys."""
  rows, places = buffer
  ends = rows.begin + rows.size
  is_new = (rows.rank[1:] != rows.rank[:-1]) | (rows.begin[1:] != ends[:-1])
  first, last = joined(np.append(True, is_new)[: len(rows.rank)])
  begins, ends, places = rows.begin[first], ends[last], places[first]
  shown_begin, shown_end = key_ranges(pieces.slices)
  index, run = overlapping(pieces.rank, shown_begin, shown_end, rows.rank[first], begins, ends)
  s = pieces.slices[index]
  s[:, K_BEGIN] = np.maximum(shown_begin[index], begins[run])
  s[:, K_END] = np.minimum(shown_end[index], ends[run])
  return pieces.rank[index], moved(s, pieces.q_shift[index], places[run] - begins[run])
