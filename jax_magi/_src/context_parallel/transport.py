"""How the rows of a plan travel: what each step of the planner has to know of it."""

from __future__ import annotations

import dataclasses
import math

from jax_magi._src.context_parallel.hops import ALL, LOCAL, NODE, Hop, Ranks


@dataclasses.dataclass(frozen=True)
class Transport:
  """How rows travel.

  Attributes:
    name: as in `magi_attn_flex_key`, but not "auto".
    ranks: of the axis, and their nodes.
    k_local: rows of a rank.
    num_transfers: in how many transfers.
    gathers: whether whole parts of all ranks' rows move, at least between nodes.
    permutes: whether rows that all go to the same neighbours may travel by permutations.
    given: hops whose kinds are taken over; None if each is to be the one that moves least.
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
    """Those that rows travel on."""
    return levels_of(self.name, self.ranks)

  @property
  def num_near(self) -> int:
    """Transfers, the first, that are of rows from the same node alone: 0 or 1.

    What comes from the same node needs one hop only. What comes from other nodes has crossed by the
    time it has arrived.
    """
    return int(is_near_first(self.levels, self.num_transfers))

  @property
  def num_far(self) -> int:
    """All other transfers."""
    return self.num_transfers - self.num_near

  @property
  def part_length(self) -> int:
    """Rows that each rank gives to one all-gather; the last ones may have fewer."""
    return math.ceil(self.k_local / self.num_far)


def levels_of(transport: str, ranks: Ranks) -> tuple[str, ...]:
  """The levels that rows travel on."""
  is_two = transport == "two_level" and 1 < ranks.per_node < ranks.count
  return (NODE, LOCAL) if is_two else (ALL,)


def is_near_first(levels: tuple[str, ...], num_transfers: int) -> bool:
  """Whether the first transfer is of rows from the same node alone."""
  return len(levels) == 2 and num_transfers > 1
