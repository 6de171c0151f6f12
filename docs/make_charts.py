"""Draws the charts of performance.md from benchmarks/results: `python docs/make_charts.py`."""

import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

IMAGES = Path(__file__).parent / "images"
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
_COLORS = {"jax_magi": "C0", "cuDNN": "C1", "XLA": "C1", "unfused": "C2"}
_MASKS = {
  "full": "full",
  "causal": "causal",
  "window": "window of 1024",
  "varlen_causal": "causal documents",
}


def _draw_attention(name: str) -> None:
  """TFLOP/s by length, a panel for each mask."""
  rows = json.loads((RESULTS / f"h200_{name}.json").read_text())[name]
  figure, axes = plt.subplots(1, 4, figsize=(10, 2.8), layout="constrained", sharey=True)
  for ax, (mask, title) in zip(axes, _MASKS.items(), strict=True):
    points = [row for row in rows if row["mask"] == mask and row["head_dim"] == 128]
    for by, label in (("ours", "jax_magi"), ("cudnn", "cuDNN")):
      line = [(row["length"] // 1024, row[by]) for row in points if row.get(by)]
      if line:
        ax.plot(*zip(*line, strict=True), marker="o", ms=4, label=label, color=_COLORS[label])
    lengths = [row["length"] // 1024 for row in points]
    ax.set(xscale="log", title=title, ylim=(0, 760), xlabel="tokens")
    ax.set_xticks(lengths, [f"{length}k" for length in lengths])
    ax.minorticks_off()
    ax.grid(alpha=0.3)
  axes[0].set_ylabel("TFLOP/s")
  axes[0].legend(loc="lower right")
  figure.savefig(IMAGES / f"performance_{name}.png", dpi=120)


def _draw_bars(ax: plt.Axes, groups: Sequence[str], bars: dict[str, list[float]]) -> None:
  """Bars side by side, with their numbers on top; NaN is none."""
  width = 0.8 / len(bars)
  for i, (label, values) in enumerate(bars.items()):
    drawn = ax.bar(
      np.arange(len(groups)) + i * width, values, width, label=label, color=_COLORS[label]
    )
    ax.bar_label(drawn, ["" if np.isnan(x) else f"{x:.3g}" for x in values], fontsize=7)
  ax.set_xticks(np.arange(len(groups)) + 0.4 - width / 2, groups)
  ax.spines[["top", "right"]].set_visible(False)


def _draw_wide_heads() -> None:
  """Both passes under a causal mask, with head dims 192 and 128, and 256."""
  figure, axes = plt.subplots(1, 4, figsize=(10, 2.8), layout="constrained", sharey=True)
  files = {"192 and 128": "h200_dims_192_128.json", "256": "h200_dims_256.json"}
  panels = [(dims, kind) for dims in files for kind in ("forward", "backward")]
  for ax, (dims, kind) in zip(axes, panels, strict=True):
    rows = json.loads((RESULTS / files[dims]).read_text())[kind]
    rows = sorted((r for r in rows if r["mask"] == "causal"), key=lambda r: r["length"])
    names = {"ours": "jax_magi", "cudnn_torch": "cuDNN"}
    bars = {label: [row[by] for row in rows] for by, label in names.items()}
    _draw_bars(ax, [f"{row['length'] // 1024}k" for row in rows], bars)
    ax.set(title=f"{kind}, {dims}", xlabel="tokens")
  axes[0].set_ylabel("TFLOP/s")
  figure.legend(*axes[1].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
  figure.savefig(RESULTS / "h200_mla.png", dpi=120)


def _draw_softmax() -> None:
  """Milliseconds of both passes."""
  rows = json.loads((RESULTS / "h200_softmax.json").read_text())["rows"]
  figure, axes = plt.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
  names = {"ours": "jax_magi", "xla": "XLA", "unfused": "unfused"}
  for ax, title in zip(axes, ("forward", "backward"), strict=True):
    shown = [r for r in rows if r["shape"] == [8, 32, 2048, 2048] and r["pass"] == title]
    cases = list(dict.fromkeys(row["case"] for row in shown))
    times = {(row["by"], row["case"]): row["ms"] for row in shown}
    bars = {
      label: [times[by, case] for case in cases]
      for by, label in names.items()
      if (by, cases[0]) in times
    }
    _draw_bars(ax, [case.replace(" mask", "\nmask").replace(" [", "\n[") for case in cases], bars)
    ax.tick_params(axis="x", labelsize=8)
    ax.set(title=title, ylabel="ms")
  figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
  figure.savefig(IMAGES / "performance_softmax.png", dpi=120)


if __name__ == "__main__":
  _draw_attention("forward")
  _draw_attention("backward")
  _draw_wide_heads()
  _draw_softmax()
