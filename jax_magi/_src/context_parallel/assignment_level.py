"""Exchanges chunks inside nodes until each rank sends about the same to each other node.

Between nodes, every pair of ranks moves as many rows as the busiest pair. The cost is therefore the
largest number of rows that any rank sends to any other node. Exchanges inside a node do not change
the needs of nodes. They only change which rank of the node sends what.
"""

from __future__ import annotations

import numpy as np

from jax_magi._src.context_parallel.assignment_cost import CostModel

# The maximum number of exchanges per rank, and of partners in its node for the busiest rank.
_EXCHANGES, _NUM_PARTNERS = 3, 2
# An exchange must lower the rows of the busier of two ranks by at least this share.
_LEAST_GAIN = 0.005
# With more nodes, few rows pass between any two of them, and the search would take long.
_MOST_NODES = 16


def levelled(model: CostModel, ranks: np.ndarray) -> np.ndarray:
  """The rank of each unit after exchanges. All units have the same size."""
  if not 1 < model.num_nodes <= _MOST_NODES or model.ranks_per_node == 1:
    return ranks
  ranks = ranks.copy()
  rows = model.far_rows(ranks).T  # [units, nodes]
  work = model.units.work
  sent = np.zeros((model.num_ranks, model.num_nodes))
  np.add.at(sent, ranks, rows)
  load = np.bincount(ranks, work, model.num_ranks)
  limit = max(float(load.max()), model.limit)
  for _ in range(_EXCHANGES * model.num_ranks):
    busiest, node = np.unravel_index(int(sent.argmax()), sent.shape)
    first = busiest // model.ranks_per_node * model.ranks_per_node
    peers = np.arange(first, first + model.ranks_per_node)
    peers = peers[peers != busiest]
    partners = peers[np.argsort(sent[peers, node], kind="stable")[:_NUM_PARTNERS]]
    ours = np.flatnonzero(ranks == busiest)
    theirs = np.flatnonzero(np.isin(ranks, partners))
    partner = ranks[theirs]
    change = rows[theirs][None] - rows[ours][:, None]  # [ours, theirs, nodes]
    largest = np.maximum(
      (sent[busiest] + change).max(axis=2), (sent[partner][None] - change).max(axis=2)
    )
    change_of_load = work[theirs][None] - work[ours][:, None]
    is_even = (load[busiest] + change_of_load <= limit) & (load[partner] - change_of_load <= limit)
    largest[~is_even] = np.inf
    i, j = np.unravel_index(int(largest.argmin()), largest.shape)
    if largest[i, j] > sent[busiest, node] * (1.0 - _LEAST_GAIN):
      break
    other = partner[j]
    sent[busiest] += change[i, j]
    sent[other] -= change[i, j]
    load[busiest] += change_of_load[i, j]
    load[other] -= change_of_load[i, j]
    ranks[ours[i]], ranks[theirs[j]] = other, busiest
  return ranks
