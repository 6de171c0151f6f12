"""Whether a call is part of a program that is traced as a whole."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def is_staged(x: Any) -> bool:
  """Whether `x` stands for a value that is not known yet, as under jit or in a scan.

  Under grad or vmap alone it is a tracer, too, but one that wraps a value: `primal` of the tracers
  of derivatives, `val` of those of vmap. Whatever wraps anything else counts as staged.
  """
  while isinstance(x, jax.core.Tracer):
    x = getattr(x, "primal", getattr(x, "val", None))
  return not isinstance(x, (jax.Array, np.ndarray, np.generic))
