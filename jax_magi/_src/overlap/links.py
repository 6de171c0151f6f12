"""How many bytes a collective sends over which links, by the text of a compiled program."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import NamedTuple

from jax_magi._src.overlap.replica_groups import Groups
from jax_magi._src.overlap.schedule import ScheduledCollective


class LinkBytes(NamedTuple):
  """Bytes that the busiest rank sends, each time that the collective runs.

  Attributes:
    between_nodes: to ranks of other nodes.
    inside_node: to others of its own.
  """

  between_nodes: int
  inside_node: int


def link_bytes(collective: ScheduledCollective, ranks_per_node: int) -> LinkBytes:
  """What a collective sends between nodes and inside them.

  An all-to-all, and a permutation, send each block to its rank. For a ragged exchange that is as
  much as fits its buffer, as sizes are data. An all-gather, and a reduce-scatter, are rings: each
  block enters each node once, over any of the links of its ranks in turn, and goes round inside.

  Args:
    collective: of those kinds.
    ranks_per_node: neighbours of the mesh's order that share a node.

  Raises:
    ValueError: it is of another kind, or the text names its ranks in a way that is not known.
  """
  groups, size = collective.groups, collective.num_bytes
  if not groups:
    raise ValueError(f"the text names the ranks of {collective.name} in a way that is not known")
  if collective.opcode == "collective-permute":
    return _of_pairs(groups, size, ranks_per_node)
  if collective.opcode in ("all-to-all", "ragged-all-to-all"):
    return _busiest(groups, size, ranks_per_node, _of_blocks)
  if collective.opcode == "all-gather":
    return _busiest(groups, size, ranks_per_node, _of_ring)
  if collective.opcode == "reduce-scatter":
    # Its result is one block.
    return _busiest(groups, size * len(groups[0]), ranks_per_node, _of_ring)
  raise ValueError(f"the bytes on links of {collective.name} are not known: {collective.opcode}")


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
  """The most of any group and node: `sent(size, ranks of the group, those of them in a node)`."""
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
