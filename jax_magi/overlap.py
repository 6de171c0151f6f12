"""How much communication runs beside attention: `python -m jax_magi.overlap --help`.

trace = overlap.read_trace("profile")  # What jax.profiler.trace("profile") wrote.
for step in trace.steps:
  print(step.label, step.device, overlap.measure(step).overlap.hidden_share)

schedule = overlap.schedule_of(compiled.as_text())
assert all(collective.attention for collective in schedule.collectives)
"""

import sys

from jax_magi._src.overlap.command import main
from jax_magi._src.overlap.flags import recommended_flags
from jax_magi._src.overlap.kinds import Kind
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
  "Overlap",
  "Schedule",
  "ScheduledCollective",
  "Step",
  "StepOverlap",
  "Trace",
  "Wait",
  "joined_collectives",
  "main",
  "measure",
  "plot_step",
  "read_schedule",
  "read_trace",
  "recommended_flags",
  "schedule_of",
  "total_of",
]

if __name__ == "__main__":
  sys.exit(main())
