"""Random keys for every form of a transport."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import defaultdict
from typing import Any

import numpy as np

from jax_magi._src.context_parallel.hops import Hop, Ranks
from jax_magi._src.context_parallel.key import DistAttnKey
from jax_magi._src.context_parallel.make_keys import magi_attn_flex_key
from jax_magi._src.masks.mask import AttentionMask

_CHUNKS_OF_RANK = 4
# The number of random draws of each kind of mask below.
_KEYS_OF_MASK = 2


@dataclasses.dataclass(frozen=True)
class Tables:
  """Keys with the same spec, so that one compiled program serves all of them.

  Attributes:
    transport: the transport that moves the rows.
    keys: keys of different masks, or of different orders of chunks.
  """

  transport: str
  keys: tuple[DistAttnKey, ...]

  @property
  def hops(self) -> tuple[tuple[Hop, ...], ...]:
    """The hops of each transfer."""
    return self.keys[0].capacities.hops

  @property
  def collectives(self) -> str:
    """The collectives that move the rows, such as "all_gather, all_to_all" for two levels."""
    return ", ".join(hop.kind for hop in self.hops[-1])  # The last transfer has all levels.


def make_tables(
  transport: str, ranks: Ranks, overlap_degree: int, local_rows: int, rng: np.random.Generator
) -> list[Tables]:
  """Keys for each form of a transport. Forms use different collectives: one program each.

  Args:
    transport: one of `TRANSPORTS`.
    ranks: the ranks of the axis.
    overlap_degree: as in `magi_attn_flex_key`.
    local_rows: the approximate number of rows of each rank.
    rng: the generator of masks and orders.
  """
  chunk_size = max(local_rows // _CHUNKS_OF_RANK, 4)
  forms = defaultdict(list)
  for make in _MASKS * _KEYS_OF_MASK:
    mask, order = make(rng, ranks.count, chunk_size)
    plan = functools.partial(
      magi_attn_flex_key,
      mask,
      dispatch=order,
      cp_size=ranks.count,
      chunk_size=chunk_size,
      overlap_degree=overlap_degree,
      transport=transport,
      ranks_per_node=ranks.per_node,
    )
    if make is _window and transport == "all_to_all":
      # The planner replaces all_to_all by permutations only if it may choose the transport.
      plan = functools.partial(plan, transport="auto", ranks_per_node=None)
    capacities = plan().capacities
    kinds = [[(hop.level, hop.kind, hop.shifts) for hop in hops] for hops in capacities.hops]
    forms[str(kinds)].append((plan, capacities))
  return [Tables(transport, _of_one_program(form)) for form in forms.values()]


def _of_one_program(form: Any) -> tuple[DistAttnKey, ...]:
  """Keys of the same form, with capacities that fit all of them."""
  room = functools.reduce(operator.or_, (capacities for _, capacities in form))
  return tuple(plan(capacities=room) for plan, _ in form)


def _length(num_ranks: int, chunk_size: int) -> int:
  """A number of tokens that leaves the last chunk incomplete."""
  return num_ranks * _CHUNKS_OF_RANK * chunk_size - chunk_size // 2


def _random_order(rng: np.random.Generator, num_ranks: int) -> np.ndarray:
  return rng.permutation(np.repeat(np.arange(num_ranks), _CHUNKS_OF_RANK))


def _documents(
  rng: np.random.Generator, num_ranks: int, chunk_size: int
) -> tuple[AttentionMask, Any]:
  """Few ranks need few rows: the mean document is a quarter of a chunk."""
  length = _length(num_ranks, chunk_size)
  cuts = np.sort(rng.integers(0, length + 1, 4 * _CHUNKS_OF_RANK * num_ranks - 1))
  bounds = np.concatenate([[0], cuts, [length]])
  is_causal = bool(rng.integers(2))
  return AttentionMask.from_cu_seqlens(bounds, causal=is_causal), _random_order(rng, num_ranks)


def _shared(rng: np.random.Generator, num_ranks: int, chunk_size: int) -> tuple[AttentionMask, Any]:
  """All ranks need a quarter of each chunk, so gradients of these rows are sums over ranks."""
  length, size = _length(num_ranks, chunk_size), chunk_size // 4
  num_chunks = num_ranks * _CHUNKS_OF_RANK
  # The last chunk is half as long as the others, which leaves room for these keys.
  begins = np.arange(num_chunks) * chunk_size + rng.integers(0, size + 1, num_chunks)
  k_ranges = np.stack([begins, begins + size], axis=1)
  q_ranges = np.tile([0, length], (num_chunks, 1))
  mask = AttentionMask.from_ranges(q_ranges, k_ranges, q_len=length, k_len=length)
  return mask, _random_order(rng, num_ranks)


def _everything(
  rng: np.random.Generator, num_ranks: int, chunk_size: int
) -> tuple[AttentionMask, Any]:
  """All ranks need all rows: between nodes, an all-gather replaces all_to_all."""
  return AttentionMask.full(_length(num_ranks, chunk_size)), _random_order(rng, num_ranks)


def _window(rng: np.random.Generator, num_ranks: int, chunk_size: int) -> tuple[AttentionMask, Any]:
  """Only the next rank needs a rank's rows: permutations replace all_to_all."""
  left = int(rng.integers(1, 2 * chunk_size))
  mask = AttentionMask.sliding_window(_length(num_ranks, chunk_size), left=left, right=0)
  return mask, "contiguous"


_MASKS = (_documents, _shared, _everything, _window)
