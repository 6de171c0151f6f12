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

# If there are enough rows, they are divided at multiples of this, so that no kernel tile is cut.
_ROW_MULTIPLE = 128


def side_by_side(
  done: Any,
  kernel: Callable[[Any, Any], Any] | None,
  running: Any,
  slices: Any,
  moves: Sequence[Callable[[Any], Any]],
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
    kernel: of two operands that differ from step to step at no cost; None is none.
    running: results of kernels before this one, to whose memory it may write: nothing else takes
      them from here on.
    slices: the mask.
    moves: none, or a few.
    sent: the operand of each.
    with_barrier: whether the kernel waits until the GPU has taken up the transfer.

  Returns:
    `done`, to be used instead of what was given; the kernel's result, or `running` without a
    kernel; and the results of the moves.
  """
  done, running, slices, sent = lax.optimization_barrier((done, running, slices, list(sent)))
  arrived = [move(x) for move, x in zip(moves, sent, strict=True)]
  if kernel is None:
    return lax.optimization_barrier((done, running, arrived))
  if moves and with_barrier:
    slices = kernel_barrier(slices)
  return lax.optimization_barrier((done, kernel(running, slices), arrived))


@dataclasses.dataclass(frozen=True)
class Step:
  """A part of a stage's kernel, and the hops beside it.

  Attributes:
    stage: 0 is the rank's own keys; -1 is no kernel.
    part: which of the stage's parts.
    casts: (stage, hop) of keys on their way in.
    reduces: (stage, hop) of gradients on their way back.
  """

  stage: int
  part: int
  casts: tuple[tuple[int, int], ...] = ()
  reduces: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Order:
  """What may be chosen about the steps of a pass. Whatever is chosen, the results are the same.

  Attributes:
    stages: the stages with a transfer, in the order of their kernels.
    parts: into how many parts each of these kernels is cut, for transfers to hide behind.
    own: for each step before these kernels, and then for each one after them, whether a part of
      the kernel over the rank's own keys runs in it. Empty is all of them.
  """

  stages: tuple[int, ...]
  parts: tuple[int, ...]
  own: tuple[bool, ...] = ()


def default_order(num_hops: Sequence[int], *, is_backward: bool = False) -> Order:
  """Stages in order. A kernel that has keys coming and gradients returning beside it is cut."""
  stages = range(1, len(num_hops) + 1)
  parts = [1] * len(num_hops)
  if is_backward:
    casts = {slot for slot, _ in _casts(num_hops, Order(tuple(stages), tuple(parts)), set())}
    reduces = {stage - 1 + hop for stage in stages for hop in range(1, num_hops[stage - 1] + 1)}
    parts = [1 + (slot in casts and slot in reduces) for slot in range(len(num_hops))]
  return Order(tuple(stages), tuple(parts))


def _casts(
  num_hops: Sequence[int], order: Order, taken: set[tuple[int, int]]
) -> list[tuple[int, tuple[int, int]]]:
  """(slot, (stage, hop)) of keys on their way in: each as late as possible.

  Slots are numbered from the first kernel of a stage with a transfer. `taken` are slots and kinds
  of links: of each kind, there is one transfer at a time.
  """
  found = []
  begin = sum(order.parts)
  for stage, parts in zip(reversed(order.stages), reversed(order.parts), strict=True):
    begin -= parts
    slot = begin
    for hop in reversed(range(num_hops[stage - 1])):
      slot -= 1
      while (slot, hop - num_hops[stage - 1]) in taken:
        slot -= 1
      taken.add((slot, hop - num_hops[stage - 1]))
      found.append((slot, (stage, hop)))
  return found[::-1]


def _reduces(
  num_hops: Sequence[int], order: Order, taken: set[tuple[int, int]]
) -> list[tuple[int, tuple[int, int]]]:
  """The same of gradients on their way back: each as early as possible."""
  found = []
  end = 0
  for stage, parts in zip(order.stages, order.parts, strict=True):
    end += parts
    slot = end - 1
    for hop in reversed(range(num_hops[stage - 1])):
      slot += 1
      while (slot, hop - num_hops[stage - 1]) in taken:
        slot += 1
      taken.add((slot, hop - num_hops[stage - 1]))
      found.append((slot, (stage, hop)))
  return found


def steps_of(
  num_hops: Sequence[int],
  order: Order | None = None,
  *,
  is_fetching: bool = True,
  is_backward: bool = False,
) -> list[Step]:
  """The steps of a pass.

  Args:
    num_hops: of the transfer of each stage of remote keys, from stage 1 on.
    order: None is `default_order`.
    is_fetching: whether keys are fetched, or else there already.
    is_backward: whether gradients are sent back.
  """
  order = order or default_order(num_hops, is_backward=is_backward)
  taken: set[tuple[int, int]] = set()
  casts = _casts(num_hops, order, taken) if is_fetching else []
  reduces = _reduces(num_hops, order, taken) if is_backward else []
  kernels = [(s, part) for s, n in zip(order.stages, order.parts, strict=True) for part in range(n)]
  slots = [slot for slot, _ in casts + reduces]
  before = range(min([0, *slots]), 0)
  after = range(len(kernels), max([len(kernels) - 1, *slots]) + 1)
  outside = [*before, *after]
  has_own = order.own if len(order.own) == len(outside) else (True,) * len(outside)
  own = [slot for slot, has in zip(outside, has_own, strict=True) if has]
  steps = []
  for slot in (*before, *range(len(kernels)), *after):
    kernel = (-1, 0)
    if slot in own:
      kernel = 0, own.index(slot)
    elif 0 <= slot < len(kernels):
      kernel = kernels[slot]
    beside = (tuple(move for at, move in moves if at == slot) for moves in (casts, reduces))
    steps.append(Step(*kernel, *beside))
  if not own:  # The kernel of this step hides no collective.
    steps.append(Step(0, 0))
  return steps


def orders_of(num_hops: Sequence[int], *, is_backward: bool) -> list[Order]:
  """Orders to choose from, the default first."""
  default = default_order(num_hops, is_backward=is_backward)
  found = [default]
  if is_backward and len(num_hops) > 1:
    # Reverse order: the gradients of the first stages computed return during the later ones.
    found.append(Order(default.stages[::-1], (1,) * len(num_hops)))
  for order in tuple(found):
    for i, parts in enumerate(order.parts):
      more = (*order.parts[:i], parts + 1, *order.parts[i + 1 :])
      found.append(dataclasses.replace(order, parts=more))
  for order in tuple(found):
    steps = steps_of(num_hops, order, is_backward=is_backward)
    count = sum(step.stage == 0 for step in steps)
    if count > 1:
      found += [
        dataclasses.replace(order, own=tuple(i == own for i in range(count)))
        for own in range(count)
      ]
  return list(dict.fromkeys(found))


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
