"""Chunks of queries to ranks: work as even as it can be, at as few rows moved as it can be.

All of it is numpy on the host and depends on nothing but the arguments, so that every process finds
the same answer on its own.
"""

from __future__ import annotations

import heapq

import numpy as np

# Work (pairs of a query and a key) that takes as long as moving a row of keys and values: 16 KB at
# 450 GB/s and 86 kFLOP a pair at 550 TFLOP/s, forward and backward, for 48 query heads over 8 kv
# heads of 128.
PAIRS_PER_ROW = 233

# How far above the mean a rank's work may be, if that saves rows.
_TOLERANCE = 0.008
# A pair of work beyond that counts as so many.
_PENALTY = 100.0
# Ranks, from the cheapest, that the most expensive one tries to exchange chunks with.
_NUM_PARTNERS = 4
# Chunks that move together in the search before the last.
_GROUP = 4


def contiguous(num_chunks: int, cp_size: int) -> np.ndarray:
  """int32 `[num_chunks]`: the rank of each chunk, in order."""
  return (np.arange(num_chunks) // (num_chunks // cp_size)).astype(np.int32)


def zigzag(num_chunks: int, cp_size: int) -> np.ndarray:
  """Each rank gets the i-th block from the front and the i-th from the back."""
  block = np.arange(num_chunks) // (num_chunks // (2 * cp_size))
  return np.minimum(block, 2 * cp_size - 1 - block).astype(np.int32)


def by_work(
  work: np.ndarray, needs: np.ndarray, cp_size: int, rows: int, key_ranks: np.ndarray | None = None
) -> np.ndarray:
  """int32 `[num_chunks]`: the rank of each chunk; all ranks have equally many.

  Args:
    work: `[num_chunks]`.
    needs: bool `[num_chunks, num_key_chunks]`, the keys that a chunk of queries sees.
    cp_size: number of ranks; divides the number of chunks.
    rows: rows of a chunk of keys.
    key_ranks: where each chunk of keys is; None if it goes where the queries of its number go.
  """
  if cp_size == 1:
    return contiguous(len(work), 1)
  search = _Search(work, needs, cp_size, rows * PAIRS_PER_ROW, key_ranks)
  near = search.improve(_near(work, needs, cp_size, rows, key_ranks))
  return min((near, _largest_first(work, cp_size)), key=search.cost)


def _near(work, needs, cp_size, rows, key_ranks) -> np.ndarray:
  """Neighbours stay together, as far as a search among groups of chunks, not single ones, finds."""
  num_chunks = len(work)
  if num_chunks % (_GROUP * cp_size) or num_chunks <= _GROUP * cp_size:
    return contiguous(num_chunks, cp_size)
  work = work.reshape(-1, _GROUP).sum(axis=1)
  needs = needs.reshape(len(work), _GROUP, -1).any(axis=1)
  if key_ranks is None:
    needs = needs.reshape(len(work), -1, _GROUP).any(axis=2)
    rows = rows * _GROUP
  search = _Search(work, needs, cp_size, rows * PAIRS_PER_ROW, key_ranks)
  return np.repeat(search.improve(_near(work, needs, cp_size, rows, key_ranks)), _GROUP)


def _largest_first(work: np.ndarray, cp_size: int) -> np.ndarray:
  """The largest chunk that is left goes to the rank with the least work that has room."""
  room = len(work) // cp_size
  ranks = np.empty(len(work), np.int32)
  heap = [(0.0, room, rank) for rank in range(cp_size)]
  for chunk in np.argsort(-work, kind="stable").tolist():
    load, left, rank = heapq.heappop(heap)
    ranks[chunk] = rank
    if left > 1:
      heapq.heappush(heap, (load + float(work[chunk]), left - 1, rank))
  return ranks


class _Search:
  """Candidates for one mask, and what each costs."""

  def __init__(self, work, needs, cp_size, chunk_cost, key_ranks):
    self.work = work.astype(np.float64)
    self.needs = needs
    self.cp_size = cp_size
    self.chunk_cost = float(chunk_cost)
    self.key_ranks = key_ranks
    self.limit = self.work.sum() / cp_size * (1.0 + _TOLERANCE)

  def cost(self, ranks: np.ndarray) -> float:
    """That of the most expensive rank, and a share of the mean."""
    costs = np.array([self._cost_of(ranks, rank) for rank in range(self.cp_size)])
    return float(costs.max() + costs.mean())

  def _cost_of(self, ranks: np.ndarray, rank: int) -> float:
    mine = ranks == rank
    owned = mine if self.key_ranks is None else self.key_ranks == rank
    received = np.count_nonzero(self.needs[mine].any(axis=0) & ~owned)
    return float(self._total(self.work[mine].sum(), received))

  def _total(self, load, received):
    return load + self.chunk_cost * received + _PENALTY * np.maximum(load - self.limit, 0.0)

  def improve(self, ranks: np.ndarray) -> np.ndarray:
    """Exchanges chunks of the most expensive rank until none makes it cheaper."""
    ranks = ranks.copy()
    costs = np.array([self._cost_of(ranks, rank) for rank in range(self.cp_size)])
    for _ in range(8 * self.cp_size):
      order = np.argsort(costs, kind="stable")
      worst = int(order[-1])
      if not any(
        self._exchange(ranks, costs, worst, int(partner))
        for partner in order[:_NUM_PARTNERS]
        if partner != worst
      ):
        break
    return ranks

  def _exchange(self, ranks, costs, a: int, b: int) -> bool:
    """Exchanges the two chunks of ranks a and b that gain most; False if none gains."""
    ours, theirs = (np.flatnonzero(ranks == rank) for rank in (a, b))
    after_a = self._after(ours, theirs, a)
    after_b = self._after(theirs, ours, b).T
    # The larger of the two decides; then what both cost together.
    after = np.maximum(after_a, after_b) + 1e-3 * (after_a + after_b)
    before = max(costs[a], costs[b]) + 1e-3 * (costs[a] + costs[b])
    i, j = np.unravel_index(int(np.argmin(after)), after.shape)
    if after[i, j] >= before * (1.0 - 1e-4):
      return False
    ranks[ours[i]], ranks[theirs[j]] = b, a
    costs[a], costs[b] = after_a[i, j], after_b[i, j]
    return True

  def _after(self, ours: np.ndarray, theirs: np.ndarray, rank: int) -> np.ndarray:
    """`[ours, theirs]`: what a rank costs that gives one of ours for one of theirs."""
    load = self.work[ours].sum() - self.work[ours][:, None] + self.work[theirs][None, :]
    owned = np.zeros(self.needs.shape[1], bool)
    owned[ours if self.key_ranks is None else self.key_ranks == rank] = True
    both = self.needs[np.concatenate([ours, theirs])]
    # Neighbouring keys that the same chunks need are counted together.
    is_new = (both[:, 1:] != both[:, :-1]).any(axis=0) | (owned[1:] != owned[:-1])
    begins = np.flatnonzero(np.append(True, is_new))
    remote = np.where(owned[begins], 0, np.diff(begins, append=len(owned))).astype(np.float32)
    mine, new = both[: len(ours), begins], both[len(ours) :, begins]
    is_last = mine.sum(axis=0)[None] - mine == 0  # Not needed without this one of ours.
    received = (~is_last @ remote)[:, None] + (is_last * remote) @ new.T.astype(np.float32)
    if self.key_ranks is None:
      # The keys of the chunk that went are remote now, those of the one that came are here.
      received += self._needed(ours, theirs, ours)
      received -= self._needed(ours, theirs, theirs)
    return self._total(load, received)

  def _needed(self, ours, theirs, chunks) -> np.ndarray:
    """`[ours, theirs]`: whether, after the exchange, the keys of the one in `chunks` are needed."""
    mine, new = self.needs[ours][:, chunks], self.needs[theirs][:, chunks]
    is_kept = mine.sum(axis=0)[None] - mine > 0
    if chunks is ours:
      return np.diagonal(is_kept)[:, None] | new.T
    return is_kept | np.diagonal(new)[None]
