"""Tells calls that run immediately from calls that are part of a compiled program."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def is_eager(x: Any) -> bool:
  """Whether operations on `x` run immediately. They do not under jit or in a scan.

  Under grad or vmap without jit, `x` is a tracer that wraps a value: the attribute `primal` of
  derivative tracers, or `val` of vmap tracers. A tracer that wraps anything else is not eager.
  """
  while isinstance(x, jax.core.Tracer):
    x = getattr(x, "primal", getattr(x, "val", None))
  return isinstance(x, (jax.Array, np.ndarray, np.generic))
