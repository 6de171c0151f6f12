"""Timing of jitted functions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def median_ms(fun: Callable, *arguments: Any, repeats: int = 5) -> float:
  """Median time of one call, in milliseconds, after a first that compiles."""
  fun = jax.jit(fun)
  jax.block_until_ready(fun(*arguments))
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(fun(*arguments))
    times.append(1e3 * (time.perf_counter() - start))
  return statistics.median(times)
