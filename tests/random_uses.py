"""Random uses of the public functions, each held to the accuracy rule.

A use is a random mask and random data in a program: a shape, static options, and a way to call
attention (`WAYS`: jit, vmap, scan, ...) or a case of the fused softmax. There are few programs and
many uses of each, as masks and data are no reason to compile.

python -m tests.random_uses --count 10000 --seed 0 --implementation cpu --log uses.log

The exit status is 1 if any use fails. `--only NUMBER` repeats one.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterable

import jax
import numpy as np

from tests.accuracy import DTYPES, check_close, expected_results, make_inputs
from tests.random_ways import WAYS
from tests.softmax_cases import SoftmaxCase, check_softmax

NUM_SHAPES = 60
_WAYS_PER_SHAPE = 4
_MORE_DRAWS = 7

# Lengths on both sides of tile edges.
_LENGTHS = [1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 200]
_HEADS = [(1, 1), (2, 2), (4, 2), (3, 1), (8, 2), (6, 3), (5, 5)]
_DIMS = [64, 64, 64, 128, 128, 256, 1, 3, 8, 16, 32, 33, 40, 72, 80, 96, 100, 192]


# --- what is static ---


@dataclasses.dataclass(frozen=True)
class Shape:
  """The shape and static options of a call of attention."""

  q_len: int
  k_len: int
  num_q_heads: int
  num_kv_heads: int
  head_dim: int
  value_dim: int
  dtype: str
  num_sinks: int | None
  softcap: float
  softmax_scale: float | None
  deterministic: bool
  logit_scale: float

  @property
  def math_options(self):
    """The options that change what is computed, not how."""
    return {"softcap": self.softcap, "softmax_scale": self.softmax_scale}

  def make_inputs(self, rng: np.random.Generator):
    heads = (self.num_q_heads, self.num_kv_heads)
    dims = (self.head_dim, self.value_dim, self.num_sinks, self.logit_scale)
    return make_inputs(rng, DTYPES[self.dtype], self.q_len, self.k_len, *heads, *dims)


def _choose(rng, options):
  return options[rng.integers(len(options))]


def _random_length(rng):
  return _choose(rng, _LENGTHS) if rng.random() < 0.7 else int(rng.integers(1, 201))


def random_shape(rng: np.random.Generator, dtypes: list[str]) -> Shape:
  q_len, head_dim = _random_length(rng), _choose(rng, _DIMS)
  scales = [None, None, None, 0.5 * head_dim**-0.5, -(head_dim**-0.5), 0.0]
  heads = _choose(rng, _HEADS)
  return Shape(
    q_len=q_len,
    k_len=q_len if rng.random() < 0.4 else _random_length(rng),
    num_q_heads=heads[0],
    num_kv_heads=heads[1],
    head_dim=head_dim,
    value_dim=head_dim if rng.random() < 0.7 else _choose(rng, _DIMS),
    dtype=_choose(rng, dtypes),
    num_sinks=_choose(rng, [None, None, 0, 1, 3]),
    softcap=_choose(rng, [0.0, 0.0, 3.0, 20.0]),
    softmax_scale=_choose(rng, scales),
    deterministic=bool(rng.integers(2)),
    logit_scale=_choose(rng, [1.0, 1.0, 4.0]),
  )


def random_softmax(rng: np.random.Generator, name: str) -> SoftmaxCase:
  q_len = _random_length(rng)
  k_len = q_len if rng.random() < 0.4 else _choose(rng, [*_LENGTHS, 500, 1025])
  shape = (*(int(n) for n in rng.integers(1, 4, rng.integers(0, 3))), q_len, k_len)
  broadcast = tuple(1 if rng.random() < 0.4 else size for size in shape)
  kind = _choose(rng, ["neither", "mask", "bias"])
  return SoftmaxCase(
    name,
    shape,
    scale=_choose(rng, [1.0, 0.3, -0.4, 0.0]),
    mask=broadcast if kind == "mask" else None,
    bias=broadcast if kind == "bias" else None,
    is_causal=bool(rng.integers(2)),
    window=_choose(rng, [None, None, 5, (k_len // 3, 2), (None, 4)]),
    has_offset=bool(rng.integers(2)),
  )


# --- programs and their uses ---


@dataclasses.dataclass(frozen=True)
class Attention:
  """One program: a shape and a way, compiled when it is first used."""

  shape: Shape
  way: str
  implementation: str

  @functools.cached_property
  def _run(self):
    shape = self.shape
    options = {"deterministic": shape.deterministic, "implementation": self.implementation}
    call = functools.partial(WAYS[self.way].call, **options, **shape.math_options)

    def negated(operands, data):
      q, *rest = operands
      scale = shape.head_dim**-0.5 if shape.softmax_scale is None else shape.softmax_scale
      return call((-q, *rest), data, softmax_scale=-scale)

    return WAYS[self.way].wrap(call, negated)

  def _draw(self, rng, data, masks):
    """The results of all rows with new operands: (ours, truth, plain) of each."""
    rows = [self.shape.make_inputs(rng) for _ in masks]

    def stack(trees):
      return jax.tree.map(lambda *x: np.stack(x), *trees)

    data = data[0] if WAYS[self.way].is_mask_shared else stack(data)
    ours = self._run(stack([r.operands for r in rows]), stack([r.cotangents for r in rows]), data)
    ours = jax.device_get(ours)
    results = []
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
      truth, plain = expected_results(row, mask, **self.shape.math_options)
      results.append((jax.tree.map(lambda x, i=i: x[i], ours), truth, plain))
    return results

  def check(self, rng: np.random.Generator, number: int) -> int:
    """Raises AssertionError if a use breaks the rule. Returns how many draws of data that took."""
    del number
    way = WAYS[self.way]
    # The gradient of a shared sink is a sum over rows, so it cannot be compared row by row.
    num_rows = 1 if way.is_sink_shared and self.shape.num_sinks is not None else way.num_rows
    drawn = [way.draw_mask(rng, self.shape) for _ in range(num_rows)]
    if way.is_mask_shared:
      drawn = drawn[:1] * num_rows
    data, masks = zip(*drawn, strict=True)
    draws = [self._draw(rng, data, masks)]
    try:
      self._judge(draws)
    except AssertionError:
      # With few numbers, the plain computation may be right by chance. More draws decide.
      draws += [self._draw(rng, data, masks) for _ in range(_MORE_DRAWS)]
      self._judge(draws)
    return len(draws)

  def _judge(self, draws):
    for row in zip(*draws, strict=True):
      ours, truth, plain = (
        jax.tree.map(lambda *x: np.stack(x), *trees) for trees in zip(*row, strict=True)
      )
      for name, value in ours.items():
        check_close(name, value, truth[name], plain[name], DTYPES[self.shape.dtype])


@dataclasses.dataclass(frozen=True)
class Softmax:
  """One case of the fused softmax."""

  case: SoftmaxCase
  dtype: str
  implementation: str

  def check(self, rng: np.random.Generator, number: int) -> int:
    """Raises AssertionError if a use breaks the rule. Returns how many draws of data that took."""
    del rng
    arguments = (self.case, self.dtype, self.implementation)
    try:
      check_softmax(*arguments, first_draw=number)
      return 1
    except AssertionError:
      check_softmax(*arguments, num_draws=1 + _MORE_DRAWS, first_draw=number)
      return 1 + _MORE_DRAWS


def make_programs(seed: int, index: int, implementation: str) -> list[Attention] | list[Softmax]:
  """The programs around shape `index`. One in six is a softmax."""
  rng = np.random.default_rng([seed, index])
  if index % 6 == 5:
    case = random_softmax(rng, f"random-{seed}-{index}")
    plain = {"blockwise": "xla"}
    name = plain.get(implementation, implementation)
    return [Softmax(case, _choose(rng, list(DTYPES)), name)]
  shape = random_shape(rng, ["bf16", "f16"] if implementation == "cuda" else list(DTYPES))
  ways = rng.choice(list(WAYS), _WAYS_PER_SHAPE, replace=False)
  return [Attention(shape, str(way), implementation) for way in ways]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The outcome of one use. `error` is None if the result was right."""

  number: int
  program: str
  num_draws: int = 1
  error: str | None = None

  def __str__(self):
    if self.error:
      return f"use {self.number}: FAILED: {self.program}\n{self.error}"
    return f"use {self.number}: ok, draws: {self.num_draws}: {self.program}"


def run_uses(seed: int, index: int, numbers: Iterable[int], implementation: str) -> list[Outcome]:
  """The uses of the programs around one shape."""
  programs = make_programs(seed, index, implementation)
  outcomes = []
  for number in numbers:
    rng = np.random.default_rng([seed, index, number])
    program = _choose(rng, programs)
    try:
      outcome = Outcome(number, str(program), program.check(rng, number))
    except Exception:
      outcome = Outcome(number, str(program), error=traceback.format_exc())
    outcomes.append(outcome)
  return outcomes


def _run_task(task):
  outcomes = run_uses(*task)
  jax.clear_caches()  # The next shape shares no program with this one.
  return outcomes


def _outcomes(tasks, num_processes):
  if num_processes == 1:
    yield from map(_run_task, tasks)
    return
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # They share one GPU.
  context = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(num_processes, context) as pool:
    for future in concurrent.futures.as_completed(pool.submit(_run_task, t) for t in tasks):
      yield future.result()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--count", type=int, default=10_000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--implementation", choices=["cpu", "cuda", "blockwise"], default="cpu")
  parser.add_argument("--processes", type=int, default=1)
  parser.add_argument("--only", type=int, help="the number of one use, to repeat it")
  parser.add_argument("--log", help="a file for one line per use")
  arguments = parser.parse_args()
  numbers = range(arguments.count) if arguments.only is None else [arguments.only]
  by_shape = collections.defaultdict(list)
  for number in numbers:
    by_shape[number % NUM_SHAPES].append(number)
  tasks = [(arguments.seed, i, n, arguments.implementation) for i, n in by_shape.items()]
  start, num_done, num_redrawn, failures = time.monotonic(), 0, 0, []
  with open(arguments.log or os.devnull, "a", buffering=1) as log:
    print(f"seed {arguments.seed}, {arguments.count} uses, {arguments.implementation}", file=log)
    for outcomes in _outcomes(tasks, arguments.processes):
      num_done += len(outcomes)
      num_redrawn += sum(o.num_draws > 1 for o in outcomes)
      failures += [o for o in outcomes if o.error]
      for outcome in outcomes:
        print(outcome, file=log)
        if outcome.error:
          print(f"seed {arguments.seed}, {outcome}", flush=True)
      elapsed_s = time.monotonic() - start
      print(f"{num_done} uses, {len(failures)} failed, {elapsed_s:.0f} s", file=sys.stderr)
  print(
    f"seed {arguments.seed}: {num_done} uses on {arguments.implementation}, "
    f"{len(failures)} failed, {num_redrawn} judged by {1 + _MORE_DRAWS} draws of data, "
    f"{time.monotonic() - start:.0f} s"
  )
  sys.exit(1 if failures else 0)


if __name__ == "__main__":
  main()
