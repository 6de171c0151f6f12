"""Query and key kernels that QK-Clip's tests share, and where they are."""

import numpy as np

from jax_magi.optim import Projection, QkProjections
from tests.arrays import normal

EMBED, DIM = 24, 8


def make_kernels(num_q_heads=4, num_kv_heads=4, layers=(), dtype=np.float32):
  return {
    "q": {"kernel": normal(*layers, EMBED, num_q_heads, DIM, seed=0, dtype=dtype)},
    "k": {"kernel": normal(*layers, EMBED, num_kv_heads, DIM, seed=1, dtype=dtype)},
  }


def make_projections(layout="embed -> heads dim", **options):
  return QkProjections(
    q=Projection("q/kernel", layout, **options), k=Projection("k/kernel", layout, **options)
  )


STACKED = make_projections("layers embed -> heads dim")
