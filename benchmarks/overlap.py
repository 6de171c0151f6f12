"""Measures the cost of overlapping communication with attention, and the settings it needs.

python -m benchmarks.overlap --json FILE [--plot FILE] [--trace FOLDER]      (on one Hopper GPU)
python -m benchmarks.overlap --from-json FILE [--plot FILE]                  (anywhere)

A kernel that stands in for communication holds some multiprocessors and copies memory, on a second
stream, while attention runs forward or backward. Both wait for the same operation, as in a step of
context parallelism. The timeline is read from a profile, by `jax_magi.overlap`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_magi
from benchmarks.stand_in import finish_stand_in, start_stand_in
from jax_magi import AttentionMask, overlap
from jax_magi._src.native.overlap import kernel_barrier

LENGTH, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 16384, 48, 8, 128
PASSES = ("forward", "backward")
MARGINS = (0, 8, 16, 32, 48)
# The numbers of SMs of the communication, and how many of them it takes at once.
COMMUNICATION = ((8, 1), (16, 1), (16, 4))
NUM_STEPS = 6
# Microseconds. Communication that is ready this long after attention finds no free SM. The delay is
# longer for the backward pass, because other kernels precede its kernel.
LATE = {"forward": 200, "backward": 1000}
COMMUNICATION_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Case:
  """One program.

  Attributes:
    direction: the pass of attention.
    sm_margin: the margin of the attention kernels.
    num_sms: the number of SMs of the communication; 0 for no communication.
    cluster_size: the number of SMs that the communication takes at once.
    with_barrier: whether attention waits for `kernel_barrier`.
    delay_us: how much later than attention the communication is ready.
  """

  direction: str
  sm_margin: int = 0
  num_sms: int = 0
  cluster_size: int = 1
  with_barrier: bool = False
  delay_us: int = 0


@dataclasses.dataclass(frozen=True)
class Result:
  """Medians over steps.

  Attributes:
    case: the program.
    attention_ms: the time from the begin of the first attention kernel to the end of the last.
    communication_ms: the time of the stand-in.
    hidden_share: the share of the stand-in's time that overlaps with attention.
    span_ms: the time from the first begin to the last end of both.
    lag_ms: the time from the begin of attention to that of the communication.
  """

  case: Case
  attention_ms: float
  communication_ms: float
  hidden_share: float
  span_ms: float
  lag_ms: float


def program(case: Case, num_rounds: int) -> Any:
  """The jitted program of a case: a function of q, k, v, dout, slices and data to communicate."""

  def attend(slices, q, k, v):
    mask = AttentionMask(slices, LENGTH, LENGTH)
    return jax_magi.attention(q, k, v, mask, sm_margin=case.sm_margin, implementation="cuda")[0]

  @jax.jit
  def run(q, k, v, dout, slices, x):
    backward = None
    if case.direction == "backward":
      _, backward = jax.vjp(functools.partial(attend, slices), q, k, v)
    # What communication and attention both wait for.
    x = x + 1
    x, dout, slices, backward = lax.optimization_barrier((x, dout, slices, backward))
    sent = x
    if case.num_sms:
      sent = start_stand_in(
        x,
        num_sms=case.num_sms,
        num_rounds=num_rounds,
        cluster_size=case.cluster_size,
        delay_us=case.delay_us,
      )
    # It is started before attention is, and waited for after it, as XLA does with collectives.
    sent, dout, slices = lax.optimization_barrier((sent, dout, slices))
    if case.with_barrier:
      dout, slices = (kernel_barrier(dout), slices) if backward else (dout, kernel_barrier(slices))
    results = backward(dout) if backward else attend(slices, q, k, v)
    sent, results = lax.optimization_barrier((sent, results))
    return finish_stand_in(x, sent) if case.num_sms else sent, results

  return run


def measure(cases: list[Case], folder: Path) -> list[Result]:
  rng = np.random.default_rng(0)

  def normal(heads):
    return jnp.asarray(rng.standard_normal((LENGTH, heads, HEAD_DIM)), jnp.bfloat16)

  operands = [normal(h) for h in (NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_Q_HEADS)]
  operands += [
    jnp.asarray(AttentionMask.causal(LENGTH).slices),
    jnp.zeros(COMMUNICATION_BYTES // 4, np.int32),
  ]
  rounds = _rounds(operands, cases, folder)
  results = []
  for number, case in enumerate(cases):
    run = program(case, rounds.get((case.direction, case.num_sms), 1))
    results.append(_result(case, _profile(run, operands, folder / f"{number}")))
    print(describe(results[-1]), flush=True)
  return results


def _rounds(operands, cases: list[Case], folder: Path) -> dict[tuple[str, int], int]:
  """The number of copies with which the stand-in takes two thirds of the time of attention."""
  rounds = {}
  for direction in sorted({case.direction for case in cases}):
    alone = Case(direction)
    run = program(alone, 1)
    attention = _result(alone, _profile(run, operands, folder / f"alone_{direction}")).attention_ms
    for num_sms in sorted({case.num_sms for case in cases} - {0}):
      case = Case(direction, sm_margin=num_sms, num_sms=num_sms)
      profile = _profile(program(case, 4), operands, folder / f"{direction}_{num_sms}")
      rounds[direction, num_sms] = max(
        1, round(4 * attention * 2 / 3 / _result(case, profile).communication_ms)
      )
  return rounds


def _profile(run, operands, folder: Path) -> list[overlap.Step]:
  jax.block_until_ready(run(*operands))
  jax.block_until_ready(run(*operands))
  options = jax.profiler.ProfileOptions()
  options.host_tracer_level = 1
  options.python_tracer_level = 0
  options.enable_hlo_proto = False
  with jax.profiler.trace(folder, profiler_options=options):
    for number in range(NUM_STEPS):
      with jax.profiler.StepTraceAnnotation("step", step_num=number):
        result = run(*operands)  # The device does not wait for the host.
    jax.block_until_ready(result)
  steps = overlap.read_trace(folder, check_kinds=False).steps
  if len(steps) != NUM_STEPS:
    raise RuntimeError(f"there are {len(steps)} steps in the profile, not {NUM_STEPS}")
  return list(steps)


def _result(case: Case, steps: list[overlap.Step]) -> Result:
  rows = []
  for step in steps:
    by_kind = {
      kind: sorted((k.begin_ps, k.end_ps) for k in step.kernels if k.kind is kind)
      for kind in overlap.Kind
    }
    # Of the backward pass's step, the forward pass is before what both wait for.
    attention = by_kind[overlap.Kind.ATTENTION]
    if case.direction == "backward":
      attention = [span for span in attention if span[0] >= attention[0][1]]
    communication = by_kind[overlap.Kind.COMMUNICATION]
    begin, end = attention[0][0], max(e for _, e in attention)
    moved = sum(e - b for b, e in communication)
    hidden = sum(max(min(e, end) - max(b, begin), 0) for b, e in communication)
    both = [*attention, *communication]
    rows.append(
      (
        (end - begin) / 1e9,
        moved / 1e9,
        hidden / moved if moved else 1.0,
        (max(e for _, e in both) - min(b for b, _ in both)) / 1e9,
        (communication[0][0] - begin) / 1e9 if communication else 0.0,
      )
    )
  return Result(case, *(statistics.median(column) for column in zip(*rows, strict=True)))


def describe(result: Result) -> str:
  case = result.case
  return (
    f"{case.direction:8} margin {case.sm_margin:2}  communication {case.num_sms:2} SMs"
    f" by {case.cluster_size}  late {case.delay_us:4} us"
    f"  barrier {'yes' if case.with_barrier else 'no ':3}"
    f"  attention {result.attention_ms:6.3f} ms  communication {result.communication_ms:6.3f} ms"
    f"  hidden {result.hidden_share:5.1%}  both {result.span_ms:6.3f} ms  lag {result.lag_ms:6.3f}"
  )


def all_cases() -> list[Case]:
  cases = []
  for direction in PASSES:
    cases += [Case(direction, margin) for margin in MARGINS]
    for shape in COMMUNICATION:
      cases += [Case(direction, margin, *shape, delay_us=LATE[direction]) for margin in MARGINS]
      cases += [Case(direction, 0, *shape), Case(direction, 0, *shape, with_barrier=True)]
  return cases


def plot(results: list[Result], path: str) -> None:
  import matplotlib.pyplot as plt

  fig, axes = plt.subplots(2, 2, figsize=(10, 7), sharex=True, layout="constrained")
  for column, direction in enumerate(PASSES):
    rows = [r for r in results if r.case.direction == direction]
    alone = {r.case.sm_margin: r for r in rows if not r.case.num_sms}
    for color, (num_sms, cluster_size) in enumerate(COMMUNICATION):
      name = f"{num_sms} SMs" + (f" in clusters of {cluster_size}" if cluster_size > 1 else "")
      own = [r for r in rows if (r.case.num_sms, r.case.cluster_size) == (num_sms, cluster_size)]
      line = sorted(
        ((r.case.sm_margin, r) for r in own if r.case.delay_us), key=lambda pair: pair[0]
      )
      margins = [margin for margin, _ in line]
      style = {"color": f"C{color}", "marker": "o", "label": name}
      axes[0, column].plot(margins, [100 * r.hidden_share for _, r in line], **style)
      axes[1, column].plot(margins, [r.span_ms for _, r in line], **style)
      for r in own:
        if not r.case.delay_us:
          marker = "*" if r.case.with_barrier else "x"
          single = {"color": f"C{color}", "marker": marker, "markersize": 11, "linestyle": ""}
          axes[0, column].plot(0, 100 * r.hidden_share, **single)
          axes[1, column].plot(0, r.span_ms, **single)
    margins = sorted(alone)
    times = [alone[margin].attention_ms for margin in margins]
    axes[1, column].plot(margins, times, "k--", label="attention alone")
    axes[0, column].set_title(direction)
    axes[1, column].set_xlabel("sm_margin")
  axes[0, 0].set_ylabel("communication hidden, %")
  axes[1, 0].set_ylabel("ms for both")
  axes[0, 0].legend()
  axes[1, 0].legend(title="ready late; x: in time; *: with barrier")
  fig.savefig(path, dpi=120)


def main(arguments: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--json")
  parser.add_argument("--from-json")
  parser.add_argument("--plot")
  parser.add_argument("--trace", help="folder in which to keep the profiles")
  parser.add_argument("--few", action="store_true", help="only margins 0 and 16, one communication")
  options = parser.parse_args(arguments)
  if options.from_json:
    rows = json.loads(Path(options.from_json).read_text())["results"]
    results = [Result(**{**row, "case": Case(**row["case"])}) for row in rows]
    print("\n".join(map(describe, results)))
  else:
    cases = all_cases()
    if options.few:
      cases = [c for c in cases if c.sm_margin in (0, 16) and c.num_sms in (0, 16)]
    with tempfile.TemporaryDirectory() as folder:
      results = measure(cases, Path(options.trace or folder))
  if options.json:
    environment = {
      name: os.environ.get(name, "") for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "XLA_FLAGS")
    }
    device = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    table = {
      **device,
      "environment": environment,
      "results": list(map(dataclasses.asdict, results)),
    }
    Path(options.json).write_text(json.dumps(table, indent=1))
  if options.plot:
    plot(results, options.plot)


if __name__ == "__main__":
  main(sys.argv[1:])
