"""The transport of a plan's rows, as the steps of the planner need it."""

from __future__ import annotations

import dataclasses
import math

from jax_magi._src.context_parallel.hops import ALL, LOCAL, NODE, Hop, Ranks


@dataclasses.dataclass(frozen=True)
class Transport:
  """How rows travel.

  Attributes:
    name: as in `magi_attn_flex_key`, but not "auto".
    ranks: the ranks of the axis, and their nodes.
    k_local: the number of key rows of a rank.
    num_transfers: the number of transfers.
    gathers: whether all rows of all ranks move, at least between nodes.
    permutes: whether permutations may move rows that only go to the same neighbours.
    given: hops whose kinds must be kept. None if each hop may be the one that moves the least.
  """

  name: str
  ranks: Ranks
  k_local: int
  num_transfers: int = 1
  gathers: bool = False
  permutes: bool = True
  given: tuple[tuple[Hop, ...], ...] | None = None

  @property
  def levels(self) -> tuple[str, ...]:
    """The levels on which rows travel."""
    return levels_of(self.name, self.ranks)

  @property
  def num_near(self) -> int:
    """The number of transfers with only rows from the same node, which come first: 0 or 1.

    Rows from the same node need only one hop. While they arrive, rows from other nodes cross.
    """
    return int(is_near_first(self.levels, self.num_transfers))

  @property
  def num_far(self) -> int:
    """The number of all other transfers."""
    return self.num_transfers - self.num_near

  @property
  def part_length(self) -> int:
    """The rows that each rank contributes to one all-gather. The last all-gather may have fewer."""
    return math.ceil(self.k_local / self.num_far)


def levels_of(transport: str, ranks: Ranks) -> tuple[str, ...]:
  """The levels on which the rows of a transport travel."""
  is_two = transport == "two_level" and 1 < ranks.per_node < ranks.count
  return (NODE, LOCAL) if is_two else (ALL,)


def is_near_first(levels: tuple[str, ...], num_transfers: int) -> bool:
  """Whether the first transfer has only rows from the same node."""
  return len(levels) == 2 and num_transfers > 1
