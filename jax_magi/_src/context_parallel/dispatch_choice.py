"""Decides which rank holds which chunk: as the caller says, or so that work is even."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jax_magi._src.arguments import as_int32, check_choice, check_positive
from jax_magi._src.context_parallel import assignment
from jax_magi._src.context_parallel.assignment_cost import Units
from jax_magi._src.context_parallel.assignment_pack import document_begins
from jax_magi._src.context_parallel.chunks import Dispatch, num_chunks
from jax_magi._src.context_parallel.hops import Ranks
from jax_magi._src.context_parallel.links import Links
from jax_magi._src.context_parallel.local_slices import key_ranges
from jax_magi._src.context_parallel.pieces import ChunkPieces, cut_by_chunks
from jax_magi._src.masks.slices import Q_BEGIN, area_of

# The default number of chunks of a rank: enough to balance one causal document within 1%.
_CHUNKS_OF_RANK = 32
# Smaller chunks would not fill a tile of the kernel. A short sequence still gets four per rank.
_SMALLEST_CHUNK = 128


def dispatch_keys(k_len: int, cp_size: int) -> Dispatch:
  """The dispatch of the keys of cross-attention, in order."""
  size = _chunk_size("total_seqlen_k", None, k_len, cp_size)
  count = num_chunks(k_len, size, cp_size)
  return Dispatch(k_len, size, cp_size, assignment.contiguous(count, cp_size))


def dispatch_queries(
  slices: np.ndarray,
  length: int,
  ranks: Ranks,
  chunk_size: Any,
  dispatch: Any,
  keys: Dispatch | None,
  links: Links,
) -> tuple[ChunkPieces, list[Dispatch]]:
  """The mask cut by chunks, and candidates for the dispatch of queries.

  Args:
    slices: int32 `[num_slices, 6]`, the slices of the mask.
    length: the number of queries.
    ranks: the ranks of the axis, and their nodes.
    chunk_size: as in `magi_attn_flex_key`.
    dispatch: as in `magi_attn_flex_key`.
    keys: the dispatch of keys. None if keys are with their queries.
    links: the speeds that determine the cost of rows.
  """
  cp_size = ranks.count
  if not isinstance(dispatch, str):
    of_chunks = as_int32("dispatch", dispatch, ("num_chunks",))
    if not isinstance(of_chunks, np.ndarray):
      raise ValueError("dispatch must be known, got a traced array")
    found = _explicit_dispatch(of_chunks, length, cp_size, chunk_size)
    return cut_by_chunks(slices, found.chunk_size), [found]
  check_choice("dispatch", dispatch, ("area", "zigzag", "contiguous"))
  blocks = 2 if dispatch == "zigzag" else 1
  if dispatch != "area" and chunk_size is None:
    size = math.ceil(length / (blocks * cp_size))
  else:
    size = _chunk_size("total_seqlen", chunk_size, length, cp_size)
  pieces = cut_by_chunks(slices, size)
  if dispatch == "area":
    ways = assign_by_area(pieces, length, size, cp_size, keys, links, ranks.per_node)
  else:
    assign = assignment.zigzag if dispatch == "zigzag" else assignment.contiguous
    ways = [assign(num_chunks(length, size, cp_size, blocks), cp_size)]
  return pieces, [Dispatch(length, size, cp_size, way) for way in ways]


def assign_by_area(
  pieces: ChunkPieces,
  q_len: int,
  chunk_size: int,
  cp_size: int,
  keys: Dispatch | None,
  links: Links,
  ranks_per_node: int | None = None,
) -> list[np.ndarray]:
  """Candidates for the rank of each chunk, int32 `[num_chunks]`, the most promising first.

  Args:
    pieces: the pieces of the mask, by chunks of queries.
    q_len: the number of queries.
    chunk_size: the number of queries of a chunk.
    cp_size: the number of ranks.
    keys: the dispatch of keys. None if keys are with their queries.
    links: the speeds that determine the cost of rows.
    ranks_per_node: the number of neighbouring ranks that share a node. None means all ranks.
  """
  count = num_chunks(q_len, chunk_size, cp_size)
  work = np.bincount(pieces.chunk, area_of(pieces.slices), count)
  first, last = key_ranges(pieces.slices)
  units = Units.of_chunks(work, chunk_size, pieces.chunk, first, last)
  owners = documents = None
  if keys is not None:
    owners = np.arange(keys.num_chunks + 1) * keys.chunk_size, keys.ranks
  else:
    longest = np.argsort(last - first, kind="stable")
    documents = _documents(pieces, longest, np.arange(count) * chunk_size)
  return assignment.by_work(units, cp_size, links, ranks_per_node, owners, documents)


def _documents(pieces: ChunkPieces, order: np.ndarray, chunk_begins: np.ndarray) -> np.ndarray:
  """int64 `[num_chunks]`: the document of each chunk, or that of the last piece in `order`."""
  begins = document_begins(pieces.slices)

  def document(position: np.ndarray) -> np.ndarray:
    return np.maximum(np.searchsorted(begins, position, side="right") - 1, 0)

  found = document(chunk_begins)
  found[pieces.chunk[order]] = document(pieces.slices[order, Q_BEGIN])
  return found


def _chunk_size(name: str, size: Any, length: int, cp_size: int) -> int:
  """Checks the given chunk size, or chooses one."""
  if size is not None:
    size = check_positive("chunk_size", size)
    if length < size * cp_size:
      raise ValueError(
        f"{name} must be at least a chunk for each rank, {cp_size} x {size} tokens, got {length}; "
        "use a smaller chunk_size"
      )
    return size
  local = math.ceil(length / cp_size)
  wanted = max(local // _CHUNKS_OF_RANK, min(_SMALLEST_CHUNK, local // 4), 1)
  return 1 << (wanted.bit_length() - 1)


def _explicit_dispatch(ranks: np.ndarray, length: int, cp_size: int, chunk_size: Any) -> Dispatch:
  check_positive("the number of chunks in dispatch", len(ranks))
  size = math.ceil(length / len(ranks)) if chunk_size is None else chunk_size
  size = check_positive("chunk_size", size)
  if len(ranks) * size < length:
    raise ValueError(
      f"dispatch has {len(ranks)} chunks of {size} tokens, too few for total_seqlen={length}"
    )
  counts = np.bincount(np.clip(ranks, -1, cp_size) + 1, minlength=cp_size + 2)
  if counts[0] or counts[-1] or (counts[1:-1] != counts[1]).any():
    raise ValueError(
      f"dispatch must give each of {cp_size} ranks equally many chunks, got {ranks.tolist()}"
    )
  return Dispatch(length, size, cp_size, ranks)
