"""The predictions of `benchmarks.context_parallel` as a table and as a plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from benchmarks.rank_plans import CP_SIZES, MASKS, NETWORKS, NODE


@dataclasses.dataclass(frozen=True)
class Cell:
  """The prediction for one mask and number of ranks. Seconds are those of both passes.

  Attributes:
    mask: the name of the mask.
    cp_size: the number of ranks.
    network: the bytes per second between nodes.
    degree: the overlap degree of the plan.
    transport: the transport of the plan.
    balance: the work of the slowest rank, divided by the mean.
    far_rows: the rows that a rank moves between nodes in one pass over keys, padding included.
    near_rows: the rows that a rank moves inside its node.
    ideal: the seconds at the rate of one GPU.
    kernels: the seconds of the kernels of the slowest rank.
    around: the seconds of packing and unpacking rows, and of anything else besides kernels and
      transfers; 0 if not measured.
    total: the predicted seconds, without `around`, like those below.
    total_bfloat16: the predicted seconds if gradients travel in 16 bit.
    total_kept: the predicted seconds if the backward pass fetches nothing.
    total_ragged: the predicted seconds with a ragged exchange: see `ragged_seconds`.
    forward: the predicted seconds of the forward pass.
    flops: the operations of the forward pass of an average rank.
  """

  mask: str
  cp_size: int
  network: float
  degree: int
  transport: str
  balance: float
  far_rows: int
  near_rows: int
  ideal: float
  kernels: float
  around: float
  total: float
  total_bfloat16: float
  total_kept: float
  total_ragged: float
  forward: float
  flops: float


def to_markdown(cells: list[Cell]) -> str:
  """The table of all cells, with a column for packing if it was measured for any of them."""
  has_packing = any(c.around for c in cells)
  lines = [
    "| mask | ranks | GB/s per NIC | transport, degree | work, max / mean | rows between nodes, in "
    "a node | ms at one GPU's rate | kernels | + exposed | efficiency | 16-bit gradients | keys "
    f"kept | {'with packing | ' if has_packing else ''}ragged |",
    "|---" * (14 if has_packing else 13) + "|",
  ]
  for c in cells:
    network = f"{c.network / 1e9:.0f}" if c.cp_size > NODE else "-"
    packed = ""
    if has_packing:
      packed = f"{c.ideal / (c.total + c.around):.0%} | " if c.around else "- | "
    lines.append(
      f"| {c.mask} | {c.cp_size} | {network} | {c.transport}, {c.degree} | {c.balance:.3f} | "
      f"{c.far_rows}, {c.near_rows} | {1e3 * c.ideal:.1f} | {1e3 * c.kernels:.1f} | "
      f"{1e3 * (c.total - c.kernels):.1f} | {c.ideal / c.total:.0%} | "
      f"{c.ideal / c.total_bfloat16:.0%} | {c.ideal / c.total_kept:.0%} | {packed}"
      f"{c.ideal / c.total_ragged:.0%} |"
    )
  return "\n".join(lines) + "\n"


def place(cell: Cell) -> tuple[int, int, float]:
  """The place of a cell in the table."""
  return list(MASKS).index(cell.mask), cell.cp_size, cell.network


def plot(cells: list[Cell], path: str) -> None:
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained", sharey=True)
  panels: tuple[tuple[str, float, Callable[[Cell], float]], ...] = (
    ("50 GB/s between nodes", NETWORKS[0], lambda c: c.ideal / c.total),
    ("100 GB/s between nodes", NETWORKS[1], lambda c: c.ideal / c.total),
    ("50 GB/s, the ragged exchange of before", NETWORKS[0], lambda c: c.ideal / c.total_ragged),
  )
  for ax, (title, network, value) in zip(axes, panels, strict=True):
    for name in MASKS:
      points = [
        (c.cp_size, value(c))
        for c in cells
        if c.mask == name and (c.network == network or c.cp_size <= NODE)
      ]
      if points:
        ax.plot(*zip(*points, strict=True), marker="o", ms=3, label=name)
    ax.set(xscale="log", title=title, xlabel="ranks", ylim=(0, 1.05))
    ax.set_xticks(CP_SIZES, [str(n) for n in CP_SIZES])
    ax.minorticks_off()
  axes[0].set_ylabel("share of one GPU's rate")
  axes[0].legend(fontsize=7)
  figure.savefig(path, dpi=150)
