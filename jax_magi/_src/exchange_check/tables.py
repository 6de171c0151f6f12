"""Random keys, in every form that a transport takes."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import numpy as np

from jax_magi._src.context_parallel.hops import Hop, Ranks
from jax_magi._src.context_parallel.key import DistAttnKey
from jax_magi._src.context_parallel.make_keys import magi_attn_flex_key
from jax_magi._src.masks.mask import AttentionMask

_CHUNKS_OF_RANK = 4


@dataclasses.dataclass(frozen=True)
class Tables:
  """Keys of one spec, so that one compiled program serves all of them.

  Attributes:
    transport: how rows travel.
    keys: of different masks, or of different orders of chunks.
  """

  transport: str
  keys: tuple[DistAttnKey, ...]

  @property
  def hops(self) -> tuple[tuple[Hop, ...], ...]:
    """Of each transfer."""
    return self.keys[0].capacities.hops

  @property
  def collectives(self) -> str:
    """What rows travel by, such as "all_gather, all_to_all" for two levels."""
    return ", ".join(hop.kind for hop in self.hops[-1])  # The last transfer has all levels.


def make_tables(
  transport: str, ranks: Ranks, overlap_degree: int, local_rows: int, rng: np.random.Generator
) -> list[Tables]:
  """Keys for each form of a transport: different collectives, and so different programs.

  Args:
    transport: one of `TRANSPORTS`.
    ranks: of the axis.
    overlap_degree: as in `magi_attn_flex_key`.
    local_rows: about so many rows of each rank.
    rng: draws masks and orders.
  """
  forms: dict[Any, Tables] = {}
  for masks in _FORMS[transport]:
    found = Tables(transport, _make_keys(masks, transport, ranks, overlap_degree, local_rows, rng))
    # With few ranks, all forms are one.
    kinds = tuple(tuple((hop.level, hop.kind) for hop in hops) for hops in found.hops)
    forms.setdefault(kinds, found)
  return list(forms.values())


def _make_keys(masks, transport, ranks, overlap_degree, local_rows, rng) -> tuple[DistAttnKey, ...]:
  chunk_size = max(local_rows // _CHUNKS_OF_RANK, 4)
  options: dict[str, Any] = {
    "cp_size": ranks.count,
    "chunk_size": chunk_size,
    "overlap_degree": overlap_degree,
    "transport": transport,
    "ranks_per_node": ranks.per_node,
  }
  if masks == _WINDOWS and transport == "all_to_all":
    # Only where the planner may choose does a permutation take the place of all_to_all.
    options.update(transport="auto", ranks_per_node=None)
  made = [make(rng, ranks.count, chunk_size) for make in masks]
  keys = [magi_attn_flex_key(mask, dispatch=order, **options) for mask, order in made]
  capacities = functools.reduce(operator.or_, (key.capacities for key in keys))
  keys = [
    magi_attn_flex_key(mask, dispatch=order, capacities=capacities, **options)
    for mask, order in made
  ]
  assert all(key.spec == keys[0].spec and key.spec.transport == transport for key in keys)
  return tuple(keys)


def _length(num_ranks: int, chunk_size: int) -> int:
  """Tokens, of which the last chunk has too few."""
  return num_ranks * _CHUNKS_OF_RANK * chunk_size - chunk_size // 2


def _random_order(rng: np.random.Generator, num_ranks: int) -> np.ndarray:
  return rng.permutation(np.repeat(np.arange(num_ranks), _CHUNKS_OF_RANK))


def _documents(rng, num_ranks, chunk_size):
  """Few rows to few ranks: documents are a quarter of a chunk, on average."""
  length = _length(num_ranks, chunk_size)
  cuts = np.sort(rng.integers(0, length + 1, 4 * _CHUNKS_OF_RANK * num_ranks - 1))
  bounds = np.concatenate([[0], cuts, [length]])
  is_causal = bool(rng.integers(2))
  return AttentionMask.from_cu_seqlens(bounds, causal=is_causal), _random_order(rng, num_ranks)


def _shared(rng, num_ranks, chunk_size):
  """Few rows to all ranks, so that their gradients are sums: a quarter of each chunk."""
  length, size = _length(num_ranks, chunk_size), chunk_size // 4
  num_chunks = num_ranks * _CHUNKS_OF_RANK
  # The first half of the last chunk is there.
  begins = np.arange(num_chunks) * chunk_size + rng.integers(0, size + 1, num_chunks)
  k_ranges = np.stack([begins, begins + size], axis=1)
  q_ranges = np.tile([0, length], (num_chunks, 1))
  mask = AttentionMask.from_ranges(q_ranges, k_ranges, q_len=length, k_len=length)
  return mask, _random_order(rng, num_ranks)


def _everything(rng, num_ranks, chunk_size):
  """All rows to all ranks."""
  return AttentionMask.full(_length(num_ranks, chunk_size)), _random_order(rng, num_ranks)


def _window(rng, num_ranks, chunk_size):
  """Rows to the next rank alone."""
  left = int(rng.integers(1, 2 * chunk_size))
  mask = AttentionMask.sliding_window(_length(num_ranks, chunk_size), left=left, right=0)
  return mask, "contiguous"


_MIXED = (_documents, _shared, _everything)
# Between nodes, an all-gather takes the place of all_to_all as soon as one mask needs everything.
_SPARSE = (_documents, _shared, _documents)
# Permutations take the place of all_to_all.
_WINDOWS = (_window, _window, _window)
# Masks of the keys that share a program.
_FORMS = {
  "all_to_all": (_MIXED, _WINDOWS),
  "all_gather": (_MIXED,),
  "two_level": (_MIXED, _SPARSE, _WINDOWS),
  "ragged": (_MIXED,),
}
