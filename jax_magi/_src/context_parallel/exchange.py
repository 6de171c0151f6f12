"""Moves rows of keys and values to the ranks that need them, and their gradients back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_magi._src.context_parallel.capacities import KeySpec
from jax_magi._src.context_parallel.hops import (
  Hop,
  block_begins,
  move,
  move_back,
  zeros_like_rows,
)
from jax_magi._src.context_parallel.key import DistAttnKey
from jax_magi._src.context_parallel.routes import NOWHERE
from jax_magi._src.native.overlap import exchange_scope
from jax_magi._src.transforms.varying import vary_like


@dataclasses.dataclass(frozen=True)
class Transfer:
  """One transfer of a rank: group-cast of rows to a stage's buffer, and group-reduce of gradients.

  A cast proceeds hop by hop: `packed` makes the rows that a rank sends, and `move` is the
  communication. The next hop takes rows from the rank's own rows and from everything that has
  arrived. A reduce goes the same way back, with a gradient for each of these parts.

  Attributes:
    spec: the spec of the key.
    axis_name: the mesh axis.
    number: the index of the transfer.
    send_runs: for each hop, the part of the key's `send_runs` for this rank and transfer.
    take_runs: the part of the key's `take_runs`.
    pairs: for each hop, the part of the key's `pairs`.
    whole_runs: the part of the key's `whole_runs`. None if the key has none.
  """

  spec: KeySpec
  axis_name: str
  number: int
  send_runs: tuple[Any, ...]
  take_runs: Any
  pairs: tuple[Any, ...]
  whole_runs: Any = None

  @property
  def hops(self) -> tuple[Hop, ...]:
    """The hops of the transfer."""
    return self.spec.capacities.hops[self.number]

  def cast(self, x: Any) -> Any:
    """Turns the ranks' rows `[k_local, ...]` into the rows of a stage's buffer."""
    parts = [x]
    for hop in range(len(self.hops)):
      parts.append(self.move(hop, self.packed(hop, parts)))
    return self.unpacked(parts)

  def reduce(self, dx: Any, dtype: Any, deterministic: bool) -> Any:
    """Turns gradients of the result of `cast` into gradients of its operand, summed over ranks."""
    parts = self.parted(dx)
    for hop in reversed(range(len(self.hops))):
      sent = self.packed_back(parts, dtype)
      back = self.move_back(hop, sent, deterministic=deterministic)
      parts = self.added(hop, parts, back)
    return parts[0]

  # --- the steps of a cast ---

  def packed(self, hop: int, parts: Sequence[Any]) -> Any:
    """The rows that a rank sends in a hop: its own, and those that earlier hops brought."""
    if (sent := self._gathered_rows(hop)) is not None:
      return parts[0][sent]
    return _rows_of(self._sources(hop, parts), self._send_index(hop))

  def move(self, hop: int, sent: Any, *, is_exposed: bool = False) -> Any:
    """The communication of a hop, and nothing else. It is exposed if no kernel overlaps with it."""
    with self._scope(hop, is_exposed):
      return move(self.hops[hop], self.spec.ranks, self.axis_name, sent, self.pairs[hop])

  def unpacked(self, parts: Sequence[Any]) -> Any:
    """A stage's buffer, from the rows that arrived and, with degree 0, the rank's own rows."""
    return _rows_of(self._stage_sources(parts), self._take_index)

  def unpacked_whole(self, parts: Sequence[Sequence[Any]]) -> Any:
    """The buffer of a forward stage that computes whole queries.

    Args:
      parts: the rank's own rows, and the rows that arrived in each transfer up to this one.
    """
    begins = np.cumsum([0, self.spec.k_local])
    for hops in self.spec.capacities.hops[: self.number + 1]:
      for hop in hops:
        blocks = block_begins(hop, self.spec.ranks)
        begins = np.concatenate([begins, begins[-1] + blocks[1:]])
    assert self.spec.capacities.whole_rows is not None
    length = self.spec.capacities.whole_rows[self.number]
    sources = [parts[0][0], *(rows for arrived in parts for rows in arrived[1:])]
    return _rows_of(sources, _expanded(self.whole_runs, np.array([0]), begins[:-1], length))

  # --- the steps of a reduce ---

  def parted(self, dx: Any) -> tuple[Any, ...]:
    """Turns gradients of a buffer into those of the operands of `unpacked`; None if unused."""
    lengths = [self.spec.k_local if not self.spec.overlap_degree else 0]
    lengths += [int(block_begins(hop, self.spec.ranks)[-1]) for hop in self.hops]
    parts: list[Any] = []
    taken, begin = self._take_index, 0
    for number, length in enumerate(lengths):
      if number == 0 and not length:
        parts.append(None)
        continue
      parts.append(_rows_of([dx], _places_of(taken - begin, length)))
      begin += length
    return tuple(parts)

  def packed_back(self, parts: Sequence[Any], dtype: Any) -> Any:
    """The gradients that a rank sends back in a hop, in the dtype of the wire."""
    return parts[-1].astype(dtype)

  def move_back(self, hop: int, sent: Any, *, deterministic: bool, is_exposed: bool = False) -> Any:
    """The communication of a hop in the opposite direction."""
    ranks, sizes = self.spec.ranks, self.pairs[hop]
    with self._scope(hop, is_exposed):
      return move_back(self.hops[hop], ranks, self.axis_name, sent, sizes, deterministic)

  def added(self, hop: int, parts: Sequence[Any], back: Any) -> tuple[Any, ...]:
    """The parts that a hop took rows from, with the returned gradients added in float32.

    They are added in the order of their blocks.
    """
    *parts, last = parts
    back = back.astype(last.dtype)
    if (sent := self._gathered_rows(hop)) is not None:
      if back.ndim > last.ndim:  # The collective has not summed them.
        back = jnp.sum(back, axis=0)
      # `.at[sent].add` is avoided: if `sent` is all rows, JAX traces an unused empty index, and
      # jaxlib 0.11.2 crashes when it compiles a shard_map with such a constant.
      around = [(sent.start, self.spec.k_local - sent.stop), *[(0, 0)] * (back.ndim - 1)]
      back = jnp.pad(back, around)
      return (back if parts[0] is None else parts[0] + back, *parts[1:])
    index, begin = self._send_index(hop), 0
    totals = []
    for number, part in enumerate(parts):
      length = self.spec.k_local if number == 0 else part.shape[0]
      if number == 0 and not self._takes_own_rows(hop):
        totals.append(part)
        continue
      totals.append(self._sum(hop, part, index - begin, length, back))
      begin += length
    return tuple(totals)

  def _sum(self, hop: int, total: Any, index: Any, length: int, back: Any) -> Any:
    """Adds each row of `back` to the row of `total` that `index` names. None means zeros."""
    # A block contains each row at most once. Each row gathers what it gets from each block: nothing
    # is written twice, the order is fixed, and XLA compiles this to one kernel. A scatter would
    # write zeros, and add to them.
    begins = block_begins(self.hops[hop], self.spec.ranks)
    count = len(begins) - 1
    block = np.repeat(np.arange(count, dtype=np.int32), np.diff(begins))
    is_here = (index >= 0) & (index < length)
    places = _places_of(jnp.where(is_here, index + block * np.int32(length), -1), count * length)
    rows = _rows_of([back], places).reshape(count, length, *back.shape[1:])
    gradients = jnp.sum(rows, axis=0)
    return gradients if total is None else total + gradients

  def _scope(self, hop: int, is_exposed: bool) -> Any:
    is_single = is_exposed or not self.spec.overlap_degree
    return exchange_scope(self.hops[hop].kind, is_single=is_single)

  # --- where rows are ---

  def _takes_own_rows(self, hop: int) -> bool:
    """Whether a hop may send own rows: not if rows of the same node have a separate stage."""
    return hop == 0 or not self.spec.near_first

  def _sources(self, hop: int, parts: Sequence[Any]) -> Sequence[Any]:
    return parts[: hop + 1] if self._takes_own_rows(hop) else parts[1 : hop + 1]

  def _stage_sources(self, parts: Sequence[Any]) -> Sequence[Any]:
    return parts[1:] if self.spec.overlap_degree else parts

  def _gathered_rows(self, hop: int) -> slice | None:
    """The range of its own rows that a rank contributes to an all-gather."""
    this = self.hops[hop]
    return slice(this.begin, this.begin + this.rows[0]) if this.kind == "all_gather" else None

  def _send_index(self, hop: int) -> Any:
    begins = block_begins(self.hops[hop], self.spec.ranks)
    own = [self.spec.k_local] if self._takes_own_rows(hop) else [0]
    return _expanded(self.send_runs[hop], begins, self._source_begins(hop, own), begins[-1])

  @property
  def _take_index(self) -> Any:
    own = [0] if self.spec.overlap_degree else [self.spec.k_local]
    length = self.spec.capacities.rows[self.number]
    return _expanded(
      self.take_runs, np.array([0]), self._source_begins(len(self.hops), own), length
    )

  def _source_begins(self, hop: int, own: list[int]) -> np.ndarray:
    """The begins of the blocks that a hop takes rows from: own rows, and those of earlier hops."""
    sizes = [np.array(own)]
    sizes += [np.diff(block_begins(before, self.spec.ranks)) for before in self.hops[:hop]]
    return np.concatenate([[0], np.cumsum(np.concatenate(sizes))[:-1]])


def transfers_of(key: DistAttnKey, axis_name: str) -> list[Transfer]:
  """The transfers of one rank, from its part of a key."""
  levels = key.spec.levels
  found = []
  for t, hops in enumerate(key.spec.capacities.hops):
    at = [levels.index(hop.level) for hop in hops]
    send_runs = tuple(key.send_runs[level][0, t] for level in at)
    pairs = tuple(key.pairs[level][0, t] for level in at)
    whole_runs = None if key.whole_runs is None else key.whole_runs[0, t]
    found.append(
      Transfer(key.spec, axis_name, t, send_runs, key.take_runs[0, t], pairs, whole_runs)
    )
  return found


def _expanded(runs: Any, to_begins: np.ndarray, from_begins: np.ndarray, length: int) -> Any:
  """int32 `[length]`: the index that each row is taken from, out of bounds if there is none.

  Args:
    runs: int32 `[n, 4]`, ascending (to_block, to_place, from_block, from_place): from this place
      on, rows are taken from that place on.
    to_begins: the begins of the blocks of the result.
    from_begins: the begins of the blocks that rows are taken from.
    length: the number of rows of the result.
  """
  to_block, to_place, from_block, from_place = (runs[:, i] for i in range(4))
  to = jnp.asarray(to_begins, np.int32)[to_block] + to_place
  shift = jnp.asarray(from_begins, np.int32)[from_block] + from_place - to
  places = vary_like(jnp.arange(length, dtype=np.int32), runs)
  # A bisection is one kernel. Marking the begins of runs and summing would be five kernels, for
  # which other work of the step waits. Without the barrier, XLA may repeat the bisection for each
  # element of a row.
  return lax.optimization_barrier(places + _at(shift, _last_before(to, places)))


def _last_before(begins: Any, places: Any) -> Any:
  """The index of the last of the ascending `begins` at or before each place, int32 like `places`.

  The first begin must be at or before all places.
  """
  last, step = jnp.zeros_like(places), 1 << max(len(begins) - 1, 0).bit_length()
  while step := step // 2:
    probe = last + step
    is_before = (probe < len(begins)) & (_at(begins, probe) <= places)
    last = jnp.where(is_before, probe, last)
  return last


def _at(x: Any, index: Any) -> Any:
  """`x[index]`, or the last element for indices after the end."""
  return jnp.take(x, index, mode="clip")


def _places_of(index: Any, length: int) -> Any:
  """int32 `[length]`: where in `index` each number is, or `NOWHERE`. It is there at most once."""
  places = np.arange(len(index), dtype=np.int32)
  # Scattering indices to gather rows is faster than to scatter rows: no zeros are written first,
  # and XLA fuses a concatenation of the rows.
  index = jnp.where((index >= 0) & (index < length), index, NOWHERE + places)
  nowhere = vary_like(jnp.full(length, NOWHERE, np.int32), index)
  return nowhere.at[index].set(places, mode="drop", unique_indices=True)


def _rows_of(parts: Sequence[Any], index: Any) -> Any:
  """Takes rows from several arrays as if concatenated; zeros for indices out of bounds."""
  result, begin = None, 0
  for part in parts:
    if length := part.shape[0]:  # jnp.take does not accept empty arrays.
      here = index - begin
      rows = jnp.take(part, here, axis=0, mode="clip")
      # XLA compiles this to one kernel, and jnp.take with mode="fill" to two.
      is_here = ((here >= 0) & (here < length)).reshape(-1, *[1] * (part.ndim - 1))
      result = jnp.where(is_here, rows, jnp.zeros_like(rows) if result is None else result)
    begin += length
  return zeros_like_rows(index.shape[0], parts[0]) if result is None else result
