"""How rows travel: the collectives that a transfer is made of.

A transfer takes one hop, or two if several ranks share a node. With two hops, a row first crosses
once to each node that needs it, to the rank with the same index in that node. From there, it
spreads inside the node.

    one level     owner --(all)--> every rank that needs the row
    two levels    owner --(node)--> the relay of each node --(local)--> the ranks of that node

A hop is one collective, or a few, among groups of ranks. A rank sends an array of rows in blocks,
one block for each rank of its group, and receives rows in the same layout. The length of a block is
its capacity, even if only a part of it is used: shapes are static, and a new mask is only data.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jax_magi._src.native.backends import CUDA
from jax_magi._src.transforms.varying import vary_like

# The ranks that exchange rows in a hop: all; those with the same index in each node; those of one
# node.
ALL, NODE, LOCAL = "all", "node", "local"
# The number of updates per peer of a ragged exchange. XLA moves each update with a single CTA.
_UPDATES = 32


@dataclasses.dataclass(frozen=True)
class Hop:
  """The static part of one collective of a transfer.

  Attributes:
    level: the groups of ranks that exchange rows: "all", "node" or "local".
    kind: "all_to_all" sends a block of `rows[0]` rows to each rank of the group. "permute" sends a
      block of `rows[i]` rows to the rank `shifts[i]` places ahead. "ragged" is like "all_to_all",
      but moves only the needed rows. "all_gather" sends one block of `rows[0]` rows to all ranks.
    rows: the capacities of the blocks.
    shifts: the shifts of a permutation.
    begin: for an all-gather, the first of the rank's own rows that it sends.
  """

  level: str
  kind: str
  rows: tuple[int, ...]
  shifts: tuple[int, ...] = ()
  begin: int = 0


@dataclasses.dataclass(frozen=True)
class Ranks:
  """The ranks of a mesh axis. Each `per_node` neighbours share a node."""

  count: int
  per_node: int

  @property
  def num_nodes(self) -> int:
    """The number of nodes."""
    return self.count // self.per_node

  def group_size(self, level: str) -> int:
    """The number of ranks in a group of this level."""
    return {ALL: self.count, NODE: self.num_nodes, LOCAL: self.per_node}[level]

  def groups(self, level: str) -> list[list[int]] | None:
    """The `axis_index_groups` of collectives on this level."""
    if level == ALL:
      return None
    ranks = np.arange(self.count).reshape(self.num_nodes, self.per_node)
    return (ranks.T if level == NODE else ranks).tolist()

  def index(self, level: str, rank: Any) -> Any:
    """The index of each rank in its group of this level."""
    if level == ALL:
      return rank
    return rank // self.per_node if level == NODE else rank % self.per_node

  def permutation(self, level: str, shift: int) -> list[tuple[int, int]]:
    """The (sender, receiver) pairs of all ranks for a shift inside each group."""
    groups = self.groups(level) or [list(range(self.count))]
    return [(a, b) for g in groups for a, b in zip(g, np.roll(g, -shift).tolist(), strict=True)]


def num_blocks(hop: Hop, ranks: Ranks) -> int:
  """The number of blocks that arrive."""
  return len(hop.shifts) if hop.kind == "permute" else ranks.group_size(hop.level)


def block_begins(hop: Hop, ranks: Ranks) -> np.ndarray:
  """int32 `[num_blocks + 1]`: the begin of each arriving block, and the end of the last one."""
  sizes = hop.rows if hop.kind == "permute" else hop.rows * num_blocks(hop, ranks)
  return np.cumsum((0, *sizes), dtype=np.int32)


def moved_rows(hop: Hop, ranks: Ranks) -> int:
  """The number of rows that a rank sends to others and receives from them, including padding."""
  if hop.kind == "permute":
    return sum(hop.rows)
  return hop.rows[0] * (ranks.group_size(hop.level) - 1)


def rows_by_link(hop: Hop, ranks: Ranks) -> tuple[int, int]:
  """The rows that the busiest rank sends to other nodes, and inside its node."""
  rows = moved_rows(hop, ranks)
  if hop.level == NODE:
    return rows, 0
  if hop.level == LOCAL or ranks.num_nodes == 1:
    return 0, rows
  if hop.kind == "permute":  # A rank at the edge of its node sends all of them across.
    return rows, rows
  if hop.kind == "all_gather":  # As a ring, or a tree, through every NIC of a node.
    return hop.rows[0] * (ranks.num_nodes - 1), rows
  return hop.rows[0] * (ranks.count - ranks.per_node), hop.rows[0] * (ranks.per_node - 1)


def move(hop: Hop, ranks: Ranks, axis_name: str, sent: Any, sizes: Any) -> Any:
  """Sends rows to the ranks of a group: the communication, and nothing else.

  Args:
    hop: the hop.
    ranks: the ranks of the axis.
    axis_name: the mesh axis.
    sent: the rows to send, in blocks.
    sizes: int32 `[2, group size]`, the rows sent to each rank of the group, and received from it.
  """
  if not sent.shape[0]:
    return sent
  if hop.kind == "all_gather":
    return lax.all_gather(sent, axis_name, axis_index_groups=ranks.groups(hop.level), tiled=True)
  return _exchanged(hop, ranks, axis_name, sent, sizes, is_back=False)


def move_back(
  hop: Hop, ranks: Ranks, axis_name: str, sent: Any, sizes: Any, deterministic: bool = False
) -> Any:
  """Sends gradients back: takes rows in the layout of arrival, returns the layout of sending.

  An all-gather may return summed gradients. Other kinds return blocks, which the receiver adds up.
  """
  if not sent.shape[0]:
    return sent
  if hop.kind == "all_gather":
    groups = ranks.groups(hop.level)
    # Inside a node, blocks have no more bytes than a sum whose order the library decides.
    is_summed = not (deterministic and hop.level == LOCAL)
    if sent.dtype == np.float32 and is_summed:
      return lax.psum_scatter(sent, axis_name, axis_index_groups=groups, tiled=True)
    # Sums are float32. A collective that reduces would sum in the dtype of the rows.
    blocks = sent.reshape(-1, hop.rows[0], *sent.shape[1:])
    return lax.all_to_all(blocks, axis_name, 0, 0, axis_index_groups=groups)
  return _exchanged(hop, ranks, axis_name, sent, sizes, is_back=True)


def _exchanged(
  hop: Hop, ranks: Ranks, axis_name: str, sent: jax.Array, sizes: jax.Array, *, is_back: bool
) -> jax.Array:
  if hop.kind == "permute":
    begins = block_begins(hop, ranks)
    return jnp.concatenate(
      [
        lax.ppermute(
          sent[begin:end], axis_name, ranks.permutation(hop.level, -shift if is_back else shift)
        )
        for begin, end, shift in zip(begins[:-1], begins[1:], hop.shifts, strict=True)
      ]
    )
  groups = ranks.groups(hop.level)

  def padded(sent: jax.Array, sizes: jax.Array) -> jax.Array:
    del sizes
    blocks = sent.reshape(-1, hop.rows[0], *sent.shape[1:])
    return lax.all_to_all(blocks, axis_name, 0, 0, axis_index_groups=groups).reshape(sent.shape)

  def exact(sent: jax.Array, sizes: jax.Array) -> jax.Array:
    sizes = sizes[::-1] if is_back else sizes
    index = ranks.index(hop.level, lax.axis_index(axis_name))
    return _ragged(sent, sizes, index, hop.rows[0], axis_name, groups)

  if hop.kind == "all_to_all":
    return padded(sent, sizes)

  def ragged(sent: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.platform_dependent(sent, sizes, **{CUDA.platform: exact, "default": padded})

  return _with_rows_of_batch(ragged)(sent, sizes)


def _ragged(
  sent: jax.Array, sizes: jax.Array, index: Any, capacity: int, axis_name: str, groups: Any
) -> jax.Array:
  """Exchanges blocks by `ragged_all_to_all`, each block in several updates."""
  steps = np.arange(_UPDATES, dtype=np.int32)[None]

  def updates(sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[group size, updates]`: the begin of each update in its block, and its length."""
    length = (sizes + (_UPDATES - 1)) // _UPDATES
    begins = jnp.minimum(steps * length[:, None], sizes[:, None])
    return begins, jnp.minimum(length[:, None], sizes[:, None] - begins)

  blocks = np.arange(len(sizes[0]), dtype=np.int32)[:, None] * np.int32(capacity)
  begins, lengths = updates(sizes[0])
  places = begins + (index * capacity).astype(np.int32)
  received = updates(sizes[1])[1]
  # A zero that XLA cannot see through: a constant would be copied for each layer of a scan.
  zero = (sizes[0, 0] - sizes[0, 0]).astype(sent.dtype)
  return lax.ragged_all_to_all(
    sent,
    jnp.broadcast_to(zero, sent.shape),
    (blocks + begins).reshape(-1),
    lengths.reshape(-1),
    places.reshape(-1),
    received.reshape(-1),
    axis_name=axis_name,
    axis_index_groups=groups,
  )


def _with_rows_of_batch(fun: Any, num_mapped: int = 0) -> Any:
  """Makes vmap of an exchange one exchange of longer rows, if the batch shares the tables.

  `num_mapped` is the number of batch axes with separate tables. They come before the rows.
  """
  exchange = custom_vmap(fun)

  @exchange.def_vmap
  def _(
    axis_size: int, is_mapped: list[bool], rows: jax.Array, tables: jax.Array
  ) -> tuple[jax.Array, bool]:
    if not is_mapped[1]:
      place = num_mapped + 1
      return jnp.moveaxis(exchange(jnp.moveaxis(rows, 0, place), tables), place, 0), True

    def mapped(x: jax.Array, is_mapped: bool) -> jax.Array:
      return x if is_mapped else jnp.broadcast_to(x[None], (axis_size, *x.shape))

    over_batch = _with_rows_of_batch(jax.vmap(fun), num_mapped + 1)
    return over_batch(*map(mapped, (rows, tables), is_mapped)), True

  return exchange


def zeros_like_rows(length: int, rows: Any) -> Any:
  """Zeros `[length, ...]` with the dtype, row shape and varying axes of `rows`."""
  return vary_like(jnp.zeros((length, *rows.shape[1:]), rows.dtype), rows)
