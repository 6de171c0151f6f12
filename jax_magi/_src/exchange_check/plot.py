"""A chart of a report."""

from __future__ import annotations

from typing import Any

from jax_magi._src.exchange_check.report import ExchangeReport

_COLORS = {"cast": "#3b6fb6", "reduce": "#4f9d5d"}
_WRONG = "#d1495b"


def plot_report(report: ExchangeReport, axes: Any = None) -> Any:
  """Draws a bar for each hop and direction, and returns the axes."""
  from matplotlib.figure import Figure

  hops = list(dict.fromkeys((rate.level, rate.name) for rate in report.rates))
  if axes is None:
    axes = Figure(figsize=(8, 1.4 + 0.5 * len(hops)), layout="constrained").subplots()
  wrong = {check.transport for check in report.checks if check.num_wrong}
  for number, (direction, color) in enumerate(_COLORS.items()):
    rates = [rate for rate in report.rates if rate.direction == direction]
    places = [hops.index((rate.level, rate.name)) + 0.4 * (number - 0.5) for rate in rates]
    edges = [_WRONG if rate.transport in wrong else color for rate in rates]
    bars = axes.barh(
      places,
      [rate.gb_per_s for rate in rates],
      0.36,
      color=color,
      edgecolor=edges,
      linewidth=2,
      label=direction,
    )
    axes.bar_label(bars, fmt="%.3g", padding=3)
  axes.set(
    xlabel="GB/s of a rank",
    yticks=range(len(hops)),
    yticklabels=[f"{name}\n{report.level_name(level)}" for level, name in hops],
    ylim=(len(hops) - 0.5, -0.5),
  )
  for tick, (_, name) in zip(axes.get_yticklabels(), hops, strict=True):
    if name.split()[0] in wrong:
      tick.set_color(_WRONG)
  axes.set_title(f"{len(report.faults) or 'no'} faults", loc="left")
  axes.legend(frameon=False)
  return axes
