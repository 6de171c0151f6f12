"""Packs documents into nodes, and then into the ranks of each node.

A document is a part of the sequence that attends only to itself, so a document on a single rank
needs no communication. Documents therefore stay whole where they fit, those with the most work
first. A document that is too large for a node (or a rank) is split over all of them, in runs of
chunks, so that the work becomes even. Splitting it over only two would not be cheaper: every pair
of a collective moves as many rows as the busiest pair, and each of the two would send more rows.
"""

from __future__ import annotations

import heapq

import numpy as np

# A document is divided if it needs more than this share of a group.
_MOST_OF_A_GROUP = 0.95
# If a node's work exceeds the mean by more than _TOLERANCE, more documents are divided, one at a
# time. Each has at least _MORE times the excess work. Ranks exchange chunks afterwards.
_TOLERANCE, _MORE, _MOST_TRIALS = 0.04, 1.5, 6
# How much fuller a group may be if it holds a neighbouring document, which shares a chunk with this
# one.
_WORTH_OF_A_NEIGHBOUR = 0.1
# The approximate number of runs of a divided document that each group gets. Fewer runs make the
# backward kernels faster; more runs make the work more even.
_RUNS_OF_GROUP = 2
# Every group gets a share of divided documents, as if at least this much of its work were missing.
_LEAST_MISSING = 0.05


def document_begins(slices: np.ndarray) -> np.ndarray:
  """int64 `[num_documents]`, ascending: the first token of each document."""
  begin = np.minimum(slices[:, 0], slices[:, 2])
  end = np.maximum(slices[:, 1], slices[:, 3])
  order = np.argsort(begin, kind="stable")
  begin, end = begin[order], np.maximum.accumulate(end[order])
  return begin[np.append(True, begin[1:] >= end[:-1])[: len(begin)]]


def packed(work: np.ndarray, document: np.ndarray, num_nodes: int, per_node: int) -> np.ndarray:
  """int32 `[num_chunks]`: the rank of each chunk. Ranks have equally many chunks and similar work.

  Args:
    work: float64 `[num_chunks]`.
    document: int64 `[num_chunks]`, the document to which each chunk, or most of it, belongs.
    num_nodes: the number of nodes.
    per_node: the number of ranks of each node.
  """
  ranks = np.empty(len(work), np.int32)
  nodes = _groups(work, document, num_nodes, _MOST_TRIALS)
  for node in range(num_nodes):
    chunks = np.flatnonzero(nodes == node)
    ranks[chunks] = node * per_node + _groups(work[chunks], document[chunks], per_node, 1)
  return ranks


def _groups(work: np.ndarray, document: np.ndarray, num_groups: int, num_trials: int) -> np.ndarray:
  """int64 `[num_chunks]`: the group of each chunk. Groups have equally many chunks."""
  order = np.argsort(document, kind="stable")
  bounds = np.flatnonzero(np.diff(document[order], prepend=-1))
  documents = np.split(order, bounds[1:])
  sizes = np.array([len(chunks) for chunks in documents])
  mean = max(float(work.sum()) / num_groups, 1.0)
  loads = np.add.reduceat(work[order], bounds) / mean
  is_divided = np.maximum(loads, sizes * num_groups / len(work)) > _MOST_OF_A_GROUP
  best, most = np.empty(0, np.int64), np.inf
  for _ in range(num_trials):
    groups = _filled(work, documents, loads, is_divided, num_groups)
    load = np.bincount(groups, work, num_groups) / mean
    if load.max() < most:
      best, most = groups, load.max()
    # Divide one more document: one with a little more work than the excess.
    is_enough = ~is_divided & (loads > _MORE * np.maximum(load - 1.0, 0.0).sum())
    if load.max() <= 1.0 + _TOLERANCE or not is_enough.any():
      break
    is_divided[np.where(is_enough, loads, np.inf).argmin()] = True
  return best


def _filled(
  work: np.ndarray,
  documents: list[np.ndarray],
  loads: np.ndarray,
  is_divided: np.ndarray,
  num_groups: int,
) -> np.ndarray:
  """The group of each chunk, given the documents that are divided."""
  divided = [chunks for chunks, is_in in zip(documents, is_divided, strict=True) if is_in]
  groups = _Groups(work, num_groups, sum(map(len, divided)))
  rest = []
  for number in np.argsort(-loads, kind="stable").tolist():
    if not is_divided[number] and not groups.add_whole(documents[number]):
      rest.append(documents[number])
  for chunks in rest:
    groups.add_in_pieces(chunks)
  groups.add_each([run for chunks in divided for run in _runs(chunks, num_groups)])
  return groups.group


def _runs(chunks: np.ndarray, num_groups: int) -> list[np.ndarray]:
  """Cuts a divided document into runs of chunks, some for each group."""
  size = max(len(chunks) // (_RUNS_OF_GROUP * num_groups), 1)
  # Only runs of neighbours: chunks between them may be at other nodes.
  ends = np.flatnonzero(np.diff(chunks) != 1) + 1
  return [part[i : i + size] for part in np.split(chunks, ends) for i in range(0, len(part), size)]


class _Groups:
  """Groups that are being filled.

  Attributes:
    group: int64 `[num_chunks]`, the group of each chunk, once it has one.
  """

  def __init__(self, work: np.ndarray, num_groups: int, num_later: int) -> None:
    """Reserves room for `num_later` chunks, which are added last, in groups that lack work."""
    self.group = np.full(len(work), -1)
    self._size = len(work) // num_groups
    self._mean = max(float(work.sum()) / num_groups, 1.0)
    self._work = work
    self._load = np.zeros(num_groups)
    self._room = np.full(num_groups, self._size)
    self._num_later = num_later

  def add_whole(self, chunks: np.ndarray) -> bool:
    """Adds chunks to the emptiest group that has room for all of them, if there is one."""
    free = self._free()
    load = (self._load + self._work[chunks].sum()) / self._mean
    fullness = np.maximum(load, 1.0 - (free - len(chunks)) / self._size)
    for near in (chunks[0] - 1, chunks[-1] + 1):
      if 0 <= near < len(self.group) and self.group[near] >= 0:
        fullness[self.group[near]] -= _WORTH_OF_A_NEIGHBOUR
    group = int(np.where(free < len(chunks), np.inf, fullness).argmin())
    if free[group] < len(chunks):
      return False
    self._add(chunks, group)
    return True

  def add_in_pieces(self, chunks: np.ndarray) -> None:
    """Adds neighbouring chunks to groups, as many to each as it has room for."""
    while len(chunks):
      free = np.where(self._room > 0, self._free(), -np.inf)
      # The group with the least work among those with enough room, or else the one with most room.
      fits = free >= len(chunks)
      group = int((np.where(fits, -self._load, -np.inf) if fits.any() else free).argmax())
      count = int(min(max(free[group], 1.0), self._room[group], len(chunks)))
      self._add(chunks[:count], group)
      chunks = chunks[count:]

  def add_each(self, runs: list[np.ndarray]) -> None:
    """Adds the run with the most work first, to the group with the least work that has room."""
    loads = [float(self._work[run].sum()) for run in runs]
    heap = [(load, g) for g, load in enumerate(self._load.tolist())]
    heapq.heapify(heap)
    for number in np.argsort(loads, kind="stable")[::-1].tolist():
      run, full = runs[number], []
      while heap and self._room[heap[0][1]] < len(run):
        full.append(heapq.heappop(heap))
      if heap:
        load, group = heapq.heappop(heap)
        self._add(run, group)
        full.append((load + loads[number], group))
      else:
        self.add_in_pieces(run)
        full = [(float(self._load[group]), group) for _, group in full]
      for entry in full:
        heapq.heappush(heap, entry)

  def _free(self) -> np.ndarray:
    """The number of chunks that fit in each group in addition to the reserved ones."""
    missing = np.maximum(self._mean - self._load, 0.0) + _LEAST_MISSING * self._mean
    return self._room - self._num_later * missing / max(float(missing.sum()), 1.0)

  def _add(self, chunks: np.ndarray, group: int) -> None:
    self.group[chunks] = group
    self._load[group] += self._work[chunks].sum()
    self._room[group] -= len(chunks)
