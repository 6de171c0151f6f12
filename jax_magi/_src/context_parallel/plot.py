"""Pictures of plans."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_magi._src.context_parallel.capacities import KeySpec
from jax_magi._src.context_parallel.stats import LEVEL_NAMES, PlanStats


def plot_plan(spec: KeySpec, q_chunks: Any, stats: PlanStats, rows: np.ndarray, axes: Any) -> Any:
  """Draws the owners of chunks, the work of ranks and the moved rows; returns the three axes.

  `rows` are the numbers of rows that move between ranks, `[sender, receiver]`.
  """
  import matplotlib.pyplot as plt

  if axes is None:
    axes = plt.figure(figsize=(12, 3.2), layout="constrained").subplots(1, 3)
  owners, work, moves = axes
  chunks = np.asarray(q_chunks)
  ranks = np.arange(spec.cp_size)
  colors = plt.get_cmap("tab20")(ranks % 20)
  for rank in ranks:
    spans = [(chunk * spec.q_chunk_size, spec.q_chunk_size) for chunk in chunks[rank].tolist()]
    owners.broken_barh(spans, (rank - 0.4, 0.8), facecolors=colors[rank])
  owners.set(
    xlabel="token", ylabel="rank", title="owners", xlim=(0, chunks.size * spec.q_chunk_size)
  )
  owners.invert_yaxis()

  work.bar(ranks, stats.area, color=colors)
  work.axhline(stats.area.mean(), color="black", lw=1)
  work.set(xlabel="rank", ylabel="visible pairs", title=f"work: max / mean {stats.balance:.3f}")

  image = moves.imshow(rows.T, cmap="Blues", vmin=0, vmax=spec.k_local)
  moves.figure.colorbar(image, ax=moves, label="rows")
  lines = [f"{stats.transport}: needs {stats.share:.0%} of an all-gather"]
  for level, figures in stats.levels.items():
    busiest = figures.rows_received.max()
    lines.append(f"{LEVEL_NAMES[level]}: {busiest} rows, {figures.padded_rows} padded")
  moves.set(xlabel="sender", ylabel="receiver")
  moves.set_title("\n".join(lines), fontsize=9)
  return axes
