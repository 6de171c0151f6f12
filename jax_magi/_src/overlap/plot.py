"""Draws the timeline of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax_magi._src.overlap import intervals
from jax_magi._src.overlap.kinds import Kind
from jax_magi._src.overlap.trace import Kernel, Step

_PS_PER_MS = 10**9
_COLORS = {
  "attention": "#3b6fb6",
  "other work": "#b9c2cc",
  "communication, hidden": "#4f9d5d",
  "communication, exposed": "#d1495b",
}


def plot_step(step: Step, axes: Any = None) -> Any:
  """Draws one step of one device with a lane for each stream, and returns the matplotlib axes.

  Needs matplotlib (`pip install jax-magi[plot]`).
  """
  from matplotlib.figure import Figure
  from matplotlib.patches import Patch

  lanes = _lanes(step)
  if axes is None:
    height = 1.2 + 0.45 * len(lanes)
    axes = Figure(figsize=(12, height), layout="constrained").subplots()
  begin = step.kernels[0].begin_ps
  end = max(kernel.end_ps for kernel in step.kernels)
  work = intervals.union((k.begin_ps, k.end_ps) for k in step.kernels if not _communicates(k))
  for row, lane in enumerate(lanes):
    for label, spans in _bars([k for k in step.kernels if k.lane == lane], work).items():
      bars = [((b - begin) / _PS_PER_MS, (e - b) / _PS_PER_MS) for b, e in spans]
      axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=_COLORS[label], label=label)
    _write_names(axes, row, [k for k in step.kernels if k.lane == lane], begin, end)
  axes.set(
    xlabel="ms",
    xlim=(0, (end - begin) / _PS_PER_MS),
    ylim=(len(lanes) - 0.5, -0.5),
    yticks=range(len(lanes)),
    yticklabels=[lane if len(lane) <= 30 else f"{lane[:27]}..." for lane in lanes],
  )
  axes.set_title(f"{step.label}, {step.device}", loc="left")
  legend = [Patch(color=color, label=label) for label, color in _COLORS.items()]
  axes.legend(handles=legend, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False)
  for side in ("top", "right", "left"):
    axes.spines[side].set_visible(False)
  axes.tick_params(axis="y", length=0)
  return axes


def save_picture(step: Step, path: str | Path) -> None:
  """Draws one step of one device to a file. The extension of its name selects the format."""
  plot_step(step).figure.savefig(path, dpi=150)


def _communicates(kernel: Kernel) -> bool:
  return kernel.kind is Kind.COMMUNICATION


def _lanes(step: Step) -> list[str]:
  """The lanes with work, then those with only communication, each in order of first use."""
  lanes = dict.fromkeys(kernel.lane for kernel in step.kernels if not _communicates(kernel))
  return list(lanes | dict.fromkeys(kernel.lane for kernel in step.kernels))


def _bars(
  kernels: list[Kernel], work: list[intervals.Interval]
) -> dict[str, list[intervals.Interval]]:
  """The intervals of a lane by label. `work` is the time in which non-communication kernels ran."""

  def spans(kind: Kind) -> list[intervals.Interval]:
    return [(k.begin_ps, k.end_ps) for k in kernels if k.kind is kind]

  communication = intervals.union(spans(Kind.COMMUNICATION))
  return {
    "other work": spans(Kind.OTHER),
    "attention": spans(Kind.ATTENTION),
    "communication, hidden": intervals.intersection(communication, work),
    "communication, exposed": intervals.difference(communication, work),
  }


def _write_names(axes: Any, row: int, kernels: list[Kernel], begin: int, end: int) -> None:
  """Writes the names of kernels into bars that are long enough."""
  for kernel in kernels:
    name = str(kernel) if _communicates(kernel) else kernel.name
    share = (kernel.end_ps - kernel.begin_ps) / (end - begin)
    # About 150 letters fit across the picture.
    if kernel.kind is not Kind.OTHER and share * 150 > len(name):
      middle = ((kernel.begin_ps + kernel.end_ps) / 2 - begin) / _PS_PER_MS
      axes.text(middle, row, name, ha="center", va="center", fontsize=8, color="white")
