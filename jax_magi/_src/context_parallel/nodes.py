"""Which ranks share nodes: checks the caller's argument against the devices of a mesh."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh

from jax_magi._src.arguments import check_positive
from jax_magi._src.context_parallel.hops import Ranks


def check_ranks(cp_size: int, per_node: Any) -> Ranks:
  """Checks `ranks_per_node`; returns the ranks and their nodes."""
  if per_node is None:
    return Ranks(cp_size, cp_size)
  per_node = min(check_positive("ranks_per_node", per_node), cp_size)
  if cp_size % per_node:
    raise ValueError(f"ranks_per_node must divide cp_size={cp_size}, got {per_node}")
  return Ranks(cp_size, per_node)


def check_ranks_per_node(mesh: Any, axis_name: str, ranks_per_node: int | None) -> None:
  """Compares `ranks_per_node` with what the devices of a mesh axis report about their nodes.

  Devices with different `slice_index` have no fast links between them: on GPUs, the index is that
  of the node, or of the NVLink domain. Devices of one process share a node. Nothing is known about
  CPUs, or about a mesh without devices.

  Raises `ValueError` if ranks_per_node is None (all ranks share a node) but the devices report
  several nodes. A number that contradicts the devices only causes a warning, because the caller may
  know better.

  Args:
    mesh: the mesh with the axis. It may have no devices.
    axis_name: the axis over which the sequence is split.
    ranks_per_node: as in `magi_attn_flex_key`.
  """
  if isinstance(mesh, AbstractMesh):
    return
  axis = list(mesh.axis_names).index(axis_name)
  lines = np.moveaxis(mesh.devices, axis, -1)
  count = lines.shape[-1]
  lines = lines.reshape(-1, count)
  if any(device.platform == "cpu" for device in lines.flat):
    return
  size = count if ranks_per_node is None else min(ranks_per_node, count)
  if count % size:
    return  # No key can have such nodes, so it is an error elsewhere.
  slices = _numbers(lines, "slice_index")
  if slices is not None and not _are_alike(slices, size):
    fitting = _most_alike(slices)
    advice = f"pass ranks_per_node={fitting}"
    if fitting == 1:
      advice += ", or order the devices of the mesh so that those of a node are neighbours"
    if ranks_per_node is None:
      raise ValueError(
        f"ranks_per_node=None says that all {count} ranks of {axis_name!r} share a node, but their "
        f"devices report several (slice_index): {advice}; or {count} if they do share a node"
      )
    _warn(
      f"ranks_per_node is {size}, but neighbours of {axis_name!r} that should share a node report "
      f"different ones (slice_index): {advice}"
    )
    return
  processes = _numbers(lines, "process_index")
  if processes is not None and size < (sharing := _most_alike(processes)):
    _warn(
      f"ranks_per_node is {size}, but each {sharing} neighbours of {axis_name!r} are devices of "
      f"one process, and so share a node: pass ranks_per_node={sharing}, or a multiple of it"
    )


def _warn(text: str) -> None:
  warnings.warn(text, stacklevel=4)  # At the caller of the public function.


def _numbers(devices: np.ndarray, name: str) -> np.ndarray | None:
  """A property of devices, int in the shape of `devices`; None if any device lacks it."""
  found = [getattr(device, name, None) for device in devices.flat]
  if any(number is None for number in found):
    return None
  return np.array(found, np.int64).reshape(devices.shape)


def _are_alike(numbers: np.ndarray, size: int) -> bool:
  """Whether each group of `size` neighbours in a line has equal numbers."""
  groups = numbers.reshape(-1, size)
  return bool((groups == groups[:, :1]).all())


def _most_alike(numbers: np.ndarray) -> int:
  """The largest size for which `_are_alike` is True."""
  count = numbers.shape[-1]
  return max(
    size for size in range(1, count + 1) if count % size == 0 and _are_alike(numbers, size)
  )
