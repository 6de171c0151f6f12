"""The plan as data: what a compiled step takes for each mask."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_magi._src.arguments import check_length
from jax_magi._src.context_parallel.hops import NODE, Hop, Ranks
from jax_magi._src.context_parallel.links import Links
from jax_magi._src.context_parallel.plan import Dispatch, Plan, to_table
from jax_magi._src.context_parallel.predict import Prediction, predict, stage_seconds
from jax_magi._src.context_parallel.routes import NOWHERE, is_near_first, levels_of

# How rows may travel; "auto" is one of the first three.
TRANSPORTS = ("all_to_all", "all_gather", "two_level", "ragged")
# Rows of `DistAttnKey.pairs`.
SENT, RECEIVED = range(2)


@dataclasses.dataclass(frozen=True)
class Capacities:
  """How much a compiled step has room for. Keys of equal capacities share it.

  `a | b` has room for both, and keys are made for it with `capacities=`. Where the two travel by
  different collectives, a mask may then need more runs than before, and making its key says so.

  Attributes:
    slices: slices of a rank and stage.
    rows: for each transfer, rows of keys that a stage gets from it.
    runs: ranges of neighbouring rows in them, and in what a rank sends.
    hops: for each transfer, the collectives that it is made of, with their rows.
    overlap_degree: into how many stages with a transfer keys of other ranks are split; 0 is none.
  """

  slices: int
  rows: tuple[int, ...]
  runs: int
  hops: tuple[tuple[Hop, ...], ...]
  overlap_degree: int

  def __post_init__(self):
    for name in ("slices", "runs", "overlap_degree"):
      check_length(name, getattr(self, name))
    for rows in self.rows:
      check_length("rows", rows)
    if not all(isinstance(hop, Hop) for hops in self.hops for hop in hops):
      raise ValueError(f"hops must be collectives of each transfer, as a key has them: {self.hops}")

  def __or__(self, other: Capacities) -> Capacities:
    ways = [(room.overlap_degree, [_levels(t) for t in room.hops]) for room in (self, other)]
    if ways[0] != ways[1]:
      raise ValueError(
        "capacities of different transports or degrees have no union; make the keys with the same "
        f"transport= and overlap_degree=, got {self} and {other}"
      )
    return Capacities(
      max(self.slices, other.slices),
      tuple(map(max, self.rows, other.rows)),
      max(self.runs, other.runs),
      tuple(
        tuple(map(_room_for_both, mine, theirs))
        for mine, theirs in zip(self.hops, other.hops, strict=True)
      ),
      self.overlap_degree,
    )


def _levels(hops: tuple[Hop, ...]) -> list[tuple[str, bool]]:
  """What hops must have in common."""
  return [(hop.level, hop.kind == "ragged") for hop in hops]


def _room_for_both(a: Hop, b: Hop) -> Hop:
  """A hop that can do what either can."""
  for hop in (a, b):
    if hop.kind == "all_gather":
      return hop
  if a.kind == b.kind == "permute":
    rows = dict(zip(a.shifts, a.rows, strict=True))
    for shift, size in zip(b.shifts, b.rows, strict=True):
      rows[shift] = max(rows.get(shift, 0), size)
    shifts = tuple(sorted(rows))
    return dataclasses.replace(a, shifts=shifts, rows=tuple(rows[shift] for shift in shifts))
  kind = "ragged" if a.kind == "ragged" else "all_to_all"
  return Hop(a.level, kind, (max(*a.rows, *b.rows),))


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
  is_cross: bool
  transport: str
  ranks_per_node: int
  capacities: Capacities

  @property
  def overlap_degree(self) -> int:
    """Stages with a transfer."""
    return self.capacities.overlap_degree

  @property
  def num_transfers(self) -> int:
    """Transfers of an attention, each way."""
    return max(self.overlap_degree, 1)

  @property
  def ranks(self) -> Ranks:
    """Those of the mesh axis."""
    return Ranks(self.cp_size, self.ranks_per_node)

  @property
  def levels(self) -> tuple[str, ...]:
    """On which rows travel."""
    return levels_of(self.transport, self.ranks)

  @property
  def near_first(self) -> bool:
    """Whether the first transfer is of rows from the same node alone."""
    return is_near_first(self.levels, self.num_transfers)


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
    send_runs: for each level, int32 `[cp_size, transfers, runs, 4]`: from this block and place on,
      what a rank sends are the rows from that block and place on; block 0 is its own rows, the
      others are what hops before this one brought.
    take_runs: int32 `[cp_size, transfers, runs, 4]`: the same for a stage's buffer.
    pairs: for each level, int32 `[cp_size, transfers, 2, group size]`: rows sent to each rank of
      the group, and received from each.
    spec: lengths and capacities (static).
  """

  q_chunks: Any
  k_chunks: Any
  slices: Any
  send_runs: tuple[Any, ...]
  take_runs: Any
  pairs: tuple[Any, ...]
  spec: KeySpec = dataclasses.field(metadata={"static": True})

  @property
  def capacities(self) -> Capacities:
    """To pin another key's with."""
    return self.spec.capacities

  def stats(self) -> Any:
    """Work and rows of each rank: see `PlanStats`. The key must be concrete."""
    from jax_magi._src.context_parallel.stats import stats_of

    return stats_of(self)

  def predict(self, links: Links | None = None, *, keep_remote_kv: bool = False) -> Prediction:
    """How long attention takes, forward and backward: see `Prediction`.

    Args:
      links: speeds; None is those of H200 nodes.
      keep_remote_kv: as in `calc_attn`.
    """
    from jax_magi._src.context_parallel.stats import areas_of

    links = links or Links()
    seconds = stage_seconds(areas_of(self), links)
    spec = self.spec
    return predict(
      spec.capacities.hops,
      spec.ranks,
      spec.overlap_degree,
      seconds,
      links,
      keep_remote_kv=keep_remote_kv,
    )

  def plot(self, axes: Any = None) -> Any:
    """Draws who owns what, the work of each rank, and what moves: three matplotlib axes."""
    from jax_magi._src.context_parallel.plot import plot_key

    return plot_key(self, axes)

  def __repr__(self) -> str:
    s = self.spec
    return (
      f"DistAttnKey({s.q_len} x {s.k_len} on {s.cp_size} ranks of {s.q_local}, "
      f"transport={s.transport!r}, {s.capacities})"
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
  capacities: Capacities | None,
) -> DistAttnKey:
  """The plan, filled up to capacities: given ones, or else the next round ones."""
  n, num_transfers = queries.cp_size, plan.num_transfers
  needed = _needed_capacities(plan)
  if capacities is None:
    capacities = _rounded(needed, queries.num_chunks // n, keys)
  _check_room(needed, capacities)
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
    keys is not queries,
    plan.transport,
    plan.ranks.per_node,
    capacities,
  )

  def run_table(runs):
    return _run_table(runs, n * num_transfers, capacities.runs).reshape(n, num_transfers, -1, 4)

  return DistAttnKey(
    queries.chunks,
    keys.chunks,
    table.reshape(n, plan.num_stages, capacities.slices, 6),
    tuple(map(run_table, plan.send_runs)),
    run_table(plan.take_runs),
    tuple(
      _pair_table(size, level, plan.ranks)
      for level, size in zip(spec.levels, plan.sizes, strict=True)
    ),
    spec,
  )


def _needed_capacities(plan: Plan) -> Capacities:
  n = plan.ranks.count

  def most(group, count):
    return int(np.bincount(group, minlength=count).max(initial=0))

  tables = (plan.take_runs, *plan.send_runs)
  runs = max(most(group, n * plan.num_transfers) for group, _ in tables) + 1
  rows = tuple(plan.num_rows.max(axis=0, initial=0).tolist())
  slices = most(plan.slices[0], n * plan.num_stages)
  return Capacities(slices, rows, runs, plan.hops, plan.overlap_degree)


def _rounded(needed: Capacities, chunks_of_rank: int, keys: Dispatch) -> Capacities:
  """Round numbers, so that similar masks have equal ones."""
  floor = 2 * chunks_of_rank  # For the simplest masks, one bucket.
  limit = keys.num_chunks * keys.chunk_size

  def hop(hop: Hop) -> Hop:
    if hop.kind == "all_gather":
      return hop
    # Between nodes, a quarter too much counts. Inside one, fewer programs are worth more than that.
    half = keys.local_length // 2
    parts = [8 if hop.level == NODE else 4 if size > half else 1 for size in hop.rows]
    rows = tuple(map(_round_up_to_part, hop.rows, parts))
    return dataclasses.replace(hop, rows=tuple(min(max(size, 1), limit) for size in rows))

  return Capacities(
    _round_up(max(needed.slices, floor)),
    tuple(min(_round_up(max(rows, 1)), limit) for rows in needed.rows),
    _round_up(max(needed.runs, floor)),
    tuple(tuple(map(hop, hops)) for hops in needed.hops),
    needed.overlap_degree,
  )


def _check_room(needed: Capacities, have: Capacities) -> None:
  for name in ("slices", "runs", "rows"):
    need, room = getattr(needed, name), getattr(have, name)
    if np.any(np.array(need) > np.array(room)):
      raise ValueError(f"capacities.{name} must be at least {need} for this mask, got {room}")
  for t, (hops, room) in enumerate(zip(needed.hops, have.hops, strict=True)):
    for need, hop in zip(hops, room, strict=True):
      if any(a > b for a, b in zip(need.rows, hop.rows, strict=True)):
        raise ValueError(
          f"capacities.hops must have room for {need} in transfer {t} for this mask, got {hop}"
        )


def _round_up(count: int) -> int:
  """To a power of two."""
  return 1 << max(count - 1, 0).bit_length()


def _round_up_to_part(count: int, parts: int) -> int:
  """To so many parts of a power of two: rows beyond what is needed are moved for nothing."""
  step = max(_round_up(count) // parts, 1)
  return -(-count // step) * step


def _run_table(runs, num_groups: int, capacity: int) -> np.ndarray:
  """Runs of each group, after one that says that there is nothing unless others say so."""
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
  """The same key with room for more."""
  have = key.capacities
  if have == capacities:
    return key
  kinds = [
    [[(hop.level, hop.kind, hop.shifts) for hop in hops] for hops in room.hops]
    for room in (have, capacities)
  ]
  if kinds[0] != kinds[1]:
    raise ValueError(
      f"the key has {have}, but its rows would travel in another way with {capacities}: make it "
      "anew, with capacities="
    )
  if (have | capacities) != capacities:
    raise ValueError(f"the key has {have}, which {capacities} has no room for")

  def fill(table, capacity, value):
    widths = [(0, 0)] * table.ndim
    widths[-2] = (0, capacity - table.shape[-2])
    return np.pad(table, widths, constant_values=value)

  def fill_runs(table):
    filled = fill(table, capacities.runs, NOWHERE)
    filled[..., table.shape[-2] :, [0, 2]] = 0
    return filled

  return dataclasses.replace(
    key,
    slices=fill(key.slices, capacities.slices, 0),
    send_runs=tuple(map(fill_runs, key.send_runs)),
    take_runs=fill_runs(key.take_runs),
    spec=dataclasses.replace(key.spec, capacities=capacities),
  )
