"""Moves arrays between processes and a mesh: each process has its part, all get the same totals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def split(x: Any, mesh: Mesh, axis_name: str) -> jax.Array:
  """Splits an array that every process holds in full along its first axis."""
  sharding = NamedSharding(mesh, P(axis_name))
  return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def on_ranks(mesh: Mesh, axis_name: str, step: Callable[..., Any]) -> Callable[..., Any]:
  """Compiles `step`, a function of one rank's parts, for all ranks."""
  return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(axis_name), out_specs=P(axis_name)))


def summed(mesh: Mesh, parts: Mapping[Any, np.ndarray]) -> np.ndarray:
  """Sums arrays `[n]`, one for each local device, over all devices; all processes get the sum."""
  return _over_devices(mesh, parts, jnp.sum)


def largest(mesh: Mesh, parts: Mapping[Any, np.ndarray]) -> np.ndarray:
  """The elementwise maximum of such arrays over all devices."""
  return _over_devices(mesh, parts, jnp.max)


def _over_devices(
  mesh: Mesh, parts: Mapping[Any, np.ndarray], fun: Callable[..., Any]
) -> np.ndarray:
  (shape,) = {part.shape for part in parts.values()}
  everywhere = NamedSharding(mesh, P())
  split_up = NamedSharding(mesh, P(mesh.axis_names))
  arrays = [jax.device_put(part[None], device) for device, part in parts.items()]
  whole = jax.make_array_from_single_device_arrays((mesh.size, *shape), split_up, arrays)
  return np.asarray(jax.jit(lambda x: fun(x, axis=0), out_shardings=everywhere)(whole))
