"""Times the kernel calls of a rank, pass by pass, with masks as data."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

# The number of tokens of a rank, and the heads of the model.
LOCAL = 8192
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 48, 8, 128
# The number of times that each program is timed, if it takes less than so many seconds. A longer
# program is timed once.
NUM_TURNS, SHORT = 3, 0.05


class Kernels:
  """Times kernel calls, with masks as data. `dims` are the head dims of q and k, and of v."""

  def __init__(
    self, heads=(NUM_Q_HEADS, NUM_KV_HEADS), dims=(HEAD_DIM, HEAD_DIM), local: int = LOCAL
  ):
    import jax
    import jax.numpy as jnp

    from jax_magi._src.attention import dq_sum, ops
    from jax_magi._src.context_parallel import step_masks

    self.jax, self.jnp, self.ops, self.dq_sum = jax, jnp, ops, dq_sum
    self.masks, self.local = step_masks, local
    self.config, self.heads, self.dims = ops.AttentionConfig(dims[0] ** -0.5), heads, dims
    self._compiled: dict[Any, list[Callable]] = {}

  def alone(self, slices: np.ndarray, length: int) -> tuple[float, float]:
    """The seconds of one call over everything, forward and backward, with 16-bit results."""

    def forward(q, k, v, table):
      return self.ops.forward(self.config, q, k, v, table, self._sink())

    def backward(q, k, v, dout, lse, delta, table):
      return self.ops.backward(self.config, q, k, v, dout, lse, delta, table)

    q, dout, k, v = self.operands(length, length)
    table = self.jnp.asarray(slices[None])
    lse = self.jax.jit(forward)(q, k, v, table)[1]
    return (
      self._seconds(self.jax.jit(forward), (q, k, v, table)),
      self._seconds(self.jax.jit(backward), (q, k, v, dout, lse, lse * 0.0, table)),
    )

  def forward_pass(
    self, steps: Sequence[Any], tables: np.ndarray, lengths: Sequence[int], *, is_whole: bool
  ) -> np.ndarray:
    """The seconds of the kernels of each stage in a forward pass.

    One launch makes the tile lists of all kernels. Each kernel continues with the results of
    earlier ones. If results are merged, the last one rounds them. If queries are whole, each does.

    Args:
      steps: the steps of the pass, which divide the kernels of some stages.
      tables: int32 `[stages, num_slices, 6]`, the slices of each stage.
      lengths: the number of keys of each stage.
      is_whole: whether each query is computed in one stage.
    """
    kernels = [step for step in steps if step.stage >= 0]

    def forward(count, q, stages, tables):
      masks = self.masks.forward_masks(steps, tables, lengths, self.local, is_whole=is_whole)
      running = None
      for step in kernels[:count]:
        out_dtype = None if is_whole or step == kernels[-1] else np.float32
        mask = masks.operand(step, masks.slices[step])
        operands = (self.config, q, *stages[step.stage], mask, self._sink())
        running = self.ops.forward(*operands, out_dtype=out_dtype, running=running)
      return running

    q, _, stages = self._operands_of_pass(lengths)
    name = "forward", tuple(steps), tables.shape, tuple(lengths), is_whole
    operands = (q, stages, self.jnp.asarray(tables))
    return self._shares(name, forward, kernels, len(lengths), operands)

  def backward_pass(
    self, steps: Sequence[Any], tables: np.ndarray, lengths: Sequence[int]
  ) -> np.ndarray:
    """The same for a backward pass. The first kernel starts a sum of dq, and the last rounds it."""
    kernels = [step for step in steps if step.stage >= 0]

    def backward(count, q, dout, parts, lse, delta, tables):
      masks, _ = self.masks.backward_masks(steps, tables, lengths)
      v = parts[0][1]
      dq, gradients = self.dq_sum.empty_dq_sum(q, v), []
      for step, rows in zip(kernels[:count], parts, strict=False):
        mask = masks.operand(step, masks.slices[step])
        operands = (self.config, q, *rows, dout, lse, delta, mask)
        dq, *dk_dv = self.ops.backward(*operands, grad_dtype=np.float32, running_dq=dq)
        gradients.append(dk_dv)
      if count == len(kernels):
        dq = self.dq_sum.finished_dq(self.config, dq, q, v, q.dtype)
      return dq, gradients

    q, dout, stages = self._operands_of_pass(lengths)
    _, keys = self.masks.backward_masks(steps, tables, lengths)
    # A rank's program cuts the parts of a stage while it unpacks rows.
    parts = [[x[:, keys[step]] for x in stages[step.stage]] for step in kernels]
    lse = self.jnp.full(q.shape[:3], 9.0, np.float32)
    name = "backward", tuple(steps), tables.shape, tuple(lengths)
    operands = (q, dout, parts, lse, lse * 0.0, self.jnp.asarray(tables))
    return self._shares(name, backward, kernels, len(lengths), operands)

  def forget(self) -> None:
    """Frees operands and programs. Those of many keys take gigabytes."""
    self.operands.cache_clear()
    self._compiled.clear()

  def _shares(
    self,
    name: Any,
    run: Callable,
    kernels: Sequence[Any],
    num_stages: int,
    operands: tuple[Any, ...],
  ) -> np.ndarray:
    """The seconds of each stage, which add up to those of the whole pass.

    The share of a kernel is the difference between two programs: `run(count, *operands)` ends
    after the first `count` kernels. All of them make the tile lists of the whole pass.
    """
    if name not in self._compiled:
      with ThreadPoolExecutor() as pool:

        def compiled(count):
          program = self.jax.jit(functools.partial(run, count))
          return program.lower(*operands).compile()

        self._compiled[name] = list(pool.map(compiled, range(1, len(kernels) + 1)))
    ends = self._turns(self._compiled[name], operands)
    # Where noise makes a longer program faster, the shorter one takes its time.
    ends = np.minimum.accumulate(ends[::-1])[::-1]
    seconds = np.zeros(num_stages)
    np.add.at(seconds, [step.stage for step in kernels], np.diff(ends, prepend=0.0))
    return seconds

  def _turns(self, programs: Sequence[Callable], operands: tuple[Any, ...]) -> np.ndarray:
    """The median seconds of programs that take turns."""
    times: list[list[float]] = [[] for _ in programs]
    for _ in range(NUM_TURNS):
      for found, program in zip(times, programs, strict=True):
        if not found or found[0] < SHORT:
          found.append(self._seconds(program, operands, repeats=1))
    return np.array([statistics.median(found) for found in times])

  def _seconds(self, program: Callable, operands: tuple[Any, ...], repeats: int = 3) -> float:
    from benchmarks.timing import seconds

    return seconds(program, *operands, budget=0.02, repeats=repeats)

  def _sink(self):
    return np.full((1, self.heads[0]), -np.inf, np.float32)

  def _operands_of_pass(self, lengths: Sequence[int]) -> tuple[Any, Any, list[Any]]:
    """q, dout, and k and v of each stage."""
    q, dout, _, _ = self.operands(self.local, 0)
    return q, dout, [self.operands(0, length)[2:] for length in lengths]

  @functools.cache  # noqa: B019 (it lives as long as the program)
  def operands(self, q_len: int, k_len: int):
    """q, dout, k and v, with a batch axis of 1."""
    keys = self.jax.random.split(self.jax.random.key(0), 3)
    (q_heads, kv_heads), (dim, value_dim) = self.heads, self.dims
    shapes = [(q_len, q_heads, dim), (k_len, kv_heads, dim), (k_len, kv_heads, value_dim)]
    q, k, v = (
      self.jax.random.normal(key, (1, *shape), self.jnp.bfloat16)
      for key, shape in zip(keys, shapes, strict=True)
    )
    return q, q[..., :value_dim], k, v
