"""`check_exchange`, the public function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_magi._src.arguments import check_choice, check_positive
from jax_magi._src.context_parallel.capacities import TRANSPORTS
from jax_magi._src.context_parallel.hops import ALL, LOCAL, NODE, Hop, Ranks, moved_rows
from jax_magi._src.context_parallel.nodes import check_ranks, check_ranks_per_node
from jax_magi._src.context_parallel.transport import levels_of
from jax_magi._src.exchange_check import on_mesh, rates
from jax_magi._src.exchange_check.compare import DIRECTIONS, compare
from jax_magi._src.exchange_check.report import ExchangeCheck, ExchangeRate, ExchangeReport
from jax_magi._src.exchange_check.tables import Tables, make_tables

_DEGREES = (1, 2)


def check_exchange(
  mesh: Mesh,
  axis_name: str = "cp",
  *,
  ranks_per_node: int | None = None,
  transports: Sequence[str] | None = None,
  rows: int = 32768,
  width: int = 2048,
  dtype: Any = jnp.bfloat16,
  repeats: int = 5,
  seed: int = 0,
) -> ExchangeReport:
  """Tests the exchange of rows between the ranks of a mesh axis, and measures its speed.

  Each transport sends random rows to other ranks, and gradients back, following the tables of
  random plans. The results are compared with numpy: rows bit by bit, and sums of gradients within
  the rounding error of their additions. Then each level of each transport is timed.

  Call this function on all processes. All of them receive the same report.

  Args:
    mesh: the mesh of your training run, with its devices. Along axes other than `axis_name`, groups
      of ranks exchange rows at the same time.
    axis_name: the mesh axis over which the sequence is split.
    ranks_per_node: the number of neighbouring ranks that share a node, as in `magi_attn_flex_key`.
    transports: a list of "all_to_all", "all_gather", "two_level" and "ragged". None tests all that
      fit the mesh: "two_level" needs several nodes of several ranks; "ragged" needs GPUs of one
      node.
    rows: the number of rows that each rank sends in a timed transfer. The checks send fewer.
    width: the number of elements of a row.
    dtype: the dtype of the rows. Gradients are float32.
    repeats: the number of timed transfers. The report has their median.
    seed: the seed of the random rows and plans.

  Returns:
    The report. Print it, or call `raise_if_faulty()`.
  """
  if not isinstance(mesh, Mesh):
    raise ValueError(f"mesh must be a jax.sharding.Mesh with devices, got {type(mesh).__name__}")
  if axis_name not in mesh.axis_names:
    raise ValueError(f"the mesh must have an axis {axis_name!r}, got {mesh.axis_names}")
  count = mesh.shape[axis_name]
  if count < 2:
    raise ValueError(f"axis {axis_name!r} must have at least two ranks, got {count}")
  ranks = check_ranks(count, ranks_per_node)
  check_ranks_per_node(mesh, axis_name, ranks_per_node)
  for name, value in (("rows", rows), ("width", width), ("repeats", repeats)):
    check_positive(name, value)
  dtype = _check_dtype(dtype)
  platform = mesh.devices.flat[0].platform
  tables = _tables(_check_transports(transports, ranks, platform), ranks, rows, seed)
  checks = _checks(mesh, axis_name, tables, width, dtype, np.random.default_rng([seed, 1]))
  found = _rates(mesh, axis_name, tables, ranks, rows, width, dtype, repeats)
  return ExchangeReport(count, ranks.per_node, platform, checks, found)


def _check_dtype(dtype: Any) -> np.dtype:
  choices = [np.dtype(x) for x in (jnp.float32, jnp.bfloat16, jnp.float16)]
  found: np.dtype = np.dtype(np.float32 if dtype is None else dtype)
  if dtype is None or found not in choices:
    names = ", ".join(x.name for x in choices)
    raise ValueError(f"dtype must be one of {names}, got {dtype!r}")
  return found


def _check_transports(names: Any, ranks: Ranks, platform: str) -> list[str]:
  """The transports to test: those that `names` lists, or all that fit the ranks."""
  fits = dict.fromkeys(TRANSPORTS, True)
  fits["two_level"] = len(levels_of("two_level", ranks)) == 2
  fits["ragged"] = ranks.num_nodes == 1
  if names is None:
    return [name for name in TRANSPORTS if fits[name] and (name != "ragged" or platform == "gpu")]
  if isinstance(names, str) or not names:
    raise ValueError(f"transports must be a list of some of {TRANSPORTS}, got {names!r}")
  for name in names:
    if not fits[check_choice("transports", name, TRANSPORTS)]:
      need = "several nodes of several ranks" if name == "two_level" else "one node"
      raise ValueError(
        f"transport {name!r} needs {need}, but ranks_per_node makes {ranks.num_nodes} nodes of "
        f"{ranks.per_node} ranks"
      )
  return list(dict.fromkeys(names))


def _tables(transports: Sequence[str], ranks: Ranks, rows: int, seed: int) -> list[Tables]:
  # If all ranks need all rows, numpy computes ranks^2 * local_rows * width numbers.
  local_rows = min(rows, max(4096 // ranks.count, 32))
  rng = np.random.default_rng([seed, 0])
  return [
    found
    for transport in transports
    for degree in _DEGREES
    for found in make_tables(transport, ranks, degree, local_rows, rng)
  ]


def _checks(
  mesh: Mesh,
  axis_name: str,
  tables: Sequence[Tables],
  width: int,
  dtype: np.dtype,
  rng: np.random.Generator,
) -> tuple[ExchangeCheck, ...]:
  width = min(width, max(2048 // mesh.shape[axis_name], 8))  # For the reason given in `_tables`.
  counts = [compare(mesh, axis_name, found, width, dtype, rng) for found in tables]
  parts = {
    device: np.concatenate([count[x][device] for count in counts for x in DIRECTIONS])
    for device in mesh.local_devices
  }
  totals = on_mesh.summed(mesh, parts).reshape(len(tables), len(DIRECTIONS), 2).tolist()
  return tuple(
    ExchangeCheck(
      found.transport,
      found.collectives,
      found.keys[0].spec.overlap_degree,
      direction,
      num_rows,
      num_wrong,
    )
    for found, of_tables in zip(tables, totals, strict=True)
    for direction, (num_wrong, num_rows) in zip(DIRECTIONS, of_tables, strict=True)
  )


def _place_in_report(transport: str, level: str, kind: str) -> tuple[int, int, str]:
  return TRANSPORTS.index(transport), (ALL, NODE, LOCAL).index(level), kind


def _rates(
  mesh: Mesh,
  axis_name: str,
  tables: Sequence[Tables],
  ranks: Ranks,
  rows: int,
  width: int,
  dtype: np.dtype,
  repeats: int,
) -> tuple[ExchangeRate, ...]:
  """The speed of every kind of hop that was checked."""
  hops: dict[tuple[str, str, str], Hop] = {}
  for found in tables:
    for hop in (hop for hops in found.hops for hop in hops):
      hops.setdefault((found.transport, hop.level, hop.kind), rates.large_hop(hop, ranks, rows))
  timed = [
    (transport, hop, direction, row_dtype)
    for (transport, _, _), hop in sorted(hops.items(), key=lambda item: _place_in_report(*item[0]))
    for direction, row_dtype in (("cast", dtype), ("reduce", np.dtype(np.float32)))
  ]
  times = np.array(
    [
      rates.time_of(
        mesh, axis_name, hop, ranks, width, row_dtype, repeats, is_back=direction == "reduce"
      )
      for _, hop, direction, row_dtype in timed
    ],
    np.float32,
  )
  slowest = on_mesh.largest(mesh, dict.fromkeys(mesh.local_devices, times)).tolist()
  return tuple(
    ExchangeRate(
      transport,
      hop.level,
      hop.kind,
      direction,
      moved_rows(hop, ranks) * width * row_dtype.itemsize,
      1e3 * seconds,
    )
    for (transport, hop, direction, row_dtype), seconds in zip(timed, slowest, strict=True)
  )
