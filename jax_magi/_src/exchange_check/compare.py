"""Sends random rows through transfers, and compares the results with numpy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_magi._src.context_parallel.exchange import transfers_of
from jax_magi._src.context_parallel.key import DistAttnKey
from jax_magi._src.exchange_check import on_mesh
from jax_magi._src.exchange_check.followed import buffer_rows
from jax_magi._src.exchange_check.tables import Tables

CAST = "cast"
# The dtype in which gradients are sent, by direction.
_WIRES = {"reduce": np.dtype(np.float32), "reduce in bfloat16": np.dtype(jnp.bfloat16)}
DIRECTIONS = (CAST, *_WIRES)

# The largest relative error of rounding to nearest in each dtype.
_FLOAT32, _BFLOAT16 = 2.0**-24, 2.0**-8
# The float64 sums to compare with are not exact, either.
_SLACK = 1 + 2.0**-20

# For each direction and each local device: the number of wrong rows, and of all rows.
Counts = dict[str, dict[Any, np.ndarray]]


def compare(
  mesh: Mesh,
  axis_name: str,
  tables: Tables,
  width: int,
  dtype: np.dtype,
  rng: np.random.Generator,
) -> Counts:
  """Runs the rows of all keys through one program, and counts those that differ from numpy's.

  Args:
    mesh: the mesh with the context-parallel axis.
    axis_name: the name of that axis.
    tables: the keys.
    width: the number of elements of a row.
    dtype: the dtype of the rows that are cast.
    rng: the generator of the rows, in the same state on all processes.
  """
  run = _program(mesh, axis_name)
  counts: Counts = {
    direction: {device: np.zeros(2, np.int32) for device in mesh.local_devices}
    for direction in DIRECTIONS
  }
  for key in tables.keys:
    spec = key.spec
    shape = spec.cp_size * spec.k_local, width
    x = rng.standard_normal(shape, np.float32).astype(dtype)
    wanted = buffer_rows(key)
    gradients = {
      # Values that the wire's dtype can represent, so that the first hop does not round them.
      direction: [
        rng.standard_normal((rows.size, width), np.float32).astype(wire).astype(np.float32)
        for rows in wanted
      ]
      for direction, wire in _WIRES.items()
    }
    operands = jax.tree.map(lambda x: on_mesh.split(x, mesh, axis_name), (x, gradients, key))
    results = run(*operands)
    for transfer, rows in enumerate(wanted):
      num_hops = len(tables.hops[transfer])
      checks = {CAST: _cast_check(x, rows)}
      for direction, wire in _WIRES.items():
        dx = gradients[direction][transfer]
        checks[direction] = _reduce_check(dx, rows, len(x), num_hops, wire)
      for direction, is_right in checks.items():
        for device, right in _by_device(results[direction][transfer], is_right):
          counts[direction][device] += len(right) - right.sum(), len(right)
  return counts


def _program(mesh: Mesh, axis_name: str) -> Callable[..., Any]:
  """A function of one key that runs all its transfers both ways, and returns the results."""

  def step(x: jax.Array, gradients: Any, key: DistAttnKey) -> dict[str, list[jax.Array]]:
    transfers = transfers_of(key, axis_name)
    results = defaultdict(list)
    for transfer in transfers:
      results[CAST].append(transfer.cast(x))
      for direction, wire in _WIRES.items():
        dx = gradients[direction][transfer.number]
        results[direction].append(transfer.reduce(dx, wire, deterministic=False))
    return dict(results)

  return on_mesh.on_ranks(mesh, axis_name, step)


def _by_device(x: jax.Array, is_right: Callable[..., Any]) -> Iterator[tuple[Any, np.ndarray]]:
  """Yields each local device, and for each of its rows whether the row is right."""
  for shard in x.addressable_shards:
    begin, end, _ = shard.index[0].indices(x.shape[0])
    yield shard.device, is_right(np.asarray(shard.data), slice(begin, end))


def _cast_check(x: np.ndarray, rows: np.ndarray) -> Callable[..., Any]:
  """Checks that rows arrive bit by bit, and that places where no row arrives hold zeros."""
  rows = rows.reshape(-1)
  bits = np.dtype(f"u{x.dtype.itemsize}")

  def is_right(got: np.ndarray, places: slice) -> np.ndarray:
    wanted = np.where((rows[places] >= 0)[:, None], x[rows[places]], np.zeros_like(x[:1]))
    right: np.ndarray = np.all(got.view(bits) == wanted.view(bits), axis=1)
    return right

  return is_right


def _reduce_check(
  dx: np.ndarray, rows: np.ndarray, num_rows: int, num_hops: int, wire: np.dtype
) -> Callable[..., Any]:
  """Checks that gradients are summed within the rounding error of float32 and the wire's dtype.

  If m terms g are added in any order, each term passes through at most m - 1 additions. Each hop
  after the first rounds it to the wire's dtype (a float32 wire does not round). The error is
  therefore at most ((1 + u_wire)^(hops - 1) (1 + u_float32)^(m - 1) - 1) sum |g|.
  """
  rows = rows.reshape(-1)
  terms, places = dx[rows >= 0].astype(np.float64), rows[rows >= 0]
  total, size = np.zeros((2, num_rows, dx.shape[1]))
  np.add.at(total, places, terms)
  np.add.at(size, places, np.abs(terms))
  additions = np.maximum(np.bincount(places, minlength=num_rows) - 1, 0)
  roundings = num_hops - 1 if wire.itemsize < 4 else 0
  growth = np.expm1(additions * np.log1p(_FLOAT32) + roundings * np.log1p(_BFLOAT16))
  bound = growth[:, None] * size * _SLACK

  def is_right(got: np.ndarray, places: slice) -> np.ndarray:
    error: np.ndarray = np.abs(got.astype(np.float64) - total[places])
    right: np.ndarray = np.all(error <= bound[places], axis=1)  # False for NaN.
    return right

  return is_right
