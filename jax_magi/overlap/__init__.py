"""Measures how much communication overlaps with attention: `python -m jax_magi.overlap --help`.

trace = overlap.read_trace("profile")  # The folder that jax.profiler.trace("profile") wrote to.
for step in trace.steps:
  print(step.label, step.device, overlap.measure(step).overlap.hidden_share)

schedule = overlap.schedule_of(compiled.as_text())
assert not overlap.faults_of(schedule)
"""

from jax_magi._src.overlap.command import main
from jax_magi._src.overlap.flags import recommended_flags
from jax_magi._src.overlap.guard import faults_of
from jax_magi._src.overlap.kinds import Kind
from jax_magi._src.overlap.links import LinkBytes, link_bytes
from jax_magi._src.overlap.measure import (
  CollectiveOverlap,
  Overlap,
  StepOverlap,
  Wait,
  joined_collectives,
  measure,
  total_of,
)
from jax_magi._src.overlap.plot import plot_step
from jax_magi._src.overlap.schedule import (
  Schedule,
  ScheduledCollective,
  read_schedule,
  schedule_of,
)
from jax_magi._src.overlap.trace import Kernel, Step, Trace, read_trace

__all__ = [
  "CollectiveOverlap",
  "Kernel",
  "Kind",
  "LinkBytes",
  "Overlap",
  "Schedule",
  "ScheduledCollective",
  "Step",
  "StepOverlap",
  "Trace",
  "Wait",
  "faults_of",
  "joined_collectives",
  "link_bytes",
  "main",
  "measure",
  "plot_step",
  "read_schedule",
  "read_trace",
  "recommended_flags",
  "schedule_of",
  "total_of",
]
