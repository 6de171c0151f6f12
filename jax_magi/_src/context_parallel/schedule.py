"""The order of a rank's kernels and transfers, as XLA keeps it.

A pass is a row of steps. In a step, at most one transfer runs beside one kernel, and neither needs
the other; a step begins when the one before it is done. XLA's scheduler then has no choice but to
start the transfer, launch the kernel, and wait for the transfer:

    forward, degree 2      kernel     | own keys | stage 1 | stage 2 |
                           transfer   | keys 1   | keys 2  |         |

    backward, degree 2     kernel     | own, 1st half | stage 1 | stage 2     | own, 2nd half |
                           transfer   | keys 1        | keys 2  | gradients 1 | gradients 2   |

Left to itself, XLA takes our kernels for nothing and transfers for everything: it joins transfers,
and runs them before the first kernel. And it has one transfer in flight at a time, so that each
needs a kernel of its own to hide behind. In the backward pass there are more transfers than stages:
some stages are computed in two parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_magi._src.masks.slices import UNBOUNDED
from jax_magi._src.native.overlap import kernel_barrier

# Rows that no kernel's tile is cut at, where there are as many.
_ROW_MULTIPLE = 128


def side_by_side(
  done: Any,
  kernel: Callable,
  slices: Any,
  move: Callable | None,
  sent: Any,
  *,
  with_barrier: bool,
) -> tuple[Any, Any, Any]:
  """One step: `kernel(slices)` and `move(sent)`, which is no more than a transfer.

  Both begin when `done`, the results of steps before, and their operands are there; and nothing
  that uses the results of either is run before both are done. So a transfer cannot wait for its
  operand, or something else for it, while the kernel runs.

  Args:
    done: a pytree.
    kernel: of slices, the one operand that differs from step to step at no cost.
    slices: its operand.
    move: None where nothing moves.
    sent: its operand, or None.
    with_barrier: whether the kernel waits until the GPU has taken up the transfer.

  Returns:
    `done`, to be used instead of what was given, and both results.
  """
  done, slices, sent = lax.optimization_barrier((done, slices, sent))
  arrived = move(sent) if move else None
  if move and with_barrier:
    slices = kernel_barrier(slices)
  return lax.optimization_barrier((done, kernel(slices), arrived))


@dataclasses.dataclass(frozen=True)
class BackwardStep:
  """A part of a stage's backward pass, and the transfer beside it.

  Attributes:
    stage: 0 is the rank's own keys.
    part: which of the stage's parts, and of how many; see `part_of_rows`.
    num_parts: see above.
    cast: the stage whose keys are fetched meanwhile, or None.
    reduce: the stage whose gradients are sent home meanwhile, or None.
  """

  stage: int
  part: int = 0
  num_parts: int = 1
  cast: int | None = None
  reduce: int | None = None


def backward_steps(overlap_degree: int, is_fetching: bool) -> Iterator[BackwardStep]:
  """The steps of a backward pass with `overlap_degree` > 0 stages of remote keys.

  Keys are fetched, or else there already.
  """
  last = overlap_degree
  if is_fetching:
    yield BackwardStep(0, 0, 2, cast=1)
  for stage in range(1, last + 1):
    beside: list[dict[str, int]] = []
    if is_fetching and stage < last:
      beside.append({"cast": stage + 1})
    if stage > 1:
      beside.append({"reduce": stage - 1})
    num_parts = max(len(beside), 1)
    for part in range(num_parts):
      yield BackwardStep(stage, part, num_parts, **(beside[part] if beside else {}))
  num_parts = 2 if is_fetching else 1
  yield BackwardStep(0, num_parts - 1, num_parts, reduce=last)


def part_of_rows(num_rows: int, part: int, num_parts: int) -> tuple[int, int]:
  """Begin and end of a part of a rank's queries."""
  multiple = _ROW_MULTIPLE if num_rows >= num_parts * _ROW_MULTIPLE else 1

  def begin(part: int) -> int:
    return num_rows * part // num_parts // multiple * multiple

  return begin(part), begin(part + 1) if part + 1 < num_parts else num_rows


def slices_of_rows(slices: Any, rows: slice) -> Any:
  """What slices `[..., 6]` show to some rows, numbered from 0."""
  begin, end = rows.start, rows.stop
  q_begin, q_end, k_begin, k_end, lo, hi = (slices[..., i] for i in range(6))
  q_begin, q_end = (jnp.clip(x, begin, end) - begin for x in (q_begin, q_end))
  hi = jnp.minimum(hi, UNBOUNDED - begin)
  return jnp.stack([q_begin, q_end, k_begin, k_end, lo + begin, hi + begin], axis=-1)
