"""The route of rows on each level: who sends what to whom, and where it is in memory.

Everything here is numpy on the host, from ranges of rows to ranges of rows.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jax_magi._src.context_parallel.hops import ALL, LOCAL, NODE, Hop
from jax_magi._src.context_parallel.intervals import STRIDE, starts_within, union
from jax_magi._src.context_parallel.transport import Transport


@dataclasses.dataclass(frozen=True)
class Rows:
  """Ranges of keys that ranks need, sorted by rank and position. Each lies in one run of an owner.

  Attributes:
    rank: the rank that needs the range.
    begin: the first position of the range in the sequence.
    size: the number of rows.
    owner: the rank that owns the rows.
    local: the first row in the owner's memory.
    transfer: the transfer that brings the range.
  """

  rank: np.ndarray
  begin: np.ndarray
  size: np.ndarray
  owner: np.ndarray
  local: np.ndarray
  transfer: np.ndarray

  def __getitem__(self, index: Any) -> Rows:
    return Rows(*(getattr(self, field.name)[index] for field in dataclasses.fields(self)))


def legs_of(rows: Rows, transport: Transport) -> list[Leg]:
  """The legs of all rows, one for each level."""
  ranks = transport.ranks
  if transport.levels == (ALL,):
    return [Leg(ALL, transport, rows, rows.owner, rows.rank)]
  first = rows.rank - rows.rank % ranks.per_node  # Of the node that needs it.
  relay = first + rows.owner % ranks.per_node
  near = np.where(rows.owner // ranks.per_node == rows.rank // ranks.per_node, rows.owner, relay)
  return [
    # For rows that stay in a node, sender and receiver are equal, and nothing is sent.
    Leg(NODE, transport, rows, rows.owner, near),
    Leg(LOCAL, transport, rows, near, rows.rank),
  ]


class Leg:
  """The part of the route of rows on one level: senders, receivers and positions.

  Attributes:
    row: identifies the first row of each range among all rows that may be in one buffer.
      Neighbouring rows of an owner have neighbouring numbers.
    hops: the hop of each transfer; None for a transfer without a hop on this level. Set later.
    first_block: for each transfer, the number of the first block that the hop brings. Set later.
  """

  hops: list[Hop | None]
  first_block: np.ndarray

  def __init__(
    self, level: str, transport: Transport, rows: Rows, sender: np.ndarray, receiver: np.ndarray
  ) -> None:
    self.level, self.ranks = level, transport.ranks
    self.num_transfers = transport.num_transfers
    self.sender, self.receiver = sender, receiver
    # Rows of different nodes are never adjacent, so they are not joined into one range.
    self.stride = transport.k_local + 1
    self.row = rows.local + rows.owner // self.ranks.per_node * self.stride
    moves = sender != receiver
    group = self._group(sender[moves], rows.transfer[moves], receiver[moves])
    begin = self.row[moves]
    # Send each row once, even if several ranks behind the receiver need it.
    self._groups, self._begins, ends = union(group, begin, begin + rows.size[moves])
    self._sizes = ends - self._begins
    self._places = starts_within(self._groups, self._sizes)

  def index(self, rank: Any) -> Any:
    """The index of each rank in its group."""
    return self.ranks.index(self.level, rank)

  def _group(self, sender: np.ndarray, transfer: np.ndarray, receiver: np.ndarray) -> np.ndarray:
    size = self.ranks.group_size(self.level)
    return (sender * self.num_transfers + transfer) * size + self.index(receiver)

  def sizes(self) -> np.ndarray:
    """int64 `[sender, transfer, group size]`: the number of rows to each rank of the group."""
    shape = self.ranks.count, self.num_transfers, self.ranks.group_size(self.level)
    return np.bincount(self._groups, self._sizes, math.prod(shape)).astype(np.int64).reshape(shape)

  def content(self) -> tuple[np.ndarray, ...]:
    """Sender, transfer, index of the receiver, row, size and place of each range that is sent."""
    group, receiver = np.divmod(self._groups, self.ranks.group_size(self.level))
    sender, transfer = np.divmod(group, self.num_transfers)
    return sender, transfer, receiver, self._begins, self._sizes, self._places

  def gathers(self) -> np.ndarray:
    """bool `[num_transfers]`: whether the hop is an all-gather."""
    return np.array([hop is not None and hop.kind == "all_gather" for hop in self.hops])

  def block(
    self, transfer: np.ndarray, sender: np.ndarray, receiver: np.ndarray, *, is_sent: bool
  ) -> np.ndarray:
    """The block of a range, from the indices of sender and receiver in their group."""
    block = receiver.copy() if is_sent else sender.copy()
    for t, hop in enumerate(self.hops):
      if hop is not None and hop.kind == "permute":
        number = np.zeros(self.ranks.group_size(self.level), np.int64)
        number[list(hop.shifts)] = np.arange(len(hop.shifts))
        block = np.where(transfer == t, number[(receiver - sender) % len(number)], block)
    return block

  def arrived(
    self, sender: np.ndarray, receiver: np.ndarray, transfer: np.ndarray, row: np.ndarray
  ) -> np.ndarray:
    """int64 `[n, 2]`: the block and place of rows at the receiver."""
    block = self.first_block[transfer] + self.block(
      transfer, self.index(sender), self.index(receiver), is_sent=False
    )
    place = np.zeros_like(row)
    if len(self._groups):
      group = self._group(sender, transfer, receiver)
      at = np.searchsorted(self._groups * STRIDE + self._begins, group * STRIDE + row, side="right")
      at = np.maximum(at - 1, 0)
      place = self._places[at] + row - self._begins[at]
    begins = np.array([0 if hop is None else hop.begin for hop in self.hops])
    is_gathered = self.gathers()[transfer]
    place = np.where(is_gathered, row % self.stride - begins[transfer], place)
    return np.stack([block, place], axis=1)
