"""Rows of keys and values to the ranks that need them, and their gradients back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jax_magi._src.context_parallel.key import (
  RECEIVE_PLACES,
  RECEIVE_SIZES,
  SEND_PLACES,
  SEND_SIZES,
  DistAttnKey,
  KeySpec,
)
from jax_magi._src.context_parallel.plan import NOWHERE, part_length
from jax_magi._src.native.backends import HOPPER
from jax_magi._src.transforms.varying import vary_like


@dataclasses.dataclass(frozen=True)
class Transfer:
  """One transfer of a rank: group-cast of rows to a stage's buffer, group-reduce of what returns.

  Attributes:
    spec: of the key.
    axis_name: the mesh axis.
    number: which of the key's transfers.
    send_runs: as in the key, of this rank and transfer; so the next two.
    take_runs: see above.
    pairs: see above.
  """

  spec: KeySpec
  axis_name: str
  number: int
  send_runs: Any
  take_runs: Any
  pairs: Any

  def cast(self, x: Any) -> Any:
    """A rank's rows `[k_local, ...]` to the rows of a stage's buffer, of all ranks."""
    return self.unpacked(x, self.move(self.packed(x)))

  def reduce(self, dx: Any, deterministic: bool) -> Any:
    """Gradients of what `cast` returned to those of what it took: the sum over ranks."""
    kept, sent = self.packed_back(dx)
    return self.unpacked_back(kept, self.move_back(sent), deterministic)

  # --- their parts: what is sent is put together, moves, and is taken apart ---

  def packed(self, x: Any) -> Any:
    """What a rank sends of its rows."""
    if self._is_all_gather:
      begin, end = self._part
      return x[begin:end]
    return _take(x, self._send_index)

  def move(self, sent: Any) -> Any:
    """The communication of `cast`, and nothing else."""
    if self._is_all_gather:
      return lax.all_gather(sent, self.axis_name, tiled=True) if sent.shape[0] else sent
    sizes = self.pairs[SEND_SIZES], self.pairs[RECEIVE_SIZES]
    return self._ragged_all_to_all(sent, *sizes, self.pairs[SEND_PLACES])

  def unpacked(self, x: Any, arrived: Any) -> Any:
    """A stage's buffer, of what arrived and, where there are no stages, of the rank's own rows."""
    if not self.spec.overlap_degree:
      arrived = jnp.concatenate([x, arrived])
    return _take(arrived, _expanded(self.take_runs, self.spec.capacities.rows))

  def packed_back(self, dx: Any) -> tuple[Any, Any]:
    """A buffer's gradients: of the rank's own rows, and those that a rank sends back."""
    own = 0 if self.spec.overlap_degree else self.spec.k_local
    index = _expanded(self.take_runs, self.spec.capacities.rows)
    arrived = vary_like(jnp.zeros((own + self._num_arrived, *dx.shape[1:]), dx.dtype), dx)
    arrived = arrived.at[index].set(dx, mode="drop", unique_indices=True)
    return arrived[:own], arrived[own:]

  def move_back(self, sent: Any) -> Any:
    """The communication of `reduce`, and nothing else."""
    if self._is_all_gather:
      return lax.psum_scatter(sent, self.axis_name, tiled=True) if sent.shape[0] else sent
    sizes = self.pairs[RECEIVE_SIZES], self.pairs[SEND_SIZES]
    return self._ragged_all_to_all(sent, *sizes, self.pairs[RECEIVE_PLACES])

  def unpacked_back(self, kept: Any, back: Any, deterministic: bool) -> Any:
    """Gradients of a rank's rows, from both parts of them."""
    if self._is_all_gather:
      begin, end = self._part
      total = jnp.pad(back, [(begin, self.spec.k_local - end)] + [(0, 0)] * (back.ndim - 1))
    else:
      total = self._summed(back, deterministic)
    return kept + total if kept.shape[0] else total

  @property
  def _is_all_gather(self) -> bool:
    return self.spec.capacities.all_gather

  @property
  def _part(self) -> tuple[int, int]:
    """The rows that every rank gives to this all-gather."""
    length = part_length(self.spec.k_local, self.spec.num_transfers)
    begin = min(self.number * length, self.spec.k_local)
    return begin, min(begin + length, self.spec.k_local)

  @property
  def _num_arrived(self) -> int:
    if not self._is_all_gather:
      return self.spec.capacities.rows
    begin, end = self._part
    return (end - begin) * self.spec.cp_size

  def _summed(self, back, deterministic):
    """What came back, each row of it added to the one that it is the gradient of."""
    total = vary_like(jnp.zeros((self.spec.k_local, *back.shape[1:]), back.dtype), back)
    if not deterministic:
      return total.at[self._send_index].add(back, mode="drop")
    # One receiver after the other, each of which had a row at most once.
    index = self._send_index
    ends = jnp.cumsum(self.pairs[SEND_SIZES])
    place = np.arange(len(index), dtype=np.int32)

    def add(rank, total):
      is_of_rank = (ends[rank] - self.pairs[SEND_SIZES][rank] <= place) & (place < ends[rank])
      mine = jnp.where(is_of_rank, index, NOWHERE + place)
      return total.at[mine].add(back, mode="drop", unique_indices=True)

    return lax.fori_loop(0, self.spec.cp_size, add, total)

  @property
  def _send_index(self):
    return _expanded(self.send_runs, self.spec.capacities.rows)

  def _ragged_all_to_all(self, rows, send_sizes, receive_sizes, places):
    """Rows by receiver to rows by sender; `places` is where each receiver wants them."""

    def fun(*operands):
      choices = {HOPPER.platform: self._exact, "default": self._padded}
      return lax.platform_dependent(*operands, **choices)

    return _with_rows_of_batch(fun)(rows, send_sizes, receive_sizes, places)

  def _exact(self, rows, send_sizes, receive_sizes, places):
    offsets = jnp.cumsum(send_sizes) - send_sizes
    return lax.ragged_all_to_all(
      rows,
      jnp.zeros_like(rows),
      offsets,
      send_sizes,
      places,
      receive_sizes,
      axis_name=self.axis_name,
    )

  def _padded(self, rows, send_sizes, receive_sizes, places):
    """The same where there is no `ragged_all_to_all`: every pair of ranks moves as much."""
    del places  # Receivers put them together themselves.
    pair = min(self.spec.k_local, rows.shape[0])
    place = np.arange(pair, dtype=np.int32)[None]
    offsets = (jnp.cumsum(send_sizes) - send_sizes)[:, None]
    index = jnp.where(place < send_sizes[:, None], offsets + place, NOWHERE)
    blocks = lax.all_to_all(_take(rows, index), self.axis_name, 0, 0)
    begins = jnp.cumsum(receive_sizes) - receive_sizes
    sources = np.arange(len(receive_sizes), dtype=np.int32) * pair
    runs = jnp.stack([begins, vary_like(jnp.asarray(sources), begins)], axis=1)
    end = vary_like(jnp.full((1, 2), NOWHERE, np.int32), begins)
    end = end.at[0, 0].set(jnp.sum(receive_sizes))
    index = _expanded(jnp.concatenate([runs, end]), rows.shape[0])
    return _take(blocks.reshape(-1, *rows.shape[1:]), index)


def transfers_of(key: DistAttnKey, axis_name: str) -> list[Transfer]:
  """Of one rank, from its part of a key."""
  tables = key.send_runs, key.take_runs, key.pairs
  return [
    Transfer(key.spec, axis_name, t, *(table[0, t] for table in tables))
    for t in range(key.spec.num_transfers)
  ]


def _with_rows_of_batch(fun: Callable, num_mapped: int = 0) -> Callable:
  """vmap of an exchange. A batch that shares the tables is one exchange of longer rows.

  `num_mapped` axes of a batch with tables of its own stand before the rows.
  """
  exchange = custom_vmap(fun)

  @exchange.def_vmap
  def _(axis_size, is_mapped, rows, *tables):
    if not any(is_mapped[1:]):
      place = num_mapped + 1
      return jnp.moveaxis(exchange(jnp.moveaxis(rows, 0, place), *tables), place, 0), True

    def mapped(x, is_mapped):
      return x if is_mapped else jnp.broadcast_to(x[None], (axis_size, *x.shape))

    over_batch = _with_rows_of_batch(jax.vmap(fun), num_mapped + 1)
    return over_batch(*map(mapped, (rows, *tables), is_mapped)), True

  return exchange


def _expanded(runs: Any, length: int) -> Any:
  """int32 `[length]`: runs `[n, 2]` of (place, source), place by place. Places are ascending."""
  shift = runs[:, 1] - runs[:, 0]
  jump = jnp.diff(shift, prepend=jnp.zeros_like(shift[:1]))
  total = vary_like(jnp.zeros(length, np.int32), runs).at[runs[:, 0]].add(jump, mode="drop")
  return jnp.cumsum(total, dtype=np.int32) + np.arange(length, dtype=np.int32)


def _take(x: Any, index: Any) -> Any:
  """Rows of x; zeros for an index out of its bounds."""
  if x.shape[0] == 0:  # jnp.take refuses.
    return vary_like(jnp.zeros((*index.shape, *x.shape[1:]), x.dtype), x)
  return jnp.take(x, index, axis=0, mode="fill", fill_value=0)
