"""Simulates the transfers of a key in numpy, block by block, to know which row arrives where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_magi._src.context_parallel.capacities import RECEIVED, SENT
from jax_magi._src.context_parallel.hops import Hop
from jax_magi._src.context_parallel.key import DistAttnKey
from jax_magi._src.context_parallel.routes import NOWHERE


def buffer_rows(key: DistAttnKey) -> list[np.ndarray]:
  """For each transfer, int64 `[cp_size, rows]`: the global row at each place, or -1 for none."""
  spec = key.spec
  own = np.arange(spec.cp_size * spec.k_local).reshape(spec.cp_size, -1)
  found = []
  for transfer, hops in enumerate(spec.capacities.hops):
    parts = [[rows] for rows in own]
    for hop in hops:
      arrived = exchanged(key, parts, transfer, hop)
      for rank, blocks in enumerate(parts):
        blocks += arrived[rank]
    sizes = [spec.capacities.rows[transfer]]
    rows = [
      followed(key.take_runs[rank, transfer], blocks, sizes)[0] for rank, blocks in enumerate(parts)
    ]
    found.append(np.stack(rows))
  return found


def exchanged(
  key: DistAttnKey, parts: Sequence[list[np.ndarray]], transfer: int, hop: Hop
) -> dict[int, list[np.ndarray]]:
  """The blocks that each rank receives in a hop.

  Args:
    key: the key of all ranks.
    parts: for each rank, the blocks of rows that it holds: its own, and those of earlier hops.
    transfer: the index of the transfer.
    hop: a hop of that transfer.
  """
  spec = key.spec
  ranks, level = spec.ranks, spec.levels.index(hop.level)
  groups = ranks.groups(hop.level) or [list(range(spec.cp_size))]
  if hop.kind == "all_gather":
    rows = slice(hop.begin, hop.begin + hop.rows[0])
    return {rank: [parts[peer][0][rows] for peer in group] for group in groups for rank in group}
  arrived = {}
  count = len(hop.shifts) if hop.kind == "permute" else len(groups[0])
  sizes = hop.rows if hop.kind == "permute" else hop.rows * count
  sent = [
    followed(key.send_runs[level][rank, transfer], parts[rank], sizes)
    for rank in range(spec.cp_size)
  ]
  pairs = np.asarray(key.pairs[level])[:, transfer]
  for group in groups:
    for index, rank in enumerate(group):
      if hop.kind == "permute":
        arrived[rank] = [
          sent[group[(index - shift) % len(group)]][i] for i, shift in enumerate(hop.shifts)
        ]
        continue
      arrived[rank] = [sent[peer][index] for peer in group]
      # Sender and receiver must agree on the number of rows between them.
      for number, (peer, block) in enumerate(zip(group, arrived[rank], strict=True)):
        if peer != rank:
          size = pairs[rank, RECEIVED, number]
          assert size == pairs[peer, SENT, index]
          assert (block[:size] >= 0).all() and (block[size:] == -1).all()
  return arrived


def followed(runs: np.ndarray, parts: Sequence[np.ndarray], sizes: Sequence[int]) -> Any:
  """Fills blocks of rows by runs (to_block, to_place, from_block, from_place); -1 is no row."""
  blocks = [np.full(size, -1) for size in sizes]
  rows = [run for run in runs.tolist() if run[1] < NOWHERE]
  for i, (block, place, source, begin) in enumerate(rows):
    following = rows[i + 1] if i + 1 < len(rows) else (block + 1, 0)
    end = following[1] if following[0] == block else sizes[block]
    if begin < NOWHERE and end > place:
      taken = parts[source][begin : begin + end - place]
      assert len(taken) == end - place, "a run leaves the block that it takes from"
      blocks[block][place:end] = taken
  return blocks
