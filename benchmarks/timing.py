"""Timing of jitted functions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def seconds(
  fun: Callable, *arguments: Any, budget: float = 0.0, min_calls: int = 1, repeats: int = 5
) -> float:
  """Median over `repeats` of the mean time of back-to-back calls of a jitted function.

  As many calls as fit in `budget` seconds are made in a row, so that a device never waits for the
  host; at least `min_calls`.
  """
  jax.block_until_ready(fun(*arguments))  # Compiles.
  start = time.perf_counter()
  jax.block_until_ready(fun(*arguments))
  count = max(min_calls, int(budget / (time.perf_counter() - start)))
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    for _ in range(count):
      result = fun(*arguments)
    jax.block_until_ready(result)
    times.append((time.perf_counter() - start) / count)
  return statistics.median(times)
