"""How many bytes a collective sends over each kind of link, from a compiled program's text."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import NamedTuple

from jax_magi._src.overlap.replica_groups import Groups
from jax_magi._src.overlap.schedule import ScheduledCollective


class LinkBytes(NamedTuple):
  """The bytes that the busiest rank sends each time the collective runs.

  Attributes:
    between_nodes: bytes to ranks of other nodes.
    inside_node: bytes to other ranks of its own node.
  """

  between_nodes: int
  inside_node: int


def link_bytes(collective: ScheduledCollective, ranks_per_node: int) -> LinkBytes:
  """Returns the bytes that a collective sends between nodes and inside them.

  An all-to-all and a permutation send each block directly to its rank. The sizes of a ragged
  exchange are data, so it counts as if its buffer were full. An all-gather and a reduce-scatter are
  rings: each block enters each node once, over the links of its ranks in turn, and then passes
  along the ranks of the node.

  Args:
    collective: an all-to-all, a permutation, a ragged exchange, an all-gather or a reduce-scatter.
    ranks_per_node: the number of neighbouring ranks, in the order of the mesh, that share a node.

  Raises:
    ValueError: if the collective is of another kind, or the format of its groups is unknown.
  """
  groups, size = collective.groups, collective.num_bytes
  if not groups:
    raise ValueError(f"the replica groups of {collective.name} are in an unknown format")
  if collective.opcode == "collective-permute":
    return _of_pairs(groups, size, ranks_per_node)
  if collective.opcode in ("all-to-all", "ragged-all-to-all"):
    return _busiest(groups, size, ranks_per_node, _of_blocks)
  if collective.opcode == "all-gather":
    return _busiest(groups, size, ranks_per_node, _of_ring)
  if collective.opcode == "reduce-scatter":
    # The result of a reduce-scatter is one block.
    return _busiest(groups, size * len(groups[0]), ranks_per_node, _of_ring)
  raise ValueError(
    f"link_bytes does not know which links {collective.name} uses: its opcode is "
    f"{collective.opcode}"
  )


def _of_pairs(pairs: Groups, size: int, ranks_per_node: int) -> LinkBytes:
  far: collections.Counter[int] = collections.Counter()
  near: collections.Counter[int] = collections.Counter()
  for sender, receiver in pairs:
    if sender != receiver:
      links = near if sender // ranks_per_node == receiver // ranks_per_node else far
      links[sender] += size
  return LinkBytes(max(far.values(), default=0), max(near.values(), default=0))


def _busiest(
  groups: Groups, size: int, ranks_per_node: int, sent: Callable[[int, int, int], tuple[int, int]]
) -> LinkBytes:
  """The maximum over groups and nodes of `sent(size, ranks in group, ranks in group and node)`."""
  found = [
    sent(size, len(group), mine)
    for group in groups
    for mine in collections.Counter(rank // ranks_per_node for rank in group).values()
  ]
  return LinkBytes(*(max(sizes) for sizes in zip(*found, strict=True)))


def _of_blocks(size: int, ranks: int, mine: int) -> tuple[int, int]:
  return size * (ranks - mine) // ranks, size * (mine - 1) // ranks


def _of_ring(size: int, ranks: int, mine: int) -> tuple[int, int]:
  far = size * (ranks - mine) // (ranks * mine)
  return far, size * (ranks - 1) // ranks - far
