"""The plan as data: what a compiled step takes for each mask."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_magi._src.context_parallel.plan import NOWHERE, Dispatch, Plan, to_table

# Rows of `DistAttnKey.pairs`.
SEND_SIZES, RECEIVE_SIZES, SEND_PLACES, RECEIVE_PLACES = range(4)


@dataclasses.dataclass(frozen=True)
class Capacities:
  """How much a compiled step has room for. Keys of equal capacities share it.

  Attributes:
    slices: slices of a rank and stage.
    rows: rows of keys that a transfer brings to a rank, or takes from it.
    runs: ranges of neighbouring rows in them.
    all_gather: whether transfers bring all rows of all ranks, instead of those that are needed.
  """

  slices: int
  rows: int
  runs: int
  all_gather: bool = False

  def __or__(self, other: Capacities) -> Capacities:
    """Room for both."""
    if self.all_gather != other.all_gather:
      raise ValueError(
        "capacities with and without all_gather have no union; make the keys with all_gather=False"
      )
    pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
    return Capacities(*(max(pair) for pair in pairs))


@dataclasses.dataclass(frozen=True)
class KeySpec:
  """What is static about a key."""

  q_len: int
  k_len: int
  q_chunk_size: int
  k_chunk_size: int
  q_local: int
  k_local: int
  cp_size: int
  overlap_degree: int
  is_cross: bool
  capacities: Capacities

  @property
  def num_transfers(self) -> int:
    """Transfers of an attention, each way."""
    return max(self.overlap_degree, 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DistAttnKey:
  """How attention over one mask is split over the ranks of a mesh axis.

  A pytree whose leaves all have a leading axis of `cp_size`, so that `P("cp")` fits it whole. A new
  key with an equal `spec` compiles nothing.

  Attributes:
    q_chunks: int32 `[cp_size, chunks]`, the chunks of queries that each rank holds, ascending.
    k_chunks: int32 `[cp_size, chunks]`, likewise; those of the queries but in cross-attention.
    slices: int32 `[cp_size, stages, slices, 6]`, of a rank's queries and a stage's buffer of keys.
    send_runs: int32 `[cp_size, transfers, runs, 2]`: from this place on, the rows that a rank sends
      are its own from that row on.
    take_runs: int32 `[cp_size, transfers, runs, 2]`: from this place on, a stage's buffer has the
      rows that arrived from that place on.
    pairs: int32 `[cp_size, transfers, 4, cp_size]`, for each other rank: rows to send and to
      receive, where those sent arrive in its buffer, and where those received were in its own.
    spec: lengths and capacities (static).
  """

  q_chunks: Any
  k_chunks: Any
  slices: Any
  send_runs: Any
  take_runs: Any
  pairs: Any
  spec: KeySpec = dataclasses.field(metadata={"static": True})

  @property
  def capacities(self) -> Capacities:
    """To pin another key's with."""
    return self.spec.capacities

  def stats(self) -> Any:
    """Work and rows of each rank: see `PlanStats`. The key must be concrete."""
    from jax_magi._src.context_parallel.stats import stats_of

    return stats_of(self)

  def plot(self, axes: Any = None) -> Any:
    """Draws who owns what, the work of each rank, and what moves: three matplotlib axes."""
    from jax_magi._src.context_parallel.plot import plot_key

    return plot_key(self, axes)

  def __repr__(self) -> str:
    s = self.spec
    return (
      f"DistAttnKey({s.q_len} x {s.k_len} on {s.cp_size} ranks of {s.q_local}, "
      f"overlap_degree={s.overlap_degree}, {s.capacities})"
    )


def check_key(key: Any) -> DistAttnKey:
  """A key, and not something else that a caller has at hand."""
  if not isinstance(key, DistAttnKey):
    raise ValueError(f"key must be a DistAttnKey, got {type(key).__name__}")
  return key


def check_one_key(key: Any) -> DistAttnKey:
  """One key, of all ranks or of one, and no stack."""
  shape = np.shape(check_key(key).q_chunks)
  if len(shape) != 2:
    raise ValueError(f"key must be one key, got a stack {list(shape)}: use vmap with in_axes=1")
  return key


def make_key(
  plan: Plan,
  queries: Dispatch,
  keys: Dispatch,
  overlap_degree: int,
  capacities: Capacities | None,
) -> DistAttnKey:
  """The plan, filled up to capacities: given ones, or else the next round ones."""
  n, num_transfers = queries.cp_size, plan.num_transfers
  needed = _needed_capacities(plan, n)
  limit = keys.num_chunks * keys.chunk_size
  if capacities is None:
    floor = 2 * queries.num_chunks // n  # For the simplest masks, one bucket.
    capacities = Capacities(
      _round_up(max(needed.slices, floor)),
      min(_round_up_finely(max(needed.rows, 1)), limit),
      _round_up(max(needed.runs, floor)),
      needed.all_gather,
    )
  for name in ("slices", "rows", "runs"):
    need, have = getattr(needed, name), getattr(capacities, name)
    if need > have:
      raise ValueError(f"capacities.{name} must be at least {need} for this mask, got {have}")

  slice_group, slices = plan.slices
  table = to_table(slice_group, slices, n * plan.num_stages, capacities.slices, 0)
  spec = KeySpec(
    queries.length,
    keys.length,
    queries.chunk_size,
    keys.chunk_size,
    queries.local_length,
    keys.local_length,
    n,
    overlap_degree,
    keys is not queries,
    capacities,
  )
  totals = plan.sizes.sum(axis=2)
  return DistAttnKey(
    queries.chunks,
    keys.chunks,
    table.reshape(n, plan.num_stages, capacities.slices, 6),
    _run_table(plan.send_runs, totals, capacities.runs).reshape(n, num_transfers, -1, 2),
    _run_table(plan.take_runs, plan.num_rows, capacities.runs).reshape(n, num_transfers, -1, 2),
    _pair_table(plan.sizes),
    spec,
  )


def _needed_capacities(plan: Plan, n: int) -> Capacities:
  def most(group, count):
    return int(np.bincount(group, minlength=count).max(initial=0))

  num_groups = n * plan.num_transfers
  rows = max(plan.sizes.sum(axis=2).max(), plan.sizes.sum(axis=0).max(), plan.num_rows.max())
  runs = max(most(plan.send_runs[0], num_groups), most(plan.take_runs[0], num_groups)) + 1
  return Capacities(most(plan.slices[0], n * plan.num_stages), int(rows), runs, plan.is_all_gather)


def _round_up(count: int) -> int:
  """To a power of two."""
  return 1 << max(count - 1, 0).bit_length()


def _round_up_finely(count: int) -> int:
  """To a power of two, or three quarters of one."""
  power = _round_up(count)
  return power * 3 // 4 if count <= power * 3 // 4 else power


def _run_table(runs, totals: np.ndarray, capacity: int) -> np.ndarray:
  """Runs of each group, and after them one that says that there is nothing more."""
  group, places, sources = runs
  num_groups = totals.size
  ends = np.stack([totals.reshape(-1), np.full(num_groups, NOWHERE)], axis=1)
  groups = np.concatenate([group, np.arange(num_groups)])
  columns = np.concatenate([np.stack([places, sources], axis=1), ends])
  order = np.argsort(groups, kind="stable")
  return to_table(groups[order], columns[order], num_groups, capacity, NOWHERE)


def _pair_table(sizes: np.ndarray) -> np.ndarray:
  """`DistAttnKey.pairs` from rows `[sender, transfer, receiver]`."""
  send_offsets = np.cumsum(sizes, axis=2) - sizes
  receive_offsets = np.cumsum(sizes, axis=0) - sizes
  back = (2, 1, 0)
  table = np.empty((sizes.shape[0], sizes.shape[1], 4, sizes.shape[2]), np.int32)
  table[:, :, SEND_SIZES] = sizes
  table[:, :, RECEIVE_SIZES] = sizes.transpose(back)
  table[:, :, SEND_PLACES] = receive_offsets
  table[:, :, RECEIVE_PLACES] = send_offsets.transpose(back)
  return table


def with_capacities(key: DistAttnKey, capacities: Capacities) -> DistAttnKey:
  """The same key with room for more."""
  have = key.capacities
  if have == capacities:
    return key
  if have.all_gather != capacities.all_gather or (have | capacities) != capacities:
    raise ValueError(f"the key has {have}, which {capacities} has no room for")

  def fill(table, capacity, value):
    widths = [(0, 0)] * table.ndim
    widths[-2] = (0, capacity - table.shape[-2])
    return np.pad(table, widths, constant_values=value)

  return dataclasses.replace(
    key,
    slices=fill(key.slices, capacities.slices, 0),
    send_runs=fill(key.send_runs, capacities.runs, NOWHERE),
    take_runs=fill(key.take_runs, capacities.runs, NOWHERE),
    spec=dataclasses.replace(key.spec, capacities=capacities),
  )
