"""The order of a rank's kernels and transfers, as XLA keeps it.

A pass is a row of steps. In a step, transfers run beside one kernel, and neither needs the other; a
step begins when the one before it is done. XLA's scheduler then has no choice but to start the
transfers, launch the kernel, and wait for the transfers:

    forward, degree 2      kernel     | own keys | stage 1 | stage 2 |
                           transfer   | keys 1   | keys 2  |         |

    backward, degree 2     kernel     | own, 1st part | stage 1 | stage 2     | own, 2nd part |
                           transfer   | keys 1        | keys 2  | gradients 1 | gradients 2   |

With two hops, between nodes and inside a node, each kind of link has a row of its own. Keys of the
rank's own node, which take one hop, are stage 1:

    forward, degree 3      kernel     | own keys | stage 1 | stage 2 | stage 3 |
                           nodes      | keys 2   | keys 3  |         |         |
                           in a node  | keys 1   | keys 2  | keys 3  |         |

Left to itself, XLA takes our kernels for nothing and transfers for everything: it joins transfers,
and runs them before the first kernel. And it has one transfer in flight at a time, or two with the
options that we recommend, so that each needs a kernel to hide behind. Where there are more
transfers than kernels, kernels are cut: the one over a rank's own keys, which needs nothing, and in
the backward pass those with keys on their way in and gradients on their way out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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
  running: Any,
  slices: Any,
  moves: Sequence[Callable],
  sent: Sequence[Any],
  *,
  with_barrier: bool,
) -> tuple[Any, Any, Any]:
  """One step: `kernel(running, slices)`, and `move(sent)` for each move, which is but a transfer.

  Both begin when `done`, the results of steps before, and their operands are there; and nothing
  that uses the results of either is run before both are done. So a transfer cannot wait for its
  operand, or something else for it, while the kernel runs.

  Args:
    done: a pytree.
    kernel: of two operands that differ from step to step at no cost.
    running: results of kernels before this one, to whose memory it may write: nothing else takes
      them from here on.
    slices: the mask.
    moves: none, or a few.
    sent: the operand of each.
    with_barrier: whether the kernel waits until the GPU has taken up the transfer.

  Returns:
    `done`, to be used instead of what was given; the kernel's result; and those of the moves.
  """
  done, running, slices, sent = lax.optimization_barrier((done, running, slices, list(sent)))
  arrived = [move(x) for move, x in zip(moves, sent, strict=True)]
  if moves and with_barrier:
    slices = kernel_barrier(slices)
  return lax.optimization_barrier((done, kernel(running, slices), arrived))


@dataclasses.dataclass(frozen=True)
class Step:
  """A part of a stage's kernel, and the hops beside it.

  Attributes:
    stage: 0 is the rank's own keys; -1, in predictions alone, is no kernel.
    part: which of the stage's parts.
    casts: (stage, hop) of keys on their way in.
    reduces: (stage, hop) of gradients on their way back.
  """

  stage: int
  part: int
  casts: tuple[tuple[int, int], ...] = ()
  reduces: tuple[tuple[int, int], ...] = ()


def steps_of(
  num_hops: Sequence[int], *, is_fetching: bool = True, is_backward: bool = False
) -> list[Step]:
  """The steps of a pass.

  Args:
    num_hops: of the transfer of each stage of remote keys, from stage 1 on.
    is_fetching: whether keys are fetched, or else there already.
    is_backward: whether gradients are sent back.
  """
  last = len(num_hops)
  casts: dict[int, list[tuple[int, int]]] = {}
  reduces: dict[int, list[tuple[int, int]]] = {}
  for stage, count in enumerate(num_hops, 1):
    for hop in range(count):
      # The last hop beside the kernel before, and the others before that; backwards the same.
      if is_fetching:
        casts.setdefault(stage - (count - hop), []).append((stage, hop))
      if is_backward:
        reduces.setdefault(stage + (count - hop), []).append((stage, hop))
  first = min(casts, default=1 if is_backward else 0)
  steps: list[Step] = []
  num_own = 0
  for slot in range(first, max([last, *reduces]) + 1):
    beside = tuple(casts.get(slot, ())), tuple(reduces.get(slot, ()))
    if not 1 <= slot <= last:
      steps.append(Step(0, num_own, *beside))
      num_own += 1
    elif all(beside):
      steps += [Step(slot, 0, casts=beside[0]), Step(slot, 1, reduces=beside[1])]
    else:
      steps.append(Step(slot, 0, *beside))
  if not num_own:  # Nothing hides behind it.
    steps.append(Step(0, 0))
  return steps


def num_parts_of(steps: Sequence[Step], stage: int) -> int:
  """Into how many parts a stage is cut."""
  return sum(step.stage == stage for step in steps)


def part_of_rows(num_rows: int, part: int, num_parts: int) -> tuple[int, int]:
  """Begin and end of a part of rows."""
  multiple = _ROW_MULTIPLE if num_rows >= num_parts * _ROW_MULTIPLE else 1

  def begin(part: int) -> int:
    return num_rows * part // num_parts // multiple * multiple

  return begin(part), begin(part + 1) if part + 1 < num_parts else num_rows


def slices_of_queries(slices: Any, begin: int, end: int) -> Any:
  """What slices `[..., 6]` show to some queries."""
  queries = jnp.clip(slices[..., :2], begin, end)
  return jnp.concatenate([queries, slices[..., 2:]], axis=-1)


def slices_of_keys(slices: Any, begin: int, end: int) -> Any:
  """What slices `[..., 6]` show of some keys, numbered from 0."""
  keys = jnp.clip(slices[..., 2:4], begin, end) - begin
  bands = jnp.maximum(slices[..., 4:], begin - UNBOUNDED) - begin
  return jnp.concatenate([slices[..., :2], keys, bands], axis=-1)
