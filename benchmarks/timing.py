"""Timing of jitted functions."""

from __future__ import annotations

import collections
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# How often `extra_cost` times each of two functions, twice.
NUM_TURNS = 30


def _in_a_row(fun: Callable, arguments: Sequence[Any], count: int) -> float:
  """Seconds for `count` calls back to back, until the last one's result is there."""
  start = time.perf_counter()
  for _ in range(count):
    result = fun(*arguments)
  jax.block_until_ready(result)
  return time.perf_counter() - start


def seconds(
  fun: Callable, *arguments: Any, budget: float = 0.0, min_calls: int = 1, repeats: int = 5
) -> float:
  """Median over `repeats` of the mean time of back-to-back calls of a jitted function.

  As many calls as fit in `budget` seconds are made in a row, so that a device never waits for the
  host; at least `min_calls`.
  """
  jax.block_until_ready(fun(*arguments))  # Compiles.
  count = max(min_calls, int(budget / _in_a_row(fun, arguments, 1)))
  return statistics.median(_in_a_row(fun, arguments, count) / count for _ in range(repeats))


def extra_cost(
  funs: Sequence[Callable], *arguments: Any, budget: float = 0.04
) -> tuple[float, float]:
  """By how much the second of two functions takes longer, compiled, and the standard error of that.

  They have turns of `budget` seconds, first, second, second, first, or the other way round: a clock
  that drifts evenly favours neither. All turns have as many calls, enough to hide the host's part.
  Where arrays and programs lie makes a difference of its own, up to a percent between two programs
  of one function: so both are made anew every time.
  """
  random = np.random.default_rng(0)
  spacers: collections.deque[jax.Array] = collections.deque(maxlen=4)
  count = 0
  ratios = []
  for i in range(NUM_TURNS):
    turns = (0, 1, 1, 0) if i % 2 else (1, 0, 0, 1)
    spacers.append(jnp.zeros(int(random.integers(1, 64)) << 20, jnp.int8))
    arguments = jax.tree.map(jnp.copy, arguments)
    programs = {j: jax.jit(functools.partial(funs[j])) for j in turns}
    jax.block_until_ready([program(*arguments) for program in programs.values()])
    if not count:
      slowest = max(seconds(program, *arguments, budget=budget) for program in programs.values())
      count = max(1, int(budget / slowest))
    times = [0.0, 0.0]
    for j in turns:
      times[j] += _in_a_row(programs[j], arguments, count)
    ratios.append(times[1] / times[0])
  ratio = statistics.median(ratios)
  # Of a median, from the median deviation, as a few turns are far off.
  deviation = 1.4826 * statistics.median(abs(x - ratio) for x in ratios)
  return ratio - 1, 1.2533 * deviation / NUM_TURNS**0.5
