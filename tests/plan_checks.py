"""A key carried out in numpy, token by token: what each rank has, gets and computes."""

import dataclasses

import numpy as np

from jax_magi import AttentionMask, DistAttnKey, get_position_ids


@dataclasses.dataclass(frozen=True)
class Executed:
  """What a key does.

  Attributes:
    counts: `[q_len, k_len]`, how often each pair is computed.
    received: of each rank, the tokens that came from others, as often as they came.
    owned: of each rank, its own tokens of keys.
    shown: of each rank, the tokens that its queries see.
  """

  counts: np.ndarray
  received: list[np.ndarray]
  owned: list[np.ndarray]
  shown: list[np.ndarray]


def execute(key: DistAttnKey) -> Executed:
  """Follows the tables of a key, as the runtime does."""
  spec = key.spec
  n = spec.cp_size
  queries = get_position_ids(key).reshape(n, -1)
  keys = get_position_ids(key, role="k").reshape(n, -1)
  buffers = [[keys[rank]] if spec.overlap_degree else [] for rank in range(n)]
  received = [[] for _ in range(n)]
  for transfer in range(spec.num_transfers):
    arrived = _all_gathered(key, keys, transfer)
    if arrived is None:
      arrived = _sent(key, keys, transfer)
      for rank in range(n):
        received[rank].append(arrived[rank][arrived[rank] >= 0])
    for rank in range(n):
      source = arrived[rank]
      if not spec.overlap_degree:
        source = np.concatenate([keys[rank], source])
      index = _expand(key.take_runs[rank, transfer], spec.capacities.rows)
      buffers[rank].append(
        np.where(index < len(source), np.append(source, -1)[np.minimum(index, len(source))], -1)
      )

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
    counts, [np.concatenate(x) if x else np.zeros(0, int) for x in received], list(keys), shown
  )


def _sent(key, keys, transfer):
  """What arrives at each rank, by the sizes and places that senders have."""
  n = key.spec.cp_size
  arrived = [np.full(key.spec.capacities.rows, -1) for _ in range(n)]
  for sender in range(n):
    rows = _expand(key.send_runs[sender, transfer], key.spec.capacities.rows)
    send_sizes, _, places, _ = key.pairs[sender, transfer]
    begin = 0
    for receiver in range(n):
      size, place = send_sizes[receiver], places[receiver]
      # Both sides must agree on what passes between them, and where it lies on the way back.
      assert key.pairs[receiver, transfer, 1, sender] == size
      assert size == 0 or key.pairs[receiver, transfer, 3, sender] == begin
      target = arrived[receiver][place : place + size]
      assert (target == -1).all() and len(target) == size
      target[:] = keys[sender][rows[begin : begin + size]]
      begin += size
  return arrived


def _all_gathered(key, keys, transfer):
  spec = key.spec
  if not spec.capacities.all_gather:
    return None
  part = -(-spec.k_local // spec.num_transfers)
  begin = min(transfer * part, spec.k_local)
  return [keys[:, begin : begin + part].reshape(-1)] * spec.cp_size


def _expand(runs, length):
  index = np.empty(length, np.int64)
  runs = runs[runs[:, 0] < length].tolist()
  for i, (place, source) in enumerate(runs):
    end = runs[i + 1][0] if i + 1 < len(runs) else length
    index[place:end] = source + np.arange(end - place)
  return index
