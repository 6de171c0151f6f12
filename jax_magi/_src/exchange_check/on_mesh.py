"""Arrays between processes and a mesh: each process has its part, and all get the same figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def split(x: Any, mesh: Mesh, axis_name: str) -> jax.Array:
  """An array that every process has whole, split along its first axis."""
  sharding = NamedSharding(mesh, P(axis_name))
  return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def on_ranks(mesh: Mesh, axis_name: str, step: Callable[..., Any]) -> Callable[..., Any]:
  """A compiled function of each rank's parts."""
  return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(axis_name), out_specs=P(axis_name)))


def summed(mesh: Mesh, parts: Mapping[Any, np.ndarray]) -> np.ndarray:
  """The sum over all devices, of an array `[n]` for each local one: the same on all processes."""
  return _over_devices(mesh, parts, jnp.sum)


def largest(mesh: Mesh, parts: Mapping[Any, np.ndarray]) -> np.ndarray:
  """The largest over all devices, likewise."""
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
