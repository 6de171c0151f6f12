"""How much of the communication of a profile ran beside attention, beside other work, or alone."""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Iterable

from jax_magi._src.overlap import intervals
from jax_magi._src.overlap.kinds import Kind
from jax_magi._src.overlap.trace import Kernel, Step


@dataclasses.dataclass(frozen=True)
class Overlap:
  """Communication, divided; in picoseconds of a profile, or bytes of a schedule.

  Attributes:
    attention: what ran beside attention kernels.
    other: of the rest, what ran beside other work of the device.
    exposed: of the rest: what ran alone.
  """

  attention: int = 0
  other: int = 0
  exposed: int = 0

  @property
  def communication(self) -> int:
    """All of it."""
    return self.attention + self.other + self.exposed

  @property
  def hidden_share(self) -> float:
    """What ran beside any work, of all; 1 if there is no communication."""
    return self._share(self.attention + self.other)

  @property
  def attention_share(self) -> float:
    """What ran beside attention, of all; 1 if there is no communication."""
    return self._share(self.attention)

  def _share(self, part: int) -> float:
    return part / self.communication if self.communication else 1.0

  def __add__(self, other: Overlap) -> Overlap:
    return Overlap(
      self.attention + other.attention, self.other + other.other, self.exposed + other.exposed
    )


@dataclasses.dataclass(frozen=True)
class Wait:
  """An exposed piece of communication: the device ran nothing else.

  Attributes:
    after: the last work that had ended, in words.
    before: the next that began: it waited.
    time_ps: how long the piece is.
  """

  after: str
  before: str
  time_ps: int


@dataclasses.dataclass(frozen=True)
class CollectiveOverlap:
  """One collective of the program, in one step or several.

  Attributes:
    name: its HLO instruction; where that is not a collective, the kernel's name too.
    count: how many kernels ran for it.
    overlap: its time, divided.
    waits: where it was exposed, longest first; the same place of several steps is one.
  """

  name: str
  count: int
  overlap: Overlap
  waits: tuple[Wait, ...]


@dataclasses.dataclass(frozen=True)
class StepOverlap:
  """One step of one device.

  Attributes:
    step: which one.
    overlap: communication time, divided. Collectives that ran at the same time count once.
    collectives: each on its own.
  """

  step: Step
  overlap: Overlap
  collectives: tuple[CollectiveOverlap, ...]


def measure(step: Step) -> StepOverlap:
  """Divides the communication of a step by what ran at the same time on the same device."""
  by_kind = {kind: [k for k in step.kernels if k.kind is kind] for kind in Kind}
  attention = _covered(by_kind[Kind.ATTENTION])
  other = intervals.difference(_covered(by_kind[Kind.OTHER]), attention)
  work = _Work(by_kind[Kind.ATTENTION] + by_kind[Kind.OTHER])
  communication = by_kind[Kind.COMMUNICATION]
  by_name = collections.defaultdict(list)
  for kernel in communication:
    by_name[str(kernel)].append(kernel)
  collectives = tuple(
    CollectiveOverlap(
      name, len(kernels), _divide(kernels, attention, other), work.waits_of(kernels)
    )
    for name, kernels in by_name.items()
  )
  return StepOverlap(step, _divide(communication, attention, other), collectives)


def total_of(overlaps: Iterable[Overlap]) -> Overlap:
  """Their sum."""
  return sum(overlaps, Overlap())


def joined_collectives(steps: Iterable[StepOverlap]) -> list[CollectiveOverlap]:
  """Each collective once, over all steps and devices given; the most exposed first."""
  by_name = collections.defaultdict(list)
  for step in steps:
    for collective in step.collectives:
      by_name[collective.name].append(collective)
  joined = [
    CollectiveOverlap(
      name,
      sum(part.count for part in parts),
      total_of(part.overlap for part in parts),
      _joined_waits(wait for part in parts for wait in part.waits),
    )
    for name, parts in by_name.items()
  ]
  return sorted(joined, key=lambda c: (-c.overlap.exposed, -c.overlap.communication, c.name))


def _covered(kernels: Iterable[Kernel]) -> list[intervals.Interval]:
  return intervals.union((kernel.begin_ps, kernel.end_ps) for kernel in kernels)


def _divide(
  kernels: Iterable[Kernel],
  attention: list[intervals.Interval],
  other: list[intervals.Interval],
) -> Overlap:
  """`other` has nothing of `attention`."""
  covered = _covered(kernels)
  beside_attention = intervals.length(intervals.intersection(covered, attention))
  beside_other = intervals.length(intervals.intersection(covered, other))
  exposed = intervals.length(covered) - beside_attention - beside_other
  return Overlap(beside_attention, beside_other, exposed)


class _Work:
  """All that is not communication, by when it began and by when it ended."""

  def __init__(self, kernels: Iterable[Kernel]) -> None:
    self.by_begin = sorted(kernels, key=lambda kernel: kernel.begin_ps)
    self.by_end = sorted(self.by_begin, key=lambda kernel: kernel.end_ps)
    self.covered = _covered(self.by_begin)

  def waits_of(self, communication: Iterable[Kernel]) -> tuple[Wait, ...]:
    pieces = intervals.difference(_covered(communication), self.covered)
    return _joined_waits(Wait(self._last(b), self._first(e), e - b) for b, e in pieces)

  def _last(self, time: int) -> str:
    """What had ended last."""
    index = bisect.bisect_right(self.by_end, time, key=lambda kernel: kernel.end_ps) - 1
    return str(self.by_end[index]) if index >= 0 else "the step's beginning"

  def _first(self, time: int) -> str:
    """What begins first from then on."""
    index = bisect.bisect_left(self.by_begin, time, key=lambda kernel: kernel.begin_ps)
    return str(self.by_begin[index]) if index < len(self.by_begin) else "the step's end"


def _joined_waits(waits: Iterable[Wait]) -> tuple[Wait, ...]:
  times: dict[tuple[str, str], int] = collections.defaultdict(int)
  for wait in waits:
    times[wait.after, wait.before] += wait.time_ps
  joined = [Wait(after, before, time) for (after, before), time in times.items()]
  return tuple(sorted(joined, key=lambda wait: (-wait.time_ps, wait.after, wait.before)))
