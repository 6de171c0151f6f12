"""The plan as data: the operand of a compiled step for each mask."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_magi._src.arguments import known_value
from jax_magi._src.context_parallel.capacities import Capacities, KeySpec, check_room, rounded
from jax_magi._src.context_parallel.chunks import Dispatch
from jax_magi._src.context_parallel.hops import Ranks
from jax_magi._src.context_parallel.links import Links, check_links
from jax_magi._src.context_parallel.part_shares import PartShares
from jax_magi._src.context_parallel.plan import Plan, to_table
from jax_magi._src.context_parallel.plot import plot_plan
from jax_magi._src.context_parallel.predict import (
  Kernels,
  Prediction,
  expansion_seconds,
  predict,
  stage_seconds,
)
from jax_magi._src.context_parallel.routes import NOWHERE, Runs
from jax_magi._src.context_parallel.stats import PlanStats, pair_rows, stats_of
from jax_magi._src.masks.slices import area_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DistAttnKey:
  """The plan of a mask: how attention is split over the ranks of a mesh axis.

  A key is a pytree of int32 tables. All leaves have a leading axis of `cp_size`, so `P("cp")` is
  the partition spec of the whole key. A new key with an equal `spec` does not recompile anything.

  Attributes:
    q_chunks: int32 `[cp_size, chunks]`, the chunks of queries that each rank holds, ascending.
    k_chunks: int32 `[cp_size, chunks]`, the chunks of keys that each rank holds, ascending. Equal
      to `q_chunks`, except in cross-attention.
    slices: int32 `[cp_size, stages, slices, 6]`, the mask of a rank's queries over the key buffer
      of each stage.
    send_runs: for each level, int32 `[cp_size, transfers, runs, 4]`, the rows that a rank sends. A
      run (to_block, to_place, from_block, from_place) says that rows from this place on are taken
      from that place on. Source block 0 has the rank's own rows, and the others have the rows that
      earlier hops brought.
    take_runs: int32 `[cp_size, transfers, runs, 4]`, the rows of each stage's buffer, in the same
      format.
    pairs: for each level, int32 `[cp_size, transfers, 2, group size]`, the rows sent to each rank
      of the group, and received from it.
    whole_slices: like `slices`, for a forward pass that computes each query in one stage. A slice
      of stage 0 without keys holds the queries that see no key. None if stages merge their results.
    whole_runs: like `take_runs`, for the buffers of these stages, where the blocks of earlier
      transfers come first. None if stages merge their results.
    spec: lengths and capacities (static).
  """

  q_chunks: Any
  k_chunks: Any
  slices: Any
  send_runs: tuple[Any, ...]
  take_runs: Any
  pairs: tuple[Any, ...]
  whole_slices: Any
  whole_runs: Any
  spec: KeySpec = dataclasses.field(metadata={"static": True})

  @property
  def capacities(self) -> Capacities:
    """The capacities, which you can pass to other keys."""
    return self.spec.capacities

  def dispatches(self) -> tuple[Dispatch, Dispatch]:
    """The dispatch of queries and of keys. The key must be known, for all ranks."""
    spec = self.spec
    queries = _dispatch_of(self.q_chunks, spec.q_len, spec.q_chunk_size, spec.cp_size)
    if not spec.is_cross:
      return queries, queries
    return queries, _dispatch_of(self.k_chunks, spec.k_len, spec.k_chunk_size, spec.cp_size)

  def partition_spec(
    self, axis_name: str = "cp", batch_axis: str | tuple[str, ...] | None = None
  ) -> P:
    """The PartitionSpec that fits every leaf, so that it stands for the whole key.

    Args:
      axis_name: the mesh axis over which the sequence is split.
      batch_axis: the mesh axes over which the batch is split, for a stack of keys.
    """
    if np.ndim(self.q_chunks) == 2:
      return P(axis_name)
    is_first = self.spec.batch_axis == 0
    return P(batch_axis, axis_name) if is_first else P(axis_name, batch_axis)

  def stats(self) -> PlanStats:
    """The work and traffic of each rank: see `PlanStats`. The key must not be traced."""
    return stats_of(self.spec, self.areas(), self.slices, self.take_runs, self.pairs)

  def areas(self, *, is_forward: bool = False) -> np.ndarray:
    """int64 `[cp_size, stages]`: the number of visible pairs. The key must not be traced.

    Args:
      is_forward: whether to count the stages of the forward pass. They differ from those of the
        backward pass if each query is computed in one stage.
    """
    tables = self.whole_slices if is_forward and self.whole_slices is not None else self.slices
    slices, count = known_value(tables), self.spec.cp_size
    if slices is None or slices.ndim != 4 or slices.shape[0] != count:
      raise ValueError(f"stats needs one known key of all {count} ranks, got {self}")
    return area_of(slices).sum(axis=2)

  def predict(self, links: Links | None = None, *, keep_remote_kv: bool = False) -> Prediction:
    """Predicts the time of attention in seconds, with `forward`, `backward` and `total`.

    Args:
      links: speeds of links and kernels. None means those of H200 nodes.
      keep_remote_kv: as in `calc_attn`.
    """
    links = check_links(links)
    spec = self.spec
    areas = self.areas(is_forward=True), self.areas()
    is_merged = bool(spec.overlap_degree) and self.whole_slices is None
    room, own = spec.capacities, spec.k_local if spec.overlap_degree else 0
    return predict(
      spec.capacities.hops,
      spec.ranks,
      spec.overlap_degree,
      kernels_of(self, stage_seconds(*areas, links, is_merged=is_merged)),
      links,
      spec.capacities.orders,
      keep_remote_kv=keep_remote_kv,
      expansion=expansion_seconds(own, room.rows, room.whole_rows, links),
    )

  def plot(self, axes: Any = None) -> Any:
    """Draws the owners of chunks, the work of ranks and the moved rows. Returns three axes."""
    return plot_plan(self.spec, self.q_chunks, self.stats(), pair_rows(self.spec, self.pairs), axes)

  def __repr__(self) -> str:
    s = self.spec
    return (
      f"DistAttnKey({s.q_len} x {s.k_len} on {s.cp_size} ranks of {s.q_local}, "
      f"transport={s.transport!r}, {s.capacities})"
    )


def _dispatch_of(chunks: Any, length: int, chunk_size: int, cp_size: int) -> Dispatch:
  """The dispatch of a known key of all ranks."""
  value = known_value(chunks)
  if value is None or value.ndim != 2 or value.shape[0] != cp_size:
    raise ValueError(f"key must be known and of all {cp_size} ranks")
  ranks = np.empty(value.size, np.int32)
  ranks[value] = np.arange(cp_size, dtype=np.int32)[:, None]
  return Dispatch(length, chunk_size, cp_size, ranks)


#####


def check_key(key: Any) -> DistAttnKey:
  """Checks that an argument is a key."""
  if not isinstance(key, DistAttnKey):
    raise ValueError(f"key must be a DistAttnKey, got {type(key).__name__}")
  return key


def check_one_key(key: Any) -> DistAttnKey:
  """Checks that an argument is one key, of all ranks or of one rank, and not a stack of keys."""
  shape = np.shape(check_key(key).q_chunks)
  if len(shape) != 2:
    raise ValueError(
      f"key must be one key, got a stack {list(shape)}: use vmap with in_axes={key.spec.batch_axis}"
    )
  return key


def make_key(
  plan: Plan,
  queries: Dispatch,
  keys: Dispatch,
  capacities: Capacities | None = None,
) -> DistAttnKey:
  """Makes a key of a plan, padded to the given capacities or to rounded ones."""
  n, num_transfers = queries.cp_size, plan.num_transfers
  needed = _needed_capacities(plan)
  if capacities is None:
    capacities = rounded(needed, queries.num_chunks // n, keys.local_length, n)
  check_room(needed, capacities)
  spec = KeySpec(
    queries.length,
    keys.length,
    queries.chunk_size,
    keys.chunk_size,
    queries.local_length,
    keys.local_length,
    n,
    keys is not queries,
    plan.transport,
    plan.ranks.per_node,
    capacities,
  )

  def slice_table(slices: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    table = to_table(*slices, n * plan.num_stages, capacities.slices, 0)
    return table.reshape(n, plan.num_stages, capacities.slices, 6)

  def run_table(runs: Runs) -> np.ndarray:
    return _run_table(runs, n * num_transfers, capacities.runs).reshape(n, num_transfers, -1, 4)

  whole = plan.whole
  return DistAttnKey(
    queries.chunks,
    keys.chunks,
    slice_table(plan.slices),
    tuple(map(run_table, plan.send_runs)),
    run_table(plan.take_runs),
    tuple(
      _pair_table(size, level, plan.ranks)
      for level, size in zip(spec.levels, plan.sizes, strict=True)
    ),
    None if whole is None else slice_table(whole.slices),
    None if whole is None else run_table(whole.take_runs),
    spec,
  )


def _needed_capacities(plan: Plan) -> Capacities:
  n = plan.ranks.count

  def most(group: np.ndarray, count: int) -> int:
    return int(np.bincount(group, minlength=count).max(initial=0))

  def most_rows(num_rows: np.ndarray) -> tuple[int, ...]:
    return tuple(num_rows.max(axis=0, initial=0).tolist())

  whole = plan.whole
  run_tables = [plan.take_runs, *plan.send_runs, *([] if whole is None else [whole.take_runs])]
  slice_tables = [plan.slices, *([] if whole is None else [whole.slices])]
  return Capacities(
    slices=max(most(group, n * plan.num_stages) for group, _ in slice_tables),
    rows=most_rows(plan.num_rows),
    runs=max(most(group, n * plan.num_transfers) for group, _ in run_tables) + 1,
    hops=plan.hops,
    overlap_degree=plan.overlap_degree,
    whole_rows=None if whole is None else most_rows(whole.num_rows),
    orders=plan.orders,
  )


def _run_table(runs: Runs, num_groups: int, capacity: int) -> np.ndarray:
  """The runs of each group, after a first run that marks all rows as empty."""
  group, columns = runs
  groups = np.concatenate([np.arange(num_groups), group])
  nothing = np.tile(np.array([0, 0, 0, NOWHERE]), (num_groups, 1))
  order = np.argsort(groups, kind="stable")
  columns = np.concatenate([nothing, columns])[order]
  table = to_table(groups[order], columns, num_groups, capacity, NOWHERE)
  table[:, :, [0, 2]] = np.where(table[:, :, [0, 2]] == NOWHERE, 0, table[:, :, [0, 2]])
  return table


def _pair_table(sizes: np.ndarray, level: str, ranks: Ranks) -> np.ndarray:
  """`DistAttnKey.pairs` from rows `[sender, transfer, group size]`."""
  rank = np.arange(ranks.count)
  groups = ranks.groups(level) or [rank.tolist()]
  members = np.array(groups)  # [group, index]: the rank.
  group_of = np.empty(ranks.count, np.int64)
  group_of[members] = np.arange(len(members))[:, None]
  senders = members[group_of]  # [rank, index]: who sends to it.
  received = sizes[senders, :, ranks.index(level, rank)[:, None]].transpose(0, 2, 1)
  return np.stack([sizes, received], axis=2).astype(np.int32)


def with_capacities(key: DistAttnKey, capacities: Capacities) -> DistAttnKey:
  """The same key, padded to larger capacities."""
  have = key.capacities
  if have == capacities:
    return key
  kinds = [
    [[(hop.level, hop.kind, hop.shifts) for hop in hops] for hops in room.hops]
    for room in (have, capacities)
  ]
  if kinds[0] != kinds[1]:
    raise ValueError(
      f"the key has {have}, which use other collectives than {capacities}: make a new key with "
      "capacities="
    )
  if have.whole_rows is not None and capacities.whole_rows is None:
    # The key also has the tables of merging stages, because the backward pass uses them.
    have = dataclasses.replace(have, whole_rows=None)
    key = dataclasses.replace(key, whole_slices=None, whole_runs=None)
  if dataclasses.replace(have | capacities, orders=capacities.orders) != capacities:
    raise ValueError(f"the key has {have}, which do not fit in {capacities}")

  def fill(table: np.ndarray, capacity: int, value: int) -> np.ndarray:
    widths = [(0, 0)] * table.ndim
    widths[-2] = (0, capacity - table.shape[-2])
    return np.pad(table, widths, constant_values=value)

  def fill_runs(table: np.ndarray) -> np.ndarray:
    filled = fill(table, capacities.runs, NOWHERE)
    filled[..., table.shape[-2] :, [0, 2]] = 0
    return filled

  return dataclasses.replace(
    key,
    slices=fill(key.slices, capacities.slices, 0),
    send_runs=tuple(map(fill_runs, key.send_runs)),
    take_runs=fill_runs(key.take_runs),
    whole_slices=None if key.whole_slices is None else fill(key.whole_slices, capacities.slices, 0),
    whole_runs=None if key.whole_runs is None else fill_runs(key.whole_runs),
    spec=dataclasses.replace(key.spec, capacities=capacities),
  )


def kernels_of(key: DistAttnKey, seconds: np.ndarray) -> tuple[Kernels, Kernels]:
  """The kernels of both passes of a known key, if they take these seconds `[ranks, stages, 2]`."""
  spec, is_whole = key.spec, key.whole_slices is not None
  own = [spec.k_local] * bool(spec.overlap_degree)
  lengths = [spec.q_local] * seconds.shape[1], [*own, *spec.capacities.rows]
  tables = key.whole_slices if is_whole else key.slices, key.slices
  shares = (
    PartShares.of_tables(np.asarray(known_value(table)), length, is_backward=bool(number))
    for number, (table, length) in enumerate(zip(tables, lengths, strict=True))
  )
  forward, backward = (Kernels(seconds[..., i], share) for i, share in enumerate(shares))
  return forward, backward
