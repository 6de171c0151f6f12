"""Measures how fast a hop moves rows."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_magi._src.context_parallel.hops import Hop, Ranks, block_begins, move, move_back
from jax_magi._src.exchange_check import on_mesh


def large_hop(hop: Hop, ranks: Ranks, rows: int) -> Hop:
  """A hop of the same kind in which each rank sends at least `rows` rows, rounded up."""
  if hop.kind == "permute":
    return Hop(hop.level, hop.kind, (rows,), hop.shifts[:1])
  return Hop(hop.level, hop.kind, (math.ceil(rows / (ranks.group_size(hop.level) - 1)),))


def time_of(
  mesh: Mesh,
  axis_name: str,
  hop: Hop,
  ranks: Ranks,
  width: int,
  dtype: Any,
  repeats: int,
  *,
  is_back: bool,
) -> float:
  """The seconds that a hop takes on this process.

  Args:
    mesh: the mesh with the context-parallel axis.
    axis_name: the name of that axis.
    hop: the hop. All its blocks are full.
    ranks: the ranks of the axis.
    width: the number of elements of a row.
    dtype: the dtype of the rows.
    repeats: the number of measurements, whose median is returned.
    is_back: whether to time the way back, which gradients take.
  """
  length = int(block_begins(hop, ranks)[-1])
  if hop.kind == "all_gather" and not is_back:
    length = hop.rows[0]
  sharding = NamedSharding(mesh, P(axis_name))
  shape = ranks.count * length, width
  sent = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()
  group = ranks.group_size(hop.level)
  index = ranks.index(hop.level, np.arange(ranks.count))
  # No rank sends rows to itself.
  sizes = np.where(index[:, None] == np.arange(group)[None], 0, hop.rows[0])

  def step(sent: jax.Array, pairs: Any) -> Any:
    moved = move_back if is_back else move
    return moved(hop, ranks, axis_name, sent, pairs[0])

  fun = on_mesh.on_ranks(mesh, axis_name, step)
  pairs = on_mesh.split(np.repeat(sizes[:, None], 2, axis=1).astype(np.int32), mesh, axis_name)
  return median_time(lambda: fun(sent, pairs), repeats)


def median_time(fun: Callable[[], Any], repeats: int) -> float:
  """The median seconds from a call to its result, after a first call that compiles."""
  jax.block_until_ready(fun())
  times = []
  for _ in range(repeats):
    begin = time.perf_counter()
    jax.block_until_ready(fun())
    times.append(time.perf_counter() - begin)
  return statistics.median(times)
