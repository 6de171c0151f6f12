"""The order of a rank's kernels and transfers, as XLA keeps it.

A pass is a sequence of steps. In a step, transfers overlap with one kernel, and neither depends on
the other. A step begins when the previous one is done. XLA's scheduler then has no choice but to
start the transfers, launch the kernel, and wait for the transfers:

    forward, degree 2      kernel     | own keys | stage 1 | stage 2 |
                           transfer   | keys 1   | keys 2  |         |

    backward, degree 2     kernel     | own, 1st part | stage 1 | stage 2     | own, 2nd part |
                           transfer   | keys 1        | keys 2  | gradients 1 | gradients 2   |

With two hops, between nodes and inside a node, each kind of link has its own row. Keys of the
rank's own node take one hop, and are stage 1:

    forward, degree 3      kernel     | own keys | stage 1 | stage 2 | stage 3 |
                           nodes      | keys 2   | keys 3  |         |         |
                           in a node  | keys 1   | keys 2  | keys 3  |         |

Without these steps, XLA assumes that our kernels take no time: it joins all transfers and runs them
before the first kernel. XLA also keeps only one transfer in flight, or two with the recommended
options, so each transfer needs a kernel to overlap with. If there are more transfers than kernels,
kernels are divided: the one over a rank's own keys, which needs no transfer, and, in the backward
pass, those during which keys arrive and gradients leave.

The planner may choose another order. The first or the last stage can hide what the others fetch,
and later the gradients that they return:

    kernel     | own, 1st part | stage 1, 1st | stage 2 | stage 1, 2nd | own, 2nd part |
    transfer   | keys 1        | keys 2       |         | gradients 2  | gradients 1   |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_magi._src.masks.slices import UNBOUNDED
from jax_magi._src.native.overlap import kernel_barrier

# With more transfers than this, no stage is computed around the others: there would be too many
# orders to choose from.
_MOST_AROUND = 4
# Kernels are divided at multiples of a 24th of their rows: in halves, thirds, quarters or eighths.
WHOLE = 24
ALL_ROWS = (0, WHOLE)
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
  """One step: `kernel(running, slices)`, and `move(sent)` for each move, which is only a transfer.

  Kernel and transfers begin when `done`, the results of earlier steps, and their operands are
  available. Nothing that uses their results runs before all of them are done. Therefore no transfer
  waits for its operand while the kernel runs, and nothing else waits for the transfer.

  Args:
    done: a pytree of results of earlier steps.
    kernel: a function of two operands, which may differ from step to step; None for no kernel.
    running: the results of earlier kernels, whose memory the kernel may reuse. Nothing else may
      use them afterwards.
    slices: the mask.
    moves: the transfers, if any.
    sent: the operand of each transfer.
    with_barrier: whether the kernel waits until the GPU has started the transfer.

  Returns:
    `done`, which replaces the argument; the result of the kernel, or `running` without a kernel;
    and the results of the transfers.
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
  """A part of a stage's kernel, and the hops that overlap with it.

  Attributes:
    stage: the stage of the kernel. 0 is that of the rank's own keys; -1 means no kernel.
    part: the index of the part of the stage.
    rows: the begin and end of the rows of this part, in 24ths: keys in the backward pass, queries
      in the forward pass.
    casts: (stage, hop) of arriving keys.
    reduces: (stage, hop) of returning gradients.
  """

  stage: int
  part: int
  rows: tuple[int, int] = ALL_ROWS
  casts: tuple[tuple[int, int], ...] = ()
  reduces: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Order:
  """The order of the steps of a pass. It affects only the speed, not the results.

  Attributes:
    stages: the stages with a transfer, in the order of their kernels. A stage is there twice if
      other kernels run between the parts of its kernel.
    parts: the number of kernels at each of these places. Stages are divided to hide transfers.
    own: for each step before these kernels, and then for each step after them, whether a part of
      the kernel over the rank's own keys runs in it. Empty means all of them.
    cuts: for each stage, own keys first, where its rows are divided, in 24ths. If there are not as
      many cuts as the stage needs, its parts have equal numbers of rows.
  """

  stages: tuple[int, ...]
  parts: tuple[int, ...]
  own: tuple[bool, ...] = ()
  cuts: tuple[tuple[int, ...], ...] = ()


def default_order(num_hops: Sequence[int], *, is_backward: bool = False) -> Order:
  """Stages in order. A kernel during which keys arrive and gradients return is divided."""
  stages = range(1, len(num_hops) + 1)
  parts = [1] * len(num_hops)
  if is_backward:
    casts = {slot for slot, _ in _casts(num_hops, Order(tuple(stages), tuple(parts)), set())}
    reduces = {stage - 1 + hop for stage in stages for hop in range(1, num_hops[stage - 1] + 1)}
    parts = [1 + (slot in casts and slot in reduces) for slot in range(len(num_hops))]
  return Order(tuple(stages), tuple(parts))


def _stages_of_slots(order: Order) -> list[int]:
  """The stage of each kernel, from the first kernel of a stage with a transfer on."""
  return [stage for stage, n in zip(order.stages, order.parts, strict=True) for _ in range(n)]


def _casts(
  num_hops: Sequence[int], order: Order, taken: set[tuple[int, int]]
) -> list[tuple[int, tuple[int, int]]]:
  """(slot, (stage, hop)) of arriving keys, each as late as possible.

  Slots are numbered from the first kernel of a stage with a transfer. `taken` has the used slots of
  each kind of link, because each kind carries one transfer at a time.
  """
  found = []
  stages = _stages_of_slots(order)
  for stage in sorted(set(stages), key=stages.index, reverse=True):
    slot = stages.index(stage)
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
  """(slot, (stage, hop)) of returning gradients, each as early as possible."""
  found = []
  last_slots = {stage: slot for slot, stage in enumerate(_stages_of_slots(order))}
  for stage, slot in sorted(last_slots.items(), key=lambda item: item[1]):
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
    num_hops: the number of hops of each transfer, from stage 1 on.
    order: the order of steps. None means `default_order`.
    is_fetching: whether keys are fetched. False if they were kept in memory.
    is_backward: whether gradients are sent back.
  """
  order = order or default_order(num_hops, is_backward=is_backward)
  taken: set[tuple[int, int]] = set()
  casts = _casts(num_hops, order, taken) if is_fetching else []
  reduces = _reduces(num_hops, order, taken) if is_backward else []
  stages = _stages_of_slots(order)
  kernels = [(stage, stages[:slot].count(stage)) for slot, stage in enumerate(stages)]
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
    steps.append(Step(*kernel, ALL_ROWS, *beside))
  if not own:  # The kernel of this step hides no collective.
    steps.append(Step(0, 0))
  return [dataclasses.replace(step, rows=_rows_of(step, steps, order)) for step in steps]


def _rows_of(step: Step, steps: Sequence[Step], order: Order) -> tuple[int, int]:
  """The rows of a step's part, in 24ths."""
  if step.stage < 0:
    return ALL_ROWS
  num_parts = num_parts_of(steps, step.stage)
  cuts = order.cuts[step.stage] if order.cuts else ()
  if len(cuts) != num_parts - 1:
    cuts = tuple(WHOLE * part // num_parts for part in range(1, num_parts))
  bounds = (0, *cuts, WHOLE)
  return bounds[step.part], bounds[step.part + 1]


def orders_of(num_hops: Sequence[int], *, is_backward: bool) -> list[Order]:
  """Candidates for the order of steps, the default first."""
  default = default_order(num_hops, is_backward=is_backward)
  found = [default]
  if is_backward and len(num_hops) > 1:
    # Reverse order: the gradients of the first stages computed return during the later ones.
    stages, reverse = default.stages, default.stages[::-1]
    places = [reverse]
    if len(stages) <= _MOST_AROUND:
      # Around the others, the parts of one stage hide what they fetch and what they return.
      places += [(*stages, stages[0]), (*reverse, reverse[0])]
    found += [Order(order, (1,) * len(order)) for order in places]
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
  """The number of parts into which a stage is divided."""
  return sum(step.stage == stage for step in steps)


def part_of_rows(num_rows: int, part: tuple[int, int]) -> tuple[int, int]:
  """The begin and end of a part of the rows, which is given in 24ths."""
  multiple = _ROW_MULTIPLE if num_rows >= 8 * _ROW_MULTIPLE else 1

  def place(cut: int) -> int:
    return num_rows * cut // WHOLE // multiple * multiple if cut < WHOLE else num_rows

  return place(part[0]), place(part[1])


def slices_of_queries(slices: Any, begin: int, end: int) -> Any:
  """Restricts slices `[..., 6]` to some queries; those without keys stay (whole_queries.py)."""
  has_keys = slices[..., 2:3] < slices[..., 3:4]
  queries = jnp.where(has_keys, jnp.clip(slices[..., :2], begin, end), slices[..., :2])
  return jnp.concatenate([queries, slices[..., 2:]], axis=-1)


def slices_of_keys(slices: Any, begin: int, end: int) -> Any:
  """Restricts slices `[..., 6]` to some keys, which are then numbered from 0."""
  keys = jnp.clip(slices[..., 2:4], begin, end) - begin
  bands = jnp.maximum(slices[..., 4:], begin - UNBOUNDED) - begin
  return jnp.concatenate([slices[..., :2], keys, bands], axis=-1)
