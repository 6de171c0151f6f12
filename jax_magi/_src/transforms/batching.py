"""vmap of an op that has a batch axis."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def fold_batch(
  fun: Callable[..., Any], first: str, shared: Set[str], summed: dict[int, str]
) -> Callable[..., Any]:
  """Turns vmap into one call with a larger batch: the mapped axis joins each operand's batch axis.

  `fun` takes a dictionary of operands. The operand `first` always has the whole batch. Operands in
  `shared` may have a leading axis of 1, and then the whole batch shares them. They stay shared as
  long as they are not mapped.

  `summed` maps results, by index, to the operands of which they are the gradients. If such an
  operand is shared, its gradient is a sum over the batch, with a separate sum for each mapped
  element.

  The returned function must not be differentiated: if only some operands are mapped, JAX's
  derivative of a `custom_vmap` maps operands and tangents one after the other.
  """
  # Inside jit, the constants of `fun` belong to it. Otherwise custom_vmap would treat them as
  # operands, and raise an error if they are mapped, as they are in a vmap of lax.cond.
  folded = custom_vmap(jax.jit(fun))

  @folded.def_vmap
  def _(
    axis_size: int, mapped: list[dict[str, bool]], operands: dict[str, Any]
  ) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
    (is_mapped,) = mapped

    def num_rows(name: str) -> int:
      rows: int = operands[name].shape[1 if is_mapped[name] else 0]
      return rows

    batch = num_rows(first)

    def join(name: str, x: jax.Array) -> jax.Array:
      if name in shared and not is_mapped[name] and x.shape[0] == 1:
        return x  # The whole batch still shares it.
      if not is_mapped[name]:
        x = x[None]
      x = jnp.broadcast_to(x, (axis_size, batch, *x.shape[2:]))
      return x.reshape(axis_size * batch, *x.shape[2:])

    def part(i: int, x: jax.Array) -> jax.Array:
      x = x.reshape(axis_size, batch, *x.shape[1:])
      is_sum = i in summed and num_rows(summed[i]) == 1
      return x.sum(axis=1, keepdims=True) if is_sum and batch != 1 else x

    results = folded({name: join(name, x) for name, x in operands.items()})
    return tuple(part(i, x) for i, x in enumerate(results)), (True,) * len(results)

  return folded
