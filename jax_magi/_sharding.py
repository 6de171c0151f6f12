"""Keeps batch and head shardings of an opaque op under plain `jit`.

Without this, XLA gathers every operand of a custom call onto every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

# Dimension letters with a meaning. Any other letter is a dimension that is never split.
_BATCH, _Q_HEADS, _KV_HEADS = "b", "h", "g"


def keep_batch_and_heads(fun: Callable, operands: list[str], results: list[str]) -> Callable:
  """`fun` on whatever part of batch and heads a device holds.

  Args:
    fun: takes one array per entry of `operands`, returns a tuple. The first two are q and k.
    operands: each operand's dimensions as letters: b batch, h query heads, g kv heads. A b of size
      1 is an operand that the whole batch shares.
    results: likewise.
  """

  def heads_of(q_shape, k_shape) -> tuple[int, int]:
    return q_shape[operands[0].index(_Q_HEADS)], k_shape[operands[1].index(_KV_HEADS)]

  def partition(mesh, operand_types, result_types):
    q, k = operand_types[:2]
    q_axes = dict(zip(operands[0], (*q.sharding.spec, *(None,) * q.ndim), strict=False))
    head_axes = q_axes[_Q_HEADS]
    # A group of query heads needs its kv head on the same device.
    if heads_of(q.shape, k.shape)[1] % _num_shards(mesh, head_axes):
      head_axes = None
    axes = {_BATCH: q_axes[_BATCH], _Q_HEADS: head_axes, _KV_HEADS: head_axes}

    def shardings(dims, types):
      return tuple(
        NamedSharding(
          mesh,
          PartitionSpec(
            *(
              None if letter == _BATCH and size == 1 else axes.get(letter)
              for letter, size in zip(letters, x.shape, strict=True)
            )
          ),
        )
        for letters, x in zip(dims, types, strict=True)
      )

    return mesh, fun, shardings(results, result_types), shardings(operands, operand_types)

  def sharding_rule(_, operand_types, result_types):
    num_q_heads, num_kv_heads = heads_of(operand_types[0].shape, operand_types[1].shape)
    is_grouped = num_q_heads != num_kv_heads
    factors = {_BATCH: "batch"}
    if num_kv_heads > 1:
      factors |= {_KV_HEADS: "heads", _Q_HEADS: "(heads group)" if is_grouped else "heads"}
    whole = ["group"] if "group" in factors.get(_Q_HEADS, "") else []

    def name(letter, size):
      if letter in factors and not (letter == _BATCH and size == 1):
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
    sizes = {"group": num_q_heads // num_kv_heads} if "group" in whole else {}
    return f"{left} -> {right}", {"need_replication_factors": tuple(whole), **sizes}

  partitioned = custom_partitioning(fun)
  partitioned.def_partition(partition=partition, sharding_rule=sharding_rule)
  return partitioned


def _num_shards(mesh: Any, axes: Any) -> int:
  if axes is None:
    return 1
  return math.prod(mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes))
