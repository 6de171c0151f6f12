"""A key carried out in numpy, token by token: what each rank has, gets and computes."""

import dataclasses

import numpy as np

from jax_magi import AttentionMask, DistAttnKey, get_position_ids
from jax_magi._src.exchange_check.followed import exchanged, followed


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
  """Follows the tables of a key, like the runtime."""
  spec = key.spec
  n = spec.cp_size
  queries = get_position_ids(key).reshape(n, -1)
  keys = get_position_ids(key, role="k").reshape(n, -1)
  buffers = [[keys[rank]] if spec.overlap_degree else [] for rank in range(n)]
  is_whole = key.whole_slices is not None
  arrived_so_far = [[keys[rank]] for rank in range(n)]
  whole_buffers = [[keys[rank]] for rank in range(n)]
  received = [[] for _ in range(n)]
  crossings = []
  for transfer, hops in enumerate(spec.capacities.hops):
    parts = [[keys[rank]] for rank in range(n)]  # What each rank has: blocks of tokens.
    for hop in hops:
      arrived = exchanged(key, parts, transfer, hop)
      if hop.level == "node":
        crossings += [(rank, x) for rank in range(n) for b in arrived[rank] for x in b[b >= 0]]
      for rank in range(n):
        parts[rank] += arrived[rank]
        if hop.kind != "all_gather":
          received[rank] += [block[block >= 0] for block in arrived[rank]]
    for rank in range(n):
      (buffer,) = followed(
        key.take_runs[rank, transfer], parts[rank], [spec.capacities.rows[transfer]]
      )
      buffers[rank].append(buffer)
      arrived_so_far[rank] += parts[rank][1:]
      if is_whole:
        size = spec.capacities.whole_rows[transfer]
        runs = key.whole_runs[rank, transfer]
        whole_buffers[rank] += followed(runs, arrived_so_far[rank], [size])

  padded, _ = _pairs(key.slices, buffers, queries, spec)
  if is_whole:
    whole, num_stages = _pairs(key.whole_slices, whole_buffers, queries, spec)
    np.testing.assert_array_equal(whole, padded)
    assert num_stages.max() <= 1, "a query is divided among stages"
    for rank, table in enumerate(key.whole_slices[:, 0]):
      # The first stage fills the rows of queries that no stage computes.
      unseen = np.flatnonzero(num_stages[queries[rank]] == 0)
      has_rows = table[:, 0] < table[:, 1]
      marked = table[has_rows & (table[:, 2] >= table[:, 3]), :2].tolist()
      assert marked == ([[unseen[0], unseen[-1] + 1]] if len(unseen) else [])
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


def _pairs(tables, buffers, queries, spec):
  """How often each pair is computed, and in how many stages each query sees something."""
  padded = np.zeros((spec.cp_size * spec.q_local, spec.cp_size * spec.k_local), np.int32)
  num_stages = np.zeros(len(padded), np.int32)
  for rank, stages in enumerate(buffers):
    for stage, buffer in enumerate(stages):
      mask = AttentionMask(tables[rank, stage], spec.q_local, len(buffer))
      rows, places = np.nonzero(mask.to_dense())
      assert (buffer[places] >= 0).all(), "a slice shows a row that is not in the buffer"
      np.add.at(padded, (queries[rank][rows], buffer[places]), 1)
      num_stages[queries[rank][np.unique(rows)]] += 1
  return padded, num_stages
