"""The small model that QK-Clip's training tests share: stacked layers, grouped heads."""

import numpy as np

from jax_magi.optim import Projection, QkProjections
from tests.arrays import normal

EMBED, HEADS, KV_HEADS, DIM, HIDDEN, LAYERS = 16, 4, 2, 8, 24, 3
LAYOUT = "layers embed -> heads dim"
PROJECTIONS = QkProjections(q=Projection("q", LAYOUT), k=Projection("k", LAYOUT))
MATRICES = {
  "v": LAYOUT,
  "o": "layers heads dim -> embed",
  "up": "layers embed -> hidden",
  "down": "layers hidden -> embed",
}


def make_params():
  return {
    "embedding": normal(32, EMBED, seed=0),
    "q": normal(LAYERS, EMBED, HEADS, DIM, seed=1),
    "k": normal(LAYERS, EMBED, KV_HEADS, DIM, seed=2),
    "v": normal(LAYERS, EMBED, KV_HEADS, DIM, seed=3),
    "o": normal(LAYERS, HEADS, DIM, EMBED, seed=4),
    "up": normal(LAYERS, EMBED, HIDDEN, seed=5),
    "down": normal(LAYERS, HIDDEN, EMBED, seed=6),
    "norm": np.ones((LAYERS, EMBED), np.float32),
  }


def make_grads(count):
  return [{k: normal(*x.shape, seed=100 * i + n) for n, (k, x) in enumerate(make_params().items())}
          for i in range(1, count + 1)]  # fmt: skip


def make_statistics(count, value=30.0):
  return np.full((count, LAYERS, HEADS), value, np.float32)


def broken_statistics(value):
  """Statistics with an invalid head 1 of layer 0, and head 3 of layer 1 above the threshold."""
  statistics = make_statistics(1)[0]
  statistics[0, 1], statistics[1, 3] = value, 400.0
  return statistics
