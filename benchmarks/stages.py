"""Times the stages of a rank against one call over the same keys.

python -m benchmarks.stages [--degrees 1 2 4] [--masks causal window ...] [--cp-size 8] [--kernels]

It plans each mask for ranks of 8192 tokens, and takes the rank with the most work. All its stages,
forward or backward, are one program without the transfers. They accumulate in place, as in context
parallelism, or XLA merges and sums them afterwards. Forward stages also run as in plans that
compute each query in one stage. The single call has the keys of all stages in one array. Times are
medians over turns. `--kernels` also prints the kernels of each program from a profile. It needs
`XLA_FLAGS=--xla_gpu_enable_command_buffer=`, because profiles do not show the kernels of graphs.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rank_kernels import HEAD_DIM, LOCAL, NUM_KV_HEADS, NUM_Q_HEADS
from benchmarks.rank_plans import MASKS, make_key
from benchmarks.timing import seconds
from jax_magi import Links, key_for_new_mask, merge_attention
from jax_magi._src.attention import ops
from jax_magi._src.attention.dq_sum import empty_dq_sum, finished_dq
from jax_magi._src.attention.mask_operand import PassMasks
from jax_magi._src.overlap.kinds import Kind
from jax_magi._src.overlap.trace import read_trace

_CONFIG = ops.AttentionConfig(HEAD_DIM**-0.5)
_UNBOUNDED = 2**30


def rank_stages(name: str, cp_size: int, degree: int) -> tuple[list[np.ndarray], list[int]]:
  """The slices `[num_slices, 6]` and key count of each stage, for the rank with the most work."""
  key = make_key(name, cp_size, degree)
  rank = int(key.stats().area.argmax())
  tables = [np.asarray(key.slices[rank, stage]) for stage in range(key.slices.shape[1])]
  return tables, [LOCAL, *key.capacities.rows]


def whole_query_stages(
  name: str, cp_size: int, degree: int
) -> tuple[list[np.ndarray], list[int]] | None:
  """The same for forward stages that compute each query in one stage; None if there are none."""
  links = Links(merge_seconds=1.0)
  mask = MASKS[name](cp_size * LOCAL)
  key = key_for_new_mask(
    make_key(name, cp_size, degree), mask, overlap_degree=(degree,), links=links
  )
  if key.whole_slices is None:
    return None
  rank = int(key.stats().area.argmax())
  return list(key.whole_slices[rank]), [LOCAL, *key.capacities.whole_rows]


def side_by_side(tables: list[np.ndarray], lengths: list[int]) -> np.ndarray:
  """The same pairs, with the keys of all stages in one array."""
  moved = []
  for table, offset in zip(tables, np.cumsum([0, *lengths[:-1]]), strict=True):
    table = table.copy()
    is_slice = table[:, 0] < table[:, 1]
    table[is_slice, 2:4] += offset
    bands = table[:, 4:]
    bands[is_slice[:, None] & (np.abs(bands) < _UNBOUNDED)] += offset
    moved.append(table[is_slice])
  return np.concatenate(moved)


def _sink():
  return jnp.full((1, NUM_Q_HEADS), -jnp.inf, np.float32)


def _masked(stages, keeping_rows=()):
  """k, v and the mask of each stage, whose tile lists are made at once, as in a pass of a rank.

  `keeping_rows` has the numbers of stages that leave rows without keys to the other stages.
  """
  calls = {i: (table[0], k.shape[1]) for i, (k, _, table) in enumerate(stages)}
  masks = PassMasks(calls, keeping_rows)
  return [(k, v, masks.operand(i, table[0])) for i, (k, v, table) in enumerate(stages)]


def forward(q, stages):
  """16-bit out and lse of stages that accumulate. `stages` are tuples of k, v and slices."""
  running = None
  for number, stage in enumerate(_masked(stages, range(1, len(stages) - 1)), 1):
    out_dtype = np.float32 if number < len(stages) else None
    running = ops.forward(_CONFIG, q, *stage, _sink(), out_dtype=out_dtype, running=running)
  out, lse, _ = running
  return out, lse


def forward_whole(q, stages):
  """The same for stages in which each query is computed once: nothing is merged."""
  running = None
  for stage in _masked(stages, range(len(stages))):
    running = ops.forward(_CONFIG, q, *stage, _sink(), running=running)
  out, lse, _ = running
  return out, lse


def forward_merged(q, stages):
  """The same for stages that XLA merges."""
  results = [ops.forward(_CONFIG, q, *stage, _sink(), out_dtype=np.float32) for stage in stages]
  outs, lses, _ = zip(*results, strict=True)
  out, lse = merge_attention(outs, lses)
  return out.astype(q.dtype), lse


def backward(q, dout, lse, delta, stages):
  """16-bit dq, and float32 dk and dv of each stage."""
  dq, gradients = empty_dq_sum(q, q), []
  for k, v, mask in _masked(stages):
    operands = (q, k, v, dout, lse, delta, mask)
    dq, *dk_dv = ops.backward(_CONFIG, *operands, grad_dtype=np.float32, running_dq=dq)
    gradients.append(dk_dv)
  return finished_dq(_CONFIG, dq, q, q, q.dtype), gradients


def backward_summed(q, dout, lse, delta, stages):
  """The same, with the dq of each stage summed by XLA."""
  dqs, gradients = [], []
  for k, v, slices in stages:
    operands = (q, k, v, dout, lse, delta, slices)
    dq, *dk_dv = ops.backward(_CONFIG, *operands, grad_dtype=np.float32)
    # As between steps of context parallelism, nothing else is made one with the sum.
    dqs = [jax.lax.optimization_barrier(functools.reduce(jnp.add, [*dqs, dq]))]
    gradients.append(dk_dv)
  return dqs[0].astype(q.dtype), gradients


def _turns(calls: list[tuple[Callable, tuple[Any, ...]]], num_turns: int) -> list[float]:
  """The milliseconds of each call of a jitted function. Every other turn is in reverse order."""
  times: list[list[float]] = [[] for _ in calls]
  for turn in range(num_turns):
    order = list(zip(times, calls, strict=True))
    for found, (fun, arguments) in order if turn % 2 else reversed(order):
      found.append(1e3 * seconds(fun, *arguments, budget=0.03, repeats=1))
  return [statistics.median(found) for found in times]


def _kernels(fun: Callable, arguments: tuple[Any, ...]) -> list[str]:
  """A line for each kernel of a call, from the last of a few runs, and a line for all of them."""
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      for number in range(4):
        with jax.profiler.StepTraceAnnotation("run", step_num=number):
          jax.block_until_ready(fun(*arguments))
    kernels = read_trace(folder, check_kinds=False).steps[-1].kernels
  lines = []
  # The time in which some kernel runs: kernels may begin before the previous one ends.
  first, last, attention, others = kernels[0].begin_ps, kernels[0].begin_ps, 0, 0
  for kernel in kernels:
    new = max(kernel.end_ps - max(kernel.begin_ps, last), 0)
    last = max(last, kernel.end_ps)
    is_attention = kernel.kind == Kind.ATTENTION
    attention, others = attention + is_attention * new, others + (not is_attention) * new
    begin, time = kernel.begin_ps - first, kernel.end_ps - kernel.begin_ps
    lines.append(f"  {begin / 1e6:9.1f} us, for {time / 1e6:8.1f} us: {kernel}")
  idle = last - first - attention - others
  whole = f"{(last - first) / 1e6:.1f} us: attention {attention / 1e6:.1f}, other kernels"
  return [*lines, f"  {whole} {others / 1e6:.1f}, none {idle / 1e6:.1f}"]


def measure(name: str, cp_size: int, degree: int, num_turns: int, *, shows_kernels: bool) -> None:
  """Prints a line for each pass."""
  tables, lengths = rank_stages(name, cp_size, degree)
  keys = jax.random.split(jax.random.key(0), 4)

  def normal(key, length, heads):
    return jax.random.normal(key, (1, length, heads, HEAD_DIM), jnp.bfloat16)

  q, dout = (normal(key, LOCAL, NUM_Q_HEADS) for key in keys[:2])
  k, v = (normal(key, sum(lengths), NUM_KV_HEADS) for key in keys[2:])
  cuts = np.cumsum(lengths)[:-1]
  parts = zip(jnp.split(k, cuts, axis=1), jnp.split(v, cuts, axis=1), tables, strict=True)
  stages = [(part_k, part_v, jnp.asarray(table)[None]) for part_k, part_v, table in parts]
  whole = [(k, v, jnp.asarray(side_by_side(tables, lengths))[None])]

  out, lse = jax.jit(forward)(q, whole)
  ours, our_lse = jax.jit(forward)(q, stages)
  error = float(jnp.abs(out.astype(np.float32) - ours.astype(np.float32)).max())
  assert error < 0.05 and jnp.allclose(lse, our_lse, atol=1e-3), f"stages differ: {error}"
  statistics_of_rows = (lse, ops.delta(out, lse, dout, jnp.zeros_like(lse)))

  run, merged = jax.jit(forward), jax.jit(forward_merged)
  calls = [(run, (q, whole)), (run, (q, stages)), (merged, (q, stages))]
  if (found := whole_query_stages(name, cp_size, degree)) is not None:
    keys = jax.random.split(jax.random.key(1), 2 * len(found[0]))
    buffers = [normal(keys[i], length, NUM_KV_HEADS) for i, length in enumerate(2 * found[1])]
    pairs = zip(buffers[: len(found[1])], buffers[len(found[1]) :], found[0], strict=True)
    once = [(buffer_k, buffer_v, jnp.asarray(table)[None]) for buffer_k, buffer_v, table in pairs]
    calls.append((jax.jit(forward_whole), (q, once)))
  _print(name, degree, "forward", _turns(calls, num_turns))
  shown = {"one call": calls[0], "stages": calls[1]}
  if len(calls) > 3:
    shown["each query in one stage"] = calls[3]
  operands = (q, dout, *statistics_of_rows)
  run, summed = jax.jit(backward), jax.jit(backward_summed)
  calls = [(run, (*operands, whole)), (run, (*operands, stages)), (summed, (*operands, stages))]
  _print(name, degree, "backward", _turns(calls, num_turns))
  if shows_kernels:
    shown |= {"one call, backward": calls[0], "stages, backward": calls[1]}
    for label, (fun, arguments) in shown.items():
      print(
        "\n".join([f"{name}, degree {degree}, {label}:", *_kernels(fun, arguments)]), flush=True
      )


def _print(name: str, degree: int, part: str, times: list[float]) -> None:
  one, *others = times
  cells = [name, str(degree), part, f"{one:.3f}"]
  for time in others:
    cells += [f"{time:.3f}", f"{time / one:.3f}"]
  print(f"| {' | '.join(cells)} |{'' if len(others) == 3 else ' | |'}", flush=True)


def main(argv: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  names = ["causal", "varlen causal", "window", "shared question"]
  parser.add_argument("--masks", nargs="+", choices=MASKS, default=names)
  parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4])
  parser.add_argument("--cp-size", type=int, default=8)
  parser.add_argument("--turns", type=int, default=5)
  parser.add_argument("--kernels", action="store_true", help="print the kernels of each program")
  options = parser.parse_args(argv)
  print(
    "| mask | degree | pass | one call, ms | stages | ratio | merged by XLA | ratio | "
    "each query in one stage | ratio |"
  )
  print("|---|---|---|---|---|---|---|---|---|---|")
  for name in options.masks:
    for degree in options.degrees:
      measure(name, options.cp_size, degree, options.turns, shows_kernels=options.kernels)


if __name__ == "__main__":
  main(sys.argv[1:])
