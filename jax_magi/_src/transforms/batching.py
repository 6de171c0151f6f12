"""vmap of an op that has a batch of its own."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def fold_batch(
  fun: Callable[..., Any], first: str, shared: Set[str], summed: dict[int, str]
) -> Callable[..., Any]:
  """Makes vmap one larger batch: the mapped axis joins the leading one of every operand.

  `fun` takes a dictionary of operands, of which `first` has the whole batch. Those in `shared` may
  have a leading axis of 1: one for the whole batch. They stay so as long as they are not mapped.

  `summed` gives results, by index, the operand of which they are the gradient. That one, too, may
  have a leading axis of 1, and its gradient is then a sum over the batch; but each mapped element
  has a gradient of its own.

  The result must not be differentiated: JAX's derivative of a `custom_vmap` maps operands and
  their tangents one after the other where only some of them are mapped.
  """
  # Under jit, the constants of `fun` are its own. Otherwise they would be operands of the
  # custom_vmap, which refuses them where they are mapped, as they are in a vmap of lax.cond.
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
        return x  # Still shared by all.
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
