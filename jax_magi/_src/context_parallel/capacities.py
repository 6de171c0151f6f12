"""The static part of a key: lengths, and the capacities of a compiled step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from jax_magi._src.arguments import check_length
from jax_magi._src.context_parallel.hop_choice import padded_rows, round_up
from jax_magi._src.context_parallel.hops import Hop, Ranks
from jax_magi._src.context_parallel.schedule import Order
from jax_magi._src.context_parallel.transport import is_near_first, levels_of

# How rows may travel; "auto" is one of the first three.
TRANSPORTS = ("all_to_all", "all_gather", "two_level", "ragged")
# Rows of a key's `pairs`.
SENT, RECEIVED = range(2)


@dataclasses.dataclass(frozen=True)
class Capacities:
  """The static sizes of a key. Keys with equal capacities share a compiled step.

  `a | b` has room for both. Pass it as `capacities=` when you make keys. If the two use different
  collectives, a mask may need more runs than before; making its key then raises a `ValueError`.

  Attributes:
    slices: the number of slices of a rank in each stage.
    rows: for each transfer, the number of key rows that its stage receives.
    runs: the number of ranges of neighbouring rows that a rank sends, or that a stage receives.
    hops: for each transfer, the collectives that it consists of, with their rows.
    overlap_degree: the number of transfers with a stage of their own. 0 means one call over all
      keys.
    whole_rows: for each transfer, the number of key rows of the forward stage after it, if each
      query is computed in one stage, after its last keys have arrived. None if the results of
      stages are merged.
    orders: the orders of steps in the forward and the backward pass. None means the default orders.
  """

  slices: int
  rows: tuple[int, ...]
  runs: int
  hops: tuple[tuple[Hop, ...], ...]
  overlap_degree: int
  whole_rows: tuple[int, ...] | None = None
  orders: tuple[Order | None, Order | None] = (None, None)

  def __post_init__(self) -> None:
    for name in ("slices", "runs", "overlap_degree"):
      check_length(name, getattr(self, name))
    for name, rows in (("rows", self.rows), ("whole_rows", self.whole_rows or ())):
      if not isinstance(rows, tuple):
        raise ValueError(f"{name} must be a tuple, one number for each transfer, got {rows!r}")
      for size in rows:
        check_length(name, size)
    transfers = self.hops if isinstance(self.hops, tuple) else (None,)
    if not all(
      isinstance(hops, tuple) and all(isinstance(hop, Hop) for hop in hops) for hops in transfers
    ):
      raise ValueError(
        f"hops must list the collectives of each transfer, like those of a key, got {self.hops}"
      )

  @classmethod
  def bound(
    cls,
    length: int,
    cp_size: int,
    max_segments: int,
    window: tuple[int | None, int | None] | None = None,
    dispatch: Any = "zigzag",
    *,
    causal: bool = True,
    overlap_degree: int = 1,
    **options: Any,
  ) -> Capacities:
    """Capacities with room for any packing of a sequence, known before the first batch.

    Args:
      length: the number of tokens.
      cp_size: the number of ranks.
      max_segments: the largest number of documents.
      window: (left, right) inside each document, or None.
      dispatch: "zigzag", "contiguous" or the rank of each chunk, as in `magi_attn_flex_key`. "area"
        has no bound, because it depends on the documents.
      causal: whether tokens see only themselves and earlier tokens.
      overlap_degree: 0 or 1.
      **options: further arguments of `magi_attn_flex_key`: `chunk_size`, `transport`,
        `ranks_per_node`, `links`.
    """
    # Imported here, because planning imports this file.
    from jax_magi._src.context_parallel.bound import capacities_of_any_packing

    return capacities_of_any_packing(
      length,
      cp_size,
      max_segments,
      window,
      dispatch,
      causal=causal,
      overlap_degree=overlap_degree,
      **options,
    )

  def __or__(self, other: Capacities) -> Capacities:
    ways = [(room.overlap_degree, [_levels(t) for t in room.hops]) for room in (self, other)]
    if ways[0] != ways[1]:
      raise ValueError(
        "capacities of different transports or degrees have no union; make the keys with the same "
        f"transport= and overlap_degree=, got {self} and {other}"
      )
    return Capacities(
      max(self.slices, other.slices),
      tuple(map(max, self.rows, other.rows)),
      max(self.runs, other.runs),
      tuple(
        tuple(map(_room_for_both, mine, theirs))
        for mine, theirs in zip(self.hops, other.hops, strict=True)
      ),
      self.overlap_degree,
      # Stages that merge take any mask.
      _largest(self.whole_rows, other.whole_rows),
      self.orders,
    )


def _largest(a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> tuple[int, ...] | None:
  return None if a is None or b is None else tuple(map(max, a, b))


def _levels(hops: tuple[Hop, ...]) -> list[tuple[str, bool]]:
  """The levels of hops, which must be equal in a union."""
  return [(hop.level, hop.kind == "ragged") for hop in hops]


def _room_for_both(a: Hop, b: Hop) -> Hop:
  """A hop with room for both."""
  for hop in (a, b):
    if hop.kind == "all_gather":
      return hop
  if a.kind == b.kind == "permute":
    rows = dict(zip(a.shifts, a.rows, strict=True))
    for shift, size in zip(b.shifts, b.rows, strict=True):
      rows[shift] = max(rows.get(shift, 0), size)
    shifts = tuple(sorted(rows))
    return dataclasses.replace(a, shifts=shifts, rows=tuple(rows[shift] for shift in shifts))
  kind = "ragged" if a.kind == "ragged" else "all_to_all"
  return Hop(a.level, kind, (max(*a.rows, *b.rows),))


@dataclasses.dataclass(frozen=True)
class KeySpec:
  """The static part of a key."""

  q_len: int
  k_len: int
  q_chunk_size: int
  k_chunk_size: int
  q_local: int
  k_local: int
  cp_size: int
  is_cross: bool
  transport: str
  ranks_per_node: int
  capacities: Capacities
  batch_axis: int = 1  # Of a stack: where its leaves have the batch.

  @property
  def overlap_degree(self) -> int:
    """The number of stages with a transfer."""
    return self.capacities.overlap_degree

  @property
  def num_transfers(self) -> int:
    """The number of transfers in each direction."""
    return max(self.overlap_degree, 1)

  @property
  def ranks(self) -> Ranks:
    """The ranks of the mesh axis, and their nodes."""
    return Ranks(self.cp_size, self.ranks_per_node)

  @property
  def levels(self) -> tuple[str, ...]:
    """The levels on which rows travel."""
    return levels_of(self.transport, self.ranks)

  @property
  def near_first(self) -> bool:
    """Whether the first transfer has only rows from the same node."""
    return is_near_first(self.levels, self.num_transfers)


def rounded(needed: Capacities, chunks_of_rank: int, k_local: int, cp_size: int) -> Capacities:
  """Rounds capacities up, so that similar masks have equal ones.

  Args:
    needed: the needs of the mask.
    chunks_of_rank: the number of query chunks of a rank.
    k_local: the number of keys of a rank.
    cp_size: the number of ranks.
  """
  floor = 2 * chunks_of_rank  # Puts the simplest masks into one bucket.
  limit = cp_size * k_local
  return dataclasses.replace(
    needed,
    slices=round_up(max(needed.slices, floor)),
    rows=rounded_rows(needed.rows, limit),
    whole_rows=None if needed.whole_rows is None else rounded_rows(needed.whole_rows, limit),
    runs=round_up(max(needed.runs, floor)),
    hops=rounded_hops(needed.hops, limit),
  )


def rounded_hops(hops: Iterable[Iterable[Hop]], limit: int) -> tuple[tuple[Hop, ...], ...]:
  """Rounds the rows of each transfer's hops up, but not above the number of all rows."""

  def rounded_hop(hop: Hop) -> Hop:
    if hop.kind == "all_gather":
      return hop
    rows = tuple(min(padded_rows(hop.level, size), limit) for size in hop.rows)
    return dataclasses.replace(hop, rows=rows)

  return tuple(tuple(map(rounded_hop, path)) for path in hops)


def rounded_rows(rows: Iterable[int], limit: int) -> tuple[int, ...]:
  """Rounds the rows of stage buffers up to powers of two, but not above the number of all rows."""
  return tuple(min(round_up(max(int(count), 1)), limit) for count in rows)


class NoRoomError(ValueError):
  """A plan needs more than the capacities."""


def check_room(needed: Capacities, have: Capacities) -> None:
  """Raises an error if a plan needs more than the capacities."""
  for name in ("slices", "runs", "rows", "whole_rows"):
    need, room = getattr(needed, name), getattr(have, name)
    if need is not None and np.any(np.array(need) > np.array(room)):
      raise NoRoomError(f"capacities.{name} must be at least {need} for this mask, got {room}")
  for t, (hops, room) in enumerate(zip(needed.hops, have.hops, strict=True)):
    for need, hop in zip(hops, room, strict=True):
      if any(a > b for a, b in zip(need.rows, hop.rows, strict=True)):
        raise NoRoomError(
          f"capacities.hops must have room for {need} in transfer {t} for this mask, got {hop}"
        )
