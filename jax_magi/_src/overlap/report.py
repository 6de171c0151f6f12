"""Formats the figures as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax_magi._src.overlap.guard import faults_of
from jax_magi._src.overlap.measure import (
  CollectiveOverlap,
  Overlap,
  StepOverlap,
  joined_collectives,
  total_of,
)
from jax_magi._src.overlap.schedule import Schedule, ScheduledCollective
from jax_magi._src.overlap.trace import Trace

_MAX_ROWS = 20  # Rows of each table in the text. The JSON has all.
_MAX_WAITS = 2  # Waits of each collective in the text.
_PS_PER_MS = 10**9
_COLUMNS = ("total", "attention", "other", "exposed", "hidden")


def trace_text(trace: Trace, steps: Sequence[StepOverlap]) -> str:
  """The report of a profile. `steps` are the measured steps."""
  return "\n".join(_trace_lines(trace, steps))


def _trace_lines(trace: Trace, steps: Sequence[StepOverlap]) -> Iterator[str]:
  num_devices = len(trace.devices)
  devices = trace.devices[0] + (f" .. {trace.devices[-1]}" if num_devices > 1 else "")
  yield f"profile: {trace.paths[-1]}"
  yield f"devices: {num_devices} ({devices}); steps: {len(trace.labels)}, by {trace.step_source}"
  yield ""
  rows = [
    _row(label, total_of(s.overlap for s in steps if s.step.label == label), num_devices)
    for label in trace.labels
  ]
  total = total_of(step.overlap for step in steps)
  last_row = _row("all", total, num_devices) if len(rows) > 1 else None
  mean = f", mean of {num_devices} devices" if num_devices > 1 else ""
  yield from _table([f"communication, ms{mean}", *_COLUMNS], rows, "steps", last_row)
  if num_devices > 1:
    rows = [
      _row(device, total_of(s.overlap for s in steps if s.step.device == device))
      for device in trace.devices
    ]
    yield ""
    yield from _table(["all steps, ms", *_COLUMNS], rows, "devices")
  yield ""
  collectives = joined_collectives(steps)
  header = ["all steps and devices, ms", "count", *_COLUMNS]
  rows = [[c.name, str(c.count), *_row("", c.overlap)[1:]] for c in collectives]
  below = [_wait_lines(collective) for collective in collectives]
  yield from _table(header, rows, "collectives", below=below)
  yield ""
  ran = f"{_percent(total.attention_share)} of communication overlapped attention"
  yield f"{ran}, {_percent(total.hidden_share)} overlapped any work"
  for note in trace.notes:
    yield f"note: {note}"


def _row(name: str, overlap: Overlap, divisor: int = 1) -> list[str]:
  """A row of the table. Times are divided by `divisor`, to get a mean over devices."""
  parts = (overlap.communication, overlap.attention, overlap.other, overlap.exposed)
  times = [f"{part / divisor / _PS_PER_MS:.3f}" for part in parts]
  return [name, *times, _percent(overlap.hidden_share)]


def _wait_lines(collective: CollectiveOverlap) -> list[str]:
  lines = [
    f"  {wait.time_ps / _PS_PER_MS:.3f} exposed after {wait.after}, before {wait.before}"
    for wait in collective.waits[:_MAX_WAITS]
  ]
  missing = len(collective.waits) - _MAX_WAITS
  return [*lines, f"  and in {missing} more places"] if missing > 0 else lines


def schedule_text(schedule: Schedule) -> str:
  """The report of a compiled program."""
  return "\n".join(_schedule_lines(schedule))


def _schedule_lines(schedule: Schedule) -> Iterator[str]:
  collectives = schedule.collectives
  counts = f"{len(collectives)} collectives, {schedule.num_attention} attention calls"
  yield f"program: {schedule.module}, {counts}"
  for computation in dict.fromkeys(c.computation for c in collectives):
    inside = [c for c in collectives if c.computation == computation]
    times = f" (runs {inside[0].times} times)" if inside[0].times > 1 else ""
    rows = [
      [
        c.name,
        c.exchange or "",
        _size(c.num_bytes),
        "async" if c.is_async else "sync",
        _beside(c),
      ]
      for c in inside
    ]
    below = [_exposed_lines(collective) for collective in inside]
    yield ""
    header = [f"{computation}{times}", "exchange", "size", "form", "overlaps"]
    yield from _table(header, rows, "collectives", below=below)
  total = schedule.overlap
  may_run = f"{_percent(total.attention_share)} may overlap attention"
  heavy = f"{_percent(total.hidden_share)} may overlap attention or matmuls"
  yield ""
  yield f"of {_size(total.communication)}, {may_run}, {heavy}"


def _beside(collective: ScheduledCollective) -> str:
  heavy = [*collective.attention, *collective.matmuls]
  if heavy:
    return _few(heavy)
  if collective.num_others == 1:
    return "1 small instruction"
  return f"{collective.num_others} small instructions" if collective.num_others else "nothing"


def _exposed_lines(collective: ScheduledCollective) -> list[str]:
  if not collective.overlap.exposed:
    return []
  lines = [f"  exposed after {collective.after}, before {collective.before}"]
  if collective.independent_attention:
    lines.append(f"  could overlap {_few(collective.independent_attention)}")
  return lines


def _few(names: Sequence[str]) -> str:
  more = f" and {len(names) - 2} more" if len(names) > 2 else ""
  return ", ".join(names[:2]) + more


def _table(
  header: list[str],
  rows: Sequence[list[str]],
  what: str,
  last_row: list[str] | None = None,
  below: Sequence[list[str]] | None = None,
) -> Iterator[str]:
  """The lines of a table, with numbers aligned right and words aligned left.

  Args:
    header: the names of the columns.
    rows: the rows, of which the first `_MAX_ROWS` are shown.
    what: a plural noun for the rows.
    last_row: a row that is always shown.
    below: additional lines below each row.
  """
  shown = list(rows[:_MAX_ROWS])
  last_rows = [last_row] if last_row else []
  widths = _widths([header, *shown, *last_rows])
  is_last_words = header[-1] == "overlaps"

  def line(row: list[str]) -> str:
    cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
    return "  ".join([*cells[:-1], row[-1]] if is_last_words else cells)

  yield line(header)
  for index, row in enumerate(shown):
    yield line(row)
    if below is not None:
      yield from below[index]
  if len(rows) > _MAX_ROWS:
    yield f"and {len(rows) - _MAX_ROWS} more {what}: --json has all"
  yield from map(line, last_rows)


def _widths(rows: Iterable[list[str]]) -> list[int]:
  return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _size(num_bytes: int) -> str:
  for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
    if num_bytes >= size:
      return f"{num_bytes / size:.1f} {unit}"
  return f"{num_bytes} B"


def _percent(share: float) -> str:
  # Round down, so that less than all is never "100%".
  return f"{int(share * 1000) / 10:.1f}%"


def trace_json(trace: Trace, steps: Sequence[StepOverlap]) -> dict[str, Any]:
  """All figures of a profile, for other programs to read."""
  return {
    "paths": [str(path) for path in trace.paths],
    "step_source": trace.step_source,
    "notes": list(trace.notes),
    "total": _times(total_of(step.overlap for step in steps)),
    "steps": [
      {
        "step": step.step.label,
        "device": step.step.device,
        **_times(step.overlap),
        "collectives": [_collective_json(collective) for collective in step.collectives],
      }
      for step in steps
    ],
    "collectives": [_collective_json(collective) for collective in joined_collectives(steps)],
  }


def _collective_json(collective: CollectiveOverlap) -> dict[str, Any]:
  waits = [
    {"after": wait.after, "before": wait.before, "time_ms": wait.time_ps / _PS_PER_MS}
    for wait in collective.waits
  ]
  times = _times(collective.overlap)
  return {"name": collective.name, "count": collective.count, **times, "waits": waits}


def _times(overlap: Overlap) -> dict[str, float]:
  return _figures(overlap, "ms", _PS_PER_MS)


def schedule_json(schedule: Schedule) -> dict[str, Any]:
  """All figures of a compiled program, for other programs to read."""
  return {
    "module": schedule.module,
    "num_attention": schedule.num_attention,
    "total": _figures(schedule.overlap, "bytes", 1),
    "faults": faults_of(schedule),
    "collectives": [
      {**dataclasses.asdict(collective), "is_exposed": bool(collective.overlap.exposed)}
      for collective in schedule.collectives
    ],
  }


def _figures(overlap: Overlap, unit: str, divisor: int) -> dict[str, float]:
  parts = ("communication", "attention", "other", "exposed")
  amounts = {f"{part}_{unit}": getattr(overlap, part) / divisor for part in parts}
  shares = ("hidden_share", "attention_share")
  return {**amounts, **{share: getattr(overlap, share) for share in shares}}
