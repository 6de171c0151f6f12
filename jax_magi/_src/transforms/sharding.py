"""Keeps the batch and head shardings of an opaque op under plain `jit`.

Without this, XLA gathers every operand of a custom call onto every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

# The letters of dimensions that may be split. Dimensions with other letters never are.
_BATCH, _Q_HEADS, _KV_HEADS = "b", "h", "g"


def keep_batch_and_heads(
  fun: Callable[..., tuple[jax.Array, ...]], operands: list[str], results: list[str]
) -> Callable[..., tuple[jax.Array, ...]]:
  """Calls `fun` on the part of batch and heads that each device holds.

  If query heads are split over more devices than there are kv heads, each device holds all kv heads
  and calls `fun` with the one that its query heads use. Gradients of kv heads are then summed over
  devices.

  Args:
    fun: a function of one array for each entry of `operands` that returns a tuple. The first
      operand has all heads. If there are kv heads, the second operand has all of them.
    operands: the dimensions of each operand as letters: b for the batch, h for (query) heads, g for
      kv heads. An operand of size 1 in such a dimension is shared.
    results: the dimensions of each result. A result of size 1 in such a dimension is a sum.
  """

  def positional(
    *arrays: jax.Array,
  ) -> tuple[jax.Array, ...]:  # custom_partitioning allows no keywords.
    return tuple(fun(*arrays))

  def heads_of(operand_types: Any) -> tuple[int, int]:
    num_q_heads = operand_types[0].shape[operands[0].index(_Q_HEADS)]
    if not any(_KV_HEADS in letters for letters in operands):
      return num_q_heads, num_q_heads
    return num_q_heads, operand_types[1].shape[operands[1].index(_KV_HEADS)]

  def partition(
    mesh: Any, operand_types: Any, result_types: Any
  ) -> tuple[Any, Callable[..., Any], tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
    batch_axes, head_axes = _find_axes(mesh, operand_types[0], operands[0])
    num_q_heads, num_kv_heads = heads_of(operand_types)
    group = num_q_heads // num_kv_heads
    # A group of query heads needs its kv head on the same device. So kv heads are split over the
    # leading mesh axes whose product divides their number, and replicated over the other axes.
    sizes = [mesh.shape[name] for name in head_axes]
    num_split = max(n for n in range(len(sizes) + 1) if num_kv_heads % math.prod(sizes[:n]) == 0)
    local_heads = num_q_heads // math.prod(sizes)
    if num_split < len(sizes) and group % local_heads:
      head_axes, num_split = (), 0  # Devices would need different numbers of kv heads.
    kv_axes, shared_axes = head_axes[:num_split], head_axes[num_split:]
    axes = {_BATCH: batch_axes, _Q_HEADS: head_axes, _KV_HEADS: kv_axes}

    def shardings(dims: list[str], types: Any) -> tuple[NamedSharding, ...]:
      return tuple(
        NamedSharding(
          mesh,
          PartitionSpec(
            *(
              () if size == 1 else axes.get(letter, ())
              for letter, size in zip(letters, x.shape, strict=True)
            )
          ),
        )
        for letters, x in zip(dims, types, strict=True)
      )

    def split_axes(letters: str, x: Any) -> tuple[str, ...]:
      """The mesh axes over which devices hold partial sums of `x`."""
      sizes = zip(letters, x.shape, strict=True)
      return tuple(name for letter, size in sizes if size == 1 for name in axes.get(letter, ()))

    sums = [split_axes(*pair) for pair in zip(results, result_types, strict=True)]

    def with_own_kv_head(*arrays: jax.Array) -> tuple[jax.Array, ...]:
      if not shared_axes:
        return positional(*arrays)
      head = lax.axis_index(shared_axes) * local_heads // group
      own = (
        lax.dynamic_slice_in_dim(x, head, 1, letters.index(_KV_HEADS))
        if _KV_HEADS in letters
        else x
        for letters, x in zip(operands, arrays, strict=True)
      )

      def all_kv_heads(letters: str, x: jax.Array) -> jax.Array:
        if _KV_HEADS not in letters:
          return x
        dim = letters.index(_KV_HEADS)
        shape = (*x.shape[:dim], arrays[1].shape[operands[1].index(_KV_HEADS)], *x.shape[dim + 1 :])
        whole = lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, head, dim)
        total: jax.Array = lax.psum(whole, shared_axes)
        return total

      return tuple(map(all_kv_heads, results, positional(*own)))

    def summed(*arrays: jax.Array) -> tuple[jax.Array, ...]:
      # This runs on one device. Without an empty mesh, JAX 0.12 would put the arrays that are made
      # here on the caller's Explicit axes.
      with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        values = zip(with_own_kv_head(*arrays), sums, strict=True)
        return tuple(lax.psum(x, names) if names else x for x, names in values)

    return mesh, summed, shardings(results, result_types), shardings(operands, operand_types)

  def sharding_rule(_: Any, operand_types: Any, result_types: Any) -> tuple[str, dict[str, Any]]:
    num_q_heads, num_kv_heads = heads_of(operand_types)
    group = num_q_heads // num_kv_heads
    factors = {_BATCH: "batch", _KV_HEADS: "heads", _Q_HEADS: "heads"}
    if group > 1:
      factors[_Q_HEADS] = "(heads group)" if num_kv_heads > 1 else "group"
    whole: list[str] = []  # Factors that are never split, in order of appearance.

    def name(letter: str, size: int) -> str:
      if letter in factors and size > 1:
        return factors[letter]
      whole.append(f"whole{len(whole)}")
      return whole[-1]

    left, right = (
      ", ".join(
        " ".join(name(letter, size) for letter, size in zip(letters, x.shape, strict=True))
        for letters, x in zip(dims, types, strict=True)
      )
      for dims, types in ((operands, operand_types), (results, result_types))
    )
    sizes = {"group": group} if "(heads group)" in left else {}
    return f"{left} -> {right}", {"need_replication_factors": tuple(whole), **sizes}

  partitioned = custom_partitioning(positional)
  partitioned.def_partition(
    partition=partition,
    sharding_rule=sharding_rule,
    # GSPMD (jax_use_shardy_partitioner=False) does not use the sharding rule.
    infer_sharding_from_operands=lambda *types: partition(*types)[2],
    decode_shardings=False,
  )
  return cast(Callable[..., tuple[jax.Array, ...]], partitioned)


def _find_axes(mesh: Any, q: Any, q_dims: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """The mesh axes over which q's batch and heads are split.

  JAX's own decoding raises an error if Shardy splits a part of an axis, which happens if there are
  fewer kv heads than devices. Such a sharding is not kept here.
  """
  if mesh.empty:
    return (), ()
  try:
    parts = q.sharding.devices_indices_map(q.shape)
  except ValueError:  # The parts differ in size.
    return (), ()
  batch, heads = (_axes_along(mesh, q_dims.index(x), parts) for x in (_BATCH, _Q_HEADS))
  return batch, heads


def _axes_along(mesh: Any, dim: int, parts: Mapping[Any, tuple[slice, ...]]) -> tuple[str, ...]:
  """The mesh axes that split a dimension, the slowest first; empty if they are not whole axes.

  Args:
    mesh: the mesh with the devices.
    dim: the index of the dimension.
    parts: the part of the array that each device holds.
  """
  begins = np.array([parts[device][dim].start or 0 for device in mesh.devices.flat])
  part = np.unique(begins, return_inverse=True)[1].reshape(mesh.devices.shape)
  # The number of parts that one step along each axis skips.
  steps = [int(part.take(min(1, size - 1), axis=i).flat[0]) for i, size in enumerate(part.shape)]
  expected = sum(step * np.indices(part.shape, sparse=True)[i] for i, step in enumerate(steps))
  if not np.array_equal(np.broadcast_to(expected, part.shape), part):
    return ()
  order = sorted((i for i, step in enumerate(steps) if step), key=lambda i: -steps[i])
  return tuple(mesh.axis_names[i] for i in order)
