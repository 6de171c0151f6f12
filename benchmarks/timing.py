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

# The number of programs that `extra_cost` makes of each of two functions, and half the number of
# times that it times each.
NUM_PROGRAMS, NUM_TURNS = 9, 45


def _in_a_row(fun: Callable, arguments: Sequence[Any], count: int) -> float:
  """The seconds of `count` back-to-back calls, until the result of the last one is ready."""
  start = time.perf_counter()
  for _ in range(count):
    result = fun(*arguments)
  jax.block_until_ready(result)
  return time.perf_counter() - start


def seconds(
  fun: Callable, *arguments: Any, budget: float = 0.0, min_calls: int = 1, repeats: int = 5
) -> float:
  """The median over `repeats` of the mean time of back-to-back calls of a jitted function.

  The number of calls in a row is as many as fit in `budget` seconds, but at least `min_calls`, so
  that the device never waits for the host.
  """
  jax.block_until_ready(fun(*arguments))  # Compiles.
  count = max(min_calls, int(budget / _in_a_row(fun, arguments, 1)))
  return statistics.median(_in_a_row(fun, arguments, count) / count for _ in range(repeats))


def extra_cost(
  funs: Sequence[Callable], *arguments: Any, budget: float = 0.04
) -> tuple[float, float]:
  """How much longer the second of two compiled functions takes, relatively, and its standard error.

  The functions take turns of `budget` seconds, in the order first, second, second, first, or the
  reverse, so that a steady drift of the clock favours neither. All turns have equally many calls,
  enough to hide the time of the host. The addresses of arrays and programs matter, too: two
  programs of one function differ by up to half a percent. Therefore each function has several
  programs, and arrays have new addresses every time.
  """
  random = np.random.default_rng(0)
  spacers: collections.deque[jax.Array] = collections.deque(maxlen=4)

  def move(arguments):
    spacers.append(jnp.zeros(int(random.integers(1, 64)) << 20, jnp.int8))
    return jax.tree.map(jnp.copy, arguments)

  # To jax.jit, every partial is a function of its own.
  pairs = [[jax.jit(functools.partial(fun)) for fun in funs] for _ in range(NUM_PROGRAMS)]
  slowest = 0.0
  for i, pair in enumerate(pairs):
    arguments = move(arguments)
    for program in pair if i % 2 else reversed(pair):  # Compiles.
      slowest = max(slowest, seconds(program, *arguments, budget=budget / 4))
  count = max(1, int(budget / slowest))
  ratios: list[list[float]] = [[] for _ in pairs]
  for i in range(NUM_TURNS):
    arguments, pair = move(arguments), pairs[i % NUM_PROGRAMS]
    jax.block_until_ready([program(*arguments) for program in pair])
    times = [0.0, 0.0]
    for j in (0, 1, 1, 0) if i % 2 else (1, 0, 0, 1):
      times[j] += _in_a_row(pair[j], arguments, count)
    ratios[i % NUM_PROGRAMS].append(times[1] / times[0])
  costs = [statistics.median(x) - 1 for x in ratios]  # A few turns are far off.
  return statistics.mean(costs), statistics.stdev(costs) / NUM_PROGRAMS**0.5
