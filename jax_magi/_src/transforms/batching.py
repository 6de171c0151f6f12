"""vmap of an op that has a batch of its own."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def fold_batch(
  fun: Callable, shared: tuple[int, ...], summed: dict[int, int] | None = None
) -> Callable:
  """Makes vmap one larger batch: the mapped axis joins the leading one of every operand.

  Operands whose index is in `shared` may have a leading axis of 1: one for the whole batch. They
  stay so as long as they are not mapped.

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
  def _(axis_size, is_mapped, *operands):
    batch = operands[0].shape[1 if is_mapped[0] else 0]

    def join(i, x):
      if i in shared and not is_mapped[i] and x.shape[0] == 1:
        return x  # Still shared by all.
      if not is_mapped[i]:
        x = x[None]
      x = jnp.broadcast_to(x, (axis_size, batch, *x.shape[2:]))
      return x.reshape(axis_size * batch, *x.shape[2:])

    def part(i, x):
      x = x.reshape(axis_size, batch, *x.shape[1:])
      source = (summed or {}).get(i)
      is_sum = source is not None and operands[source].shape[1 if is_mapped[source] else 0] == 1
      return x.sum(axis=1, keepdims=True) if is_sum and batch != 1 else x

    results = folded(*(join(i, x) for i, x in enumerate(operands)))
    return tuple(part(i, x) for i, x in enumerate(results)), (True,) * len(results)

  return folded
