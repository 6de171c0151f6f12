"""The command line: `python -m jax_magi.overlap`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jax_magi._src.overlap.flags import flags_text
from jax_magi._src.overlap.guard import faults_of
from jax_magi._src.overlap.measure import Overlap, StepOverlap, measure, total_of
from jax_magi._src.overlap.plot import save_picture
from jax_magi._src.overlap.report import schedule_json, schedule_text, trace_json, trace_text
from jax_magi._src.overlap.schedule import read_schedule
from jax_magi._src.overlap.trace import Trace, read_trace

_PICTURE = "overlap.png"


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command, and returns its exit status.

  The status is 0; 1 if less communication is hidden than `--require-hidden`, or if a program has a
  faulty exchange (`faults_of`); 2 if the input cannot be used.
  """
  parser = _parser()
  options = parser.parse_args(arguments)
  if [options.trace is None, options.hlo is None, not options.flags].count(False) != 1:
    parser.error("give one of TRACE, --hlo FILE and --flags")
  if options.flags:
    jax.config.update("jax_platforms", "cpu")  # The flags do not depend on the platform.
    print(flags_text())
    return 0
  if options.hlo and (options.png or options.step or options.no_png):
    parser.error("--png, --no-png and --step need a TRACE: a schedule has no times to draw")
  try:
    overlap, figures, faults = _of_schedule(options.hlo) if options.hlo else _of_trace(options)
    if options.json:
      Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")
  except (ValueError, OSError) as error:
    print(f"jax_magi.overlap: {error}", file=sys.stderr)
    return 2
  if options.require_hidden is not None and overlap.hidden_share < options.require_hidden:
    share = f"only {overlap.hidden_share:.4f} of communication is hidden"
    faults.append(f"{share}, and --require-hidden is {options.require_hidden}")
  for fault in faults:
    print(f"jax_magi.overlap: {fault}", file=sys.stderr)
  return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m jax_magi.overlap",
    description="Reports how much communication overlaps with attention kernels: in a profile that "
    "jax.profiler wrote (TRACE), or in the instruction order of a compiled program (--hlo).",
    epilog="Exit status: 0; 1 if less communication is hidden than --require-hidden, or if the "
    "program of --hlo has an exchange of keys, values or gradients that overlaps with no attention "
    "kernel (unless overlap_degree=0), or a ragged exchange that XLA turned into an all-gather; 2 "
    "if the input cannot be used. A message states the reason.",
  )
  parser.add_argument(
    "trace",
    metavar="TRACE",
    nargs="?",
    help="the folder given to jax.profiler.trace (its newest profile is read), or an .xplane.pb",
  )
  parser.add_argument("--hlo", metavar="FILE", help="the text of compiled.as_text()")
  parser.add_argument(
    "--flags", action="store_true", help="print the recommended XLA_FLAGS and exit"
  )
  parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
  parser.add_argument(
    "--png", metavar="FILE", help=f"write the picture to this file (default: {_PICTURE})"
  )
  parser.add_argument("--no-png", action="store_true", help="draw no picture")
  parser.add_argument(
    "--step", metavar="N", help="the number or name of the step to draw (default: the last one)"
  )
  parser.add_argument(
    "--require-hidden",
    metavar="SHARE",
    type=_share,
    help="exit with 1 if less than this share of communication is hidden: of its time in a "
    "profile, or of its bytes in a program",
  )
  return parser


def _share(text: str) -> float:
  value = float(text)
  if not 0 <= value <= 1:
    raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
  return value


def _of_schedule(path: str) -> tuple[Overlap, dict[str, Any], list[str]]:
  schedule = read_schedule(path)
  print(schedule_text(schedule))
  return schedule.overlap, schedule_json(schedule), faults_of(schedule)


def _of_trace(options: argparse.Namespace) -> tuple[Overlap, dict[str, Any], list[str]]:
  trace = read_trace(options.trace)
  steps = [measure(step) for step in trace.steps]
  drawn = _step_to_draw(trace, steps, options.step)
  print(trace_text(trace, steps))
  if not options.no_png:
    _draw(drawn, options.png)
  return total_of(step.overlap for step in steps), trace_json(trace, steps), []


def _step_to_draw(trace: Trace, steps: Sequence[StepOverlap], wanted: str | None) -> StepOverlap:
  """The wanted step, on the device whose communication was exposed the longest."""
  labels = trace.labels
  if wanted is not None:
    labels = [label for label in labels if wanted in (label, label.rpartition(" ")[2])]
    if not labels:
      raise ValueError(f"there is no step {wanted}: there are {', '.join(trace.labels)}")
  candidates = [step for step in steps if step.step.label == labels[-1]]
  return max(candidates, key=lambda step: step.overlap.exposed)


def _draw(step: StepOverlap, path: str | None) -> None:
  if importlib.util.find_spec("matplotlib") is None:
    message = "a picture needs matplotlib: pip install 'jax-magi[plot]'"
    if path is not None:
      raise ValueError(message)
    print(f"note: {message}")
    return
  save_picture(step.step, path or _PICTURE)
  print(f"picture of {step.step.label} of {step.step.device}: {path or _PICTURE}")
