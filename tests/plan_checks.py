"""A key carried out in numpy, token by token: what each rank has, gets and computes."""

import dataclasses

import numpy as np

from jax_magi import AttentionMask, DistAttnKey, get_position_ids
from jax_magi._src.context_parallel.routes import NOWHERE


@dataclasses.dataclass(frozen=True)
class Executed:
  """What a key does.

  Attributes:
    counts: `[q_len, k_len]`, how often each pair is computed.
    received: of each rank, the tokens that came from others, as often as they came.
    owned: of each rank, its own tokens of keys.
    shown: of each rank, the tokens that its queries see.
    crossings: (relay, token) of all that came to a rank from another node, in two levels.
  """

  counts: np.ndarray
  received: list[np.ndarray]
  owned: list[np.ndarray]
  shown: list[np.ndarray]
  crossings: list[tuple[int, int]]


def execute(key: DistAttnKey) -> Executed:
  """Follows the tables of a key, as the runtime does."""
  spec = key.spec
  n = spec.cp_size
  queries = get_position_ids(key).reshape(n, -1)
  keys = get_position_ids(key, role="k").reshape(n, -1)
  buffers = [[keys[rank]] if spec.overlap_degree else [] for rank in range(n)]
  received = [[] for _ in range(n)]
  crossings = []
  for transfer, hops in enumerate(spec.capacities.hops):
    parts = [[keys[rank]] for rank in range(n)]  # What each rank has: blocks of tokens.
    for hop in hops:
      arrived = _exchanged(key, parts, transfer, hop)
      if hop.level == "node":
        crossings += [(rank, x) for rank in range(n) for b in arrived[rank] for x in b[b >= 0]]
      for rank in range(n):
        parts[rank] += arrived[rank]
        if hop.kind != "all_gather":
          received[rank] += [block[block >= 0] for block in arrived[rank]]
    for rank in range(n):
      (buffer,) = _followed(
        key.take_runs[rank, transfer], parts[rank], [spec.capacities.rows[transfer]]
      )
      buffers[rank].append(buffer)

  padded = np.zeros((n * spec.q_local, n * spec.k_local), np.int32)
  for rank in range(n):
    for stage, buffer in enumerate(buffers[rank]):
      mask = AttentionMask(key.slices[rank, stage], spec.q_local, len(buffer))
      rows, places = np.nonzero(mask.to_dense())
      assert (buffer[places] >= 0).all(), "a slice shows a row that is not in the buffer"
      np.add.at(padded, (queries[rank][rows], buffer[places]), 1)
  assert not padded[spec.q_len :].any() and not padded[:, spec.k_len :].any()
  counts = padded[: spec.q_len, : spec.k_len]
  shown = [np.flatnonzero(padded[queries[rank]].any(axis=0)) for rank in range(n)]
  return Executed(
    counts,
    [np.concatenate(x) if x else np.zeros(0, int) for x in received],
    list(keys),
    shown,
    crossings,
  )


def _exchanged(key, parts, transfer, hop):
  """What a hop brings to each rank, block by block."""
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
    _followed(key.send_runs[level][rank, transfer], parts[rank], sizes)
    for rank in range(spec.cp_size)
  ]
  for group in groups:
    for index, rank in enumerate(group):
      if hop.kind == "permute":
        arrived[rank] = [
          sent[group[(index - shift) % len(group)]][i] for i, shift in enumerate(hop.shifts)
        ]
      else:
        arrived[rank] = [sent[peer][index] for peer in group]
      # Both sides must agree on what passes between them.
      for peer, block in zip(group, arrived[rank], strict=False):
        if hop.kind != "permute" and peer != rank:
          size = key.pairs[level][rank, transfer, 1, group.index(peer)]
          assert size == key.pairs[level][peer, transfer, 0, index]
          assert (block[:size] >= 0).all() and (block[size:] == -1).all()
  return arrived


def _followed(runs, parts, sizes):
  """Blocks of tokens, as runs (to_block, to_place, from_block, from_place) say; -1 is nothing."""
  blocks = [np.full(size, -1) for size in sizes]
  runs = [run for run in runs.tolist() if run[1] < NOWHERE]
  for i, (block, place, source, begin) in enumerate(runs):
    following = runs[i + 1] if i + 1 < len(runs) else (block + 1, 0)
    end = following[1] if following[0] == block else sizes[block]
    if begin < NOWHERE and end > place:
      taken = parts[source][begin : begin + end - place]
      assert len(taken) == end - place, "a run leaves the block that it takes from"
      blocks[block][place:end] = taken
  return blocks
