"""Chooses the transport of a plan from the rows that ranks need."""

from __future__ import annotations

from jax_magi._src.context_parallel.hop_choice import NEARLY_ALL, cheapest_rows
from jax_magi._src.context_parallel.hops import LOCAL, Hop, Ranks
from jax_magi._src.context_parallel.legs import Rows, legs_of
from jax_magi._src.context_parallel.links import Links
from jax_magi._src.context_parallel.transport import Transport


def choose_transport(
  rows: Rows,
  name: str,
  ranks: Ranks,
  k_local: int,
  num_transfers: int,
  given: tuple[tuple[Hop, ...], ...] | None,
  links: Links,
) -> Transport:
  """The transport with this name; for "auto", the one that takes the least time.

  Args:
    rows: all rows that ranks need.
    name: as in `magi_attn_flex_key`.
    ranks: the ranks of the axis, and their nodes.
    k_local: the number of key rows of a rank.
    num_transfers: the number of transfers.
    given: hops whose kinds the plan must keep, or None.
    links: the speeds that determine the cost of rows, for "auto".
  """
  # If the caller chose all_to_all, all masks use it, so that they share programs.
  permutes = name != "all_to_all"
  moved = _moved(rows, ranks, k_local) if name in ("auto", "two_level") else {}
  if name == "auto":
    name = _cheapest(moved, links) if ranks.count > 1 else "all_to_all"
  gathers = name == "all_gather"
  if given is not None:
    gathered = [hop.level for hops in given for hop in hops if hop.kind == "all_gather"]
    gathers = any(level != LOCAL for level in gathered)
  elif name == "two_level":  # Nodes may need nearly all rows of each other.
    gathers = moved[name][0] >= NEARLY_ALL * (ranks.num_nodes - 1) * k_local
  return Transport(name, ranks, k_local, num_transfers, gathers, permutes, given)


def _cheapest(moved: dict[str, tuple[int, int]], links: Links) -> str:
  """The transport with the least time, or the simplest one if several take about as long."""

  def cost(transport: str) -> float:
    far, near = moved[transport]
    return max(far * links.far_row, near * links.near_row)

  best = min(moved, key=cost)
  return "all_gather" if NEARLY_ALL * cost("all_gather") <= cost(best) else best


def _moved(rows: Rows, ranks: Ranks, k_local: int) -> dict[str, tuple[int, int]]:
  """The rows that the busiest rank moves between nodes and inside its node, including padding."""
  n, nodes = ranks.count, ranks.num_nodes
  found = {"all_gather": ((nodes - 1) * k_local, (n - 1) * k_local)}
  for way in (Transport(name, ranks, k_local) for name in ("all_to_all", "two_level")):
    if way.name == "two_level" and len(way.levels) == 1:
      continue  # Of one node, or of nodes of one rank, it is the same.
    moved = [cheapest_rows(leg.level, leg.sizes()[:, 0], ranks) for leg in legs_of(rows, way)]
    if len(moved) == 2:
      # As an all-gather over nodes, the crossing is at most this.
      found[way.name] = min(moved[0], found["all_gather"][0]), moved[1]
    else:
      far = moved[0] * (n - ranks.per_node) // max(n - 1, 1)
      found[way.name] = far, moved[0] - far
  return found
