"""How much communication of a profile overlapped attention, overlapped other work, or ran alone."""

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
  """Communication, divided by what it overlapped with.

  The unit is picoseconds for a profile, and bytes for a schedule.

  Attributes:
    attention: the part that overlapped attention kernels.
    other: the part of the remainder that overlapped other work of the device.
    exposed: the rest, which overlapped nothing.
  """

  attention: int = 0
  other: int = 0
  exposed: int = 0

  @property
  def communication(self) -> int:
    """All communication: the sum of the three parts."""
    return self.attention + self.other + self.exposed

  @property
  def hidden_share(self) -> float:
    """The share that overlapped any work; 1 if there is no communication."""
    return self._share(self.attention + self.other)

  @property
  def attention_share(self) -> float:
    """The share that overlapped attention; 1 if there is no communication."""
    return self._share(self.attention)

  def _share(self, part: int) -> float:
    return part / self.communication if self.communication else 1.0

  def __add__(self, other: Overlap) -> Overlap:
    return Overlap(
      self.attention + other.attention, self.other + other.other, self.exposed + other.exposed
    )


@dataclasses.dataclass(frozen=True)
class Wait:
  """A period in which the device ran nothing but communication.

  Attributes:
    after: the last work that ended before it, in words.
    before: the next work that began after it.
    time_ps: the length of the period in picoseconds.
  """

  after: str
  before: str
  time_ps: int


@dataclasses.dataclass(frozen=True)
class CollectiveOverlap:
  """One collective of the program, in one or several steps.

  Attributes:
    name: the HLO instruction; if that is not a collective, the name of the kernel, too.
    count: the number of kernels that ran for it.
    overlap: the time of the collective, divided.
    waits: the periods in which it was exposed, longest first. Periods at the same place of several
      steps are added up.
  """

  name: str
  count: int
  overlap: Overlap
  waits: tuple[Wait, ...]


@dataclasses.dataclass(frozen=True)
class StepOverlap:
  """The communication of one step on one device.

  Attributes:
    step: the step.
    overlap: the communication time, divided. Collectives that ran at the same time count once.
    collectives: the overlap of each collective on its own.
  """

  step: Step
  overlap: Overlap
  collectives: tuple[CollectiveOverlap, ...]


def measure(step: Step) -> StepOverlap:
  """Divides the communication time of a step by what ran at the same time on the same device."""
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
  """The sum of overlaps."""
  return sum(overlaps, Overlap())


def joined_collectives(steps: Iterable[StepOverlap]) -> list[CollectiveOverlap]:
  """Adds up each collective over all given steps and devices; the most exposed comes first."""
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
  """Divides the time of `kernels`. `attention` and `other` must be disjoint."""
  covered = _covered(kernels)
  beside_attention = intervals.length(intervals.intersection(covered, attention))
  beside_other = intervals.length(intervals.intersection(covered, other))
  exposed = intervals.length(covered) - beside_attention - beside_other
  return Overlap(beside_attention, beside_other, exposed)


class _Work:
  """All kernels that are not communication, sorted by begin and by end."""

  def __init__(self, kernels: Iterable[Kernel]) -> None:
    self.by_begin = sorted(kernels, key=lambda kernel: kernel.begin_ps)
    self.by_end = sorted(self.by_begin, key=lambda kernel: kernel.end_ps)
    self.covered = _covered(self.by_begin)

  def waits_of(self, communication: Iterable[Kernel]) -> tuple[Wait, ...]:
    pieces = intervals.difference(_covered(communication), self.covered)
    return _joined_waits(Wait(self._last(b), self._first(e), e - b) for b, e in pieces)

  def _last(self, time: int) -> str:
    """The work that ended last before a time."""
    index = bisect.bisect_right(self.by_end, time, key=lambda kernel: kernel.end_ps) - 1
    return str(self.by_end[index]) if index >= 0 else "the step's beginning"

  def _first(self, time: int) -> str:
    """The work that begins first at or after a time."""
    index = bisect.bisect_left(self.by_begin, time, key=lambda kernel: kernel.begin_ps)
    return str(self.by_begin[index]) if index < len(self.by_begin) else "the step's end"


def _joined_waits(waits: Iterable[Wait]) -> tuple[Wait, ...]:
  times: dict[tuple[str, str], int] = collections.defaultdict(int)
  for wait in waits:
    times[wait.after, wait.before] += wait.time_ps
  joined = [Wait(after, before, time) for (after, before), time in times.items()]
  return tuple(sorted(joined, key=lambda wait: (-wait.time_ps, wait.after, wait.before)))
