"""Pictures of masks."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_magi._src.arguments import known_value

# The number of rows drawn per slice, more than a figure has pixels.
_MAX_ROWS = 2048


def plot_slices(slices: Any, q_len: int, k_len: int, *, ax: Any, title: str | None) -> Any:
  """Draws slices, one colour each, and returns the matplotlib axes."""
  table = known_value(slices)
  if table is None:
    raise ValueError("plot needs known slices, got traced ones")
  import matplotlib.pyplot as plt

  if ax is None:
    ax = plt.figure(figsize=(4, 4), layout="constrained").add_subplot()
  colors = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
  for i, (q_begin, q_end, k_begin, k_end, lo, hi) in enumerate(table.tolist()):
    num_rows = min(q_end - q_begin, _MAX_ROWS)
    rows = np.unique(np.linspace(q_begin, q_end - 1, max(num_rows, 0)).astype(int))
    begin, end = np.maximum(k_begin, rows + lo), np.minimum(k_end, rows + hi + 1)
    # Each row is a band of height one: the last one needs its lower edge drawn.
    edges = np.append(rows, q_end)
    begin, end = np.append(begin, begin[-1:]), np.append(end, end[-1:])
    ax.fill_betweenx(
      edges[: len(begin)], begin, end, where=end > begin, step="post", color=colors[i % 10], lw=0
    )
  ax.set(xlim=(0, max(k_len, 1)), ylim=(max(q_len, 1), 0))
  ax.set(xlabel="key", ylabel="query", title=title, aspect="equal")
  return ax
