"""Chunks of queries to ranks: work as even as it can be, at as few rows moved as it can be.

All of it is numpy on the host and depends on nothing but the arguments, so that every process finds
the same answer on its own.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

# How far above the mean a rank's work may be, if that saves rows.
_TOLERANCE = 0.04
# A pair of work beyond that counts as so many.
_PENALTY = 100.0
# The part of the shorter one of computing and moving that does not run beside the longer one.
_EXPOSED = 0.3
# Ranks, from the most expensive, that try to exchange chunks, and from the cheapest, with whom.
_NUM_WORST, _NUM_PARTNERS = 2, 3
# Then the search ends. For 2,000 documents on 64 ranks, eight took 0.7 s instead of 0.4; for long
# documents they left 7% less for the busiest rank to move.
_EXCHANGES_PER_RANK = 4
# Of candidates that cost and move up to so much more than the best, the most even one is taken.
_ENOUGH = 1.1
# Chunks that move together in the search before the last.
_GROUP = 4


@dataclasses.dataclass(frozen=True)
class Links:
  """What moving a row of keys and values costs, in pairs of a query and a key computed meanwhile.

  The defaults are 16 KB a row (keys and values twice, gradients once, in 32 bit, for 8 kv heads of
  128) at 450 GB/s between the GPUs of a node and 50 GB/s between nodes, and 86 kFLOP a pair (48
  query heads, forward and backward) at 550 TFLOP/s.

  Attributes:
    ranks_per_node: neighbouring ranks that share a node.
    near_row: of a row from the same node.
    far_row: of a row from another one.
  """

  ranks_per_node: int = 8
  near_row: float = 233.0
  far_row: float = 2100.0


def contiguous(num_chunks: int, cp_size: int) -> np.ndarray:
  """int32 `[num_chunks]`: the rank of each chunk, in order."""
  return (np.arange(num_chunks) // (num_chunks // cp_size)).astype(np.int32)


def zigzag(num_chunks: int, cp_size: int) -> np.ndarray:
  """Each rank gets the i-th block from the front and the i-th from the back."""
  block = np.arange(num_chunks) // (num_chunks // (2 * cp_size))
  return np.minimum(block, 2 * cp_size - 1 - block).astype(np.int32)


def by_work(
  work: np.ndarray,
  needs: np.ndarray,
  cp_size: int,
  rows: int,
  links: Links,
  key_ranks: np.ndarray | None = None,
) -> np.ndarray:
  """int32 `[num_chunks]`: the rank of each chunk; all ranks have equally many.

  Args:
    work: `[num_chunks]`.
    needs: bool `[num_chunks, num_key_chunks]`, the keys that a chunk of queries sees.
    cp_size: number of ranks; divides the number of chunks.
    rows: rows of a chunk of keys.
    links: what rows cost.
    key_ranks: where each chunk of keys is; None if it goes where the queries of its number go.
  """
  if cp_size == 1:
    return contiguous(len(work), 1)
  search = _Search(work, needs, cp_size, rows, links, key_ranks)
  candidates = [search.improved(_near(work, needs, cp_size, rows, links, key_ranks))]
  candidates.append(_State(search, _largest_first(work, cp_size)))
  if len(work) % (2 * cp_size) == 0:
    candidates.append(_State(search, zigzag(len(work), cp_size)))
  best = min(candidates, key=_State.cost)
  good = [
    state
    for state in candidates
    if state.cost() <= _ENOUGH * best.cost()
    and state.received.mean() <= _ENOUGH * best.received.mean()
  ]
  return min(good, key=lambda state: (state.imbalance(), state.costs.mean())).ranks


def _near(work, needs, cp_size, rows, links, key_ranks) -> np.ndarray:
  """Neighbours stay together, as far as a search among groups of chunks, not single ones, finds."""
  num_chunks = len(work)
  if num_chunks % (_GROUP * cp_size) or num_chunks <= _GROUP * cp_size:
    return contiguous(num_chunks, cp_size)
  work = work.reshape(-1, _GROUP).sum(axis=1)
  needs = needs.reshape(len(work), _GROUP, -1).any(axis=1)
  if key_ranks is None:
    needs = needs.reshape(len(work), -1, _GROUP).any(axis=2)
    rows = rows * _GROUP
  search = _Search(work, needs, cp_size, rows, links, key_ranks)
  near = search.improved(_near(work, needs, cp_size, rows, links, key_ranks))
  return np.repeat(near.ranks, _GROUP)


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

  def __init__(self, work, needs, cp_size, rows, links, key_ranks):
    self.work = work.astype(np.float64)
    self.needs = needs
    self.cp_size = cp_size
    self.key_ranks = key_ranks
    self.limit = self.work.sum() / cp_size * (1.0 + _TOLERANCE)
    node = np.arange(cp_size) // links.ranks_per_node
    # [sender, receiver], of a chunk.
    # Whole numbers, so that sums are exact and every machine finds the same plan.
    self.price = np.rint(np.where(node[:, None] == node, links.near_row, links.far_row) * rows)
    np.fill_diagonal(self.price, 0.0)

  def total(self, load, moved):
    """What a rank costs, from its work and what it sends or receives."""
    longer, shorter = np.maximum(load, moved), np.minimum(load, moved)
    return longer + _EXPOSED * shorter + _PENALTY * np.maximum(load - self.limit, 0.0)

  def improved(self, ranks: np.ndarray) -> _State:
    """Exchanges chunks of the most expensive ranks until none makes one cheaper."""
    state = _State(self, ranks)
    for _ in range(_EXCHANGES_PER_RANK * self.cp_size):
      order = np.argsort(state.costs, kind="stable").tolist()
      worst = [int(state.load.argmax()), *order[: -_NUM_WORST - 1 : -1]]
      pairs = ((a, b) for a in dict.fromkeys(worst) for b in order[:_NUM_PARTNERS] if a != b)
      if not any(state.exchange(a, b) for a, b in pairs):
        break
    return state


class _State:
  """A candidate under way."""

  def __init__(self, search: _Search, ranks: np.ndarray):
    self.search = search
    self.ranks = ranks.copy()
    order = np.argsort(ranks, kind="stable")
    by_rank = search.needs[order].view(np.uint8).reshape(search.cp_size, -1, search.needs.shape[1])
    # How many of a rank's chunks need a chunk of keys.
    self.counts = by_rank.sum(axis=1, dtype=np.int16)
    # What it costs each rank to get each chunk of keys that it needs.
    self.moves = np.where(self.counts > 0, search.price[self.owners].T, 0.0)
    self._update_costs()

  def cost(self) -> float:
    """That of the most expensive rank, and a share of the mean."""
    return float(self.costs.max() + 0.1 * self.costs.mean())

  def imbalance(self) -> int:
    """How far the largest work is above the mean, in steps of half a percent."""
    return int(200.0 * (self.load.max() / max(self.load.mean(), 1.0) - 1.0))

  @property
  def owners(self) -> np.ndarray:
    """The rank of each chunk of keys."""
    return self.ranks if self.search.key_ranks is None else self.search.key_ranks

  def _update_costs(self) -> None:
    search = self.search
    self.received = self.moves.sum(axis=1)
    # What it costs the owner of each chunk to send it to all who need it.
    self.sending = self.moves.sum(axis=0)
    self.sent = np.bincount(self.owners, self.sending, search.cp_size)
    self.load = np.bincount(self.ranks, search.work, search.cp_size)
    self.costs = search.total(self.load, np.maximum(self.received, self.sent))

  def exchange(self, a: int, b: int) -> bool:
    """Exchanges the two chunks of ranks a and b that gain most; False if none gains."""
    ours, theirs = (np.flatnonzero(self.ranks == rank) for rank in (a, b))
    after_a, after_b = self._after(ours, theirs, a, b), self._after(theirs, ours, b, a).T
    i, j = np.unravel_index(int(np.argmin(_of_both(after_a, after_b))), after_a.shape)
    before = _of_both(self.costs[a], self.costs[b]) * (1.0 - 1e-3)
    if _of_both(after_a, after_b)[i, j] >= before:
      return False
    self._swap(ours[i], theirs[j])
    # What the others need was taken for unchanged.
    if _of_both(self.costs[a], self.costs[b]) >= before:
      self._swap(ours[i], theirs[j])
      return False
    return True

  def _swap(self, i: int, j: int) -> None:
    a, b = self.ranks[i], self.ranks[j]
    change = self.search.needs[j].astype(np.int16) - self.search.needs[i]
    self.counts[a] += change
    self.counts[b] -= change
    self.ranks[i], self.ranks[j] = b, a
    price, owners = self.search.price, self.owners
    for rank in (a, b):
      self.moves[rank] = np.where(self.counts[rank] > 0, price[owners, rank], 0.0)
    if self.search.key_ranks is None:
      for chunk in (i, j):
        self.moves[:, chunk] = np.where(self.counts[:, chunk] > 0, price[owners[chunk]], 0.0)
    self._update_costs()

  def _after(self, ours: np.ndarray, theirs: np.ndarray, a: int, b: int) -> np.ndarray:
    """`[ours, theirs]`: what rank a costs if it gives one of ours for one of theirs."""
    search = self.search
    load = self.load[a] - search.work[ours][:, None] + search.work[theirs][None, :]
    price = search.price[self.owners, a]
    both = search.needs[np.concatenate([ours, theirs])]
    # Neighbouring keys that the same chunks need are counted together.
    is_new = (both[:, 1:] != both[:, :-1]).any(axis=0)
    begins = np.flatnonzero(np.append(True, is_new))
    price = np.add.reduceat(price, begins)
    mine, new = both[: len(ours), begins], both[len(ours) :, begins]
    is_last = self.counts[a][begins][None] - mine == 0  # Not needed without this one of ours.
    received = (~is_last @ price)[:, None] + (is_last * price) @ new.T.astype(np.float64)
    sent = np.broadcast_to(self.sent[a], received.shape)
    if search.key_ranks is None:
      # The keys of the chunk that went are at b now, those of the one that came are here.
      received += search.price[b, a] * self._needed(ours, theirs, ours, a)
      received -= search.price[b, a] * self._needed(ours, theirs, theirs, a)
      # About what the other owner paid, as if the two had no part in it.
      sent = sent - self.sending[ours][:, None] + self.sending[theirs][None, :]
    return search.total(load, np.maximum(received, sent))

  def _needed(self, ours, theirs, chunks, a: int) -> np.ndarray:
    """`[ours, theirs]`: whether, after the exchange, a needs the keys of the one in `chunks`."""
    needs, counts = self.search.needs, self.counts[a]
    if chunks is ours:
      is_kept = counts[ours] - needs[ours, ours] > 0
      return is_kept[:, None] | needs[theirs[None, :], ours[:, None]]
    is_kept = counts[theirs][None] - needs[ours[:, None], theirs[None, :]] > 0
    return is_kept | needs[theirs, theirs][None]


def _of_both(a, b):
  """The larger cost decides; then what both cost together."""
  return np.maximum(a, b) + 1e-3 * (a + b)
