"""Whether a call is computed at once, or is part of a program that is compiled as a whole."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def is_eager(x: Any) -> bool:
  """Whether operations on `x` are computed at once; they are not under jit or in a scan.

  Under grad or vmap alone, `x` is a tracer, too, but one that wraps a value: `primal` of the
  tracers of derivatives, `val` of those of vmap. What wraps anything else is not eager.
  """
  while isinstance(x, jax.core.Tracer):
    x = getattr(x, "primal", getattr(x, "val", None))
  return isinstance(x, (jax.Array, np.ndarray, np.generic))
