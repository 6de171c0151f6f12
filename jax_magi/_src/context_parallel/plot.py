"""Pictures of plans."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_magi._src.context_parallel.key import DistAttnKey
from jax_magi._src.context_parallel.stats import LEVEL_NAMES, pair_rows, stats_of


def plot_key(key: DistAttnKey, axes: Any = None) -> Any:
  """Draws who owns what, the work of each rank, and what moves; returns the three axes."""
  stats = stats_of(key)
  import matplotlib.pyplot as plt

  if axes is None:
    axes = plt.figure(figsize=(12, 3.2), layout="constrained").subplots(1, 3)
  owners, work, moves = axes
  spec = key.spec
  chunks = np.asarray(key.q_chunks)
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

  rows = pair_rows(key)
  image = moves.imshow(rows.T, cmap="Blues", vmin=0, vmax=spec.k_local)
  moves.figure.colorbar(image, ax=moves, label="rows")
  lines = [f"{stats.transport}: needs {stats.share:.0%} of an all-gather"]
  for level, figures in stats.levels.items():
    busiest = figures.rows_received.max()
    lines.append(f"{LEVEL_NAMES[level]}: {busiest} rows, {figures.padded_rows} padded")
  moves.set(xlabel="sender", ylabel="receiver")
  moves.set_title("\n".join(lines), fontsize=9)
  return axes
