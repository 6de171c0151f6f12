"""Times the planner on the host: python -m benchmarks.planner [--nodes 8] [--keys].

Prints a table. By default it plans which rank gets which chunk; with `--keys`, whole keys.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc

import numpy as np

import jax_magi
from benchmarks.rank_plans import documents, shared_questions
from jax_magi import AttentionMask
from jax_magi._src.context_parallel.assignment_cost import CostModel, Units
from jax_magi._src.context_parallel.chunks import num_chunks
from jax_magi._src.context_parallel.dispatch_choice import assign_by_area
from jax_magi._src.context_parallel.links import Links
from jax_magi._src.context_parallel.local_slices import key_ranges
from jax_magi._src.context_parallel.pieces import cut_by_chunks
from jax_magi._src.masks.slices import area_of

MILLION = 1 << 20


def _documents(total: int, scale: float = 1.0) -> AttentionMask:
  """Causal documents. A smaller scale makes more of them."""
  ends = np.array(documents(int(total / scale)))
  ends = np.minimum((ends * scale).astype(np.int64), total)
  return AttentionMask.from_cu_seqlens(np.append(ends[:-1], total), causal=True)


# A mask, the number of ranks, and the size of chunks.
CASES = {
  "causal": (lambda: AttentionMask.causal(MILLION), 128, 256),
  "causal, 2M": (lambda: AttentionMask.causal(2 * MILLION), 256, 256),
  "causal, 2M, 4096 a rank": (lambda: AttentionMask.causal(2 * MILLION), 512, 128),
  "causal, small chunks": (lambda: AttentionMask.causal(MILLION), 8, 64),
  "documents, small chunks": (lambda: _documents(MILLION), 8, 64),
  "documents": (lambda: _documents(MILLION // 2), 64, 256),
  "many documents": (lambda: _documents(MILLION, 0.1), 64, 512),
  "many documents, 4M": (lambda: _documents(4 * MILLION, 0.3), 512, 256),
  "window": (lambda: AttentionMask.sliding_window(4 * MILLION, left=4095), 512, 256),
  "shared questions": (lambda: shared_questions(4 * MILLION), 512, 256),
  "block causal": (lambda: AttentionMask.block_causal(4096, 2 * MILLION), 512, 128),
}


def measure(name: str, width: int | None, whole_keys: bool) -> str:
  """One line of the table."""
  make, cp_size, chunk_size = CASES[name]
  mask = make()
  if width is not None and cp_size <= width:
    width = None

  def plan():
    pieces = cut_by_chunks(mask.slices, chunk_size)
    return assign_by_area(pieces, mask.q_len, chunk_size, cp_size, None, Links(), width)[0]

  def key():
    return jax_magi.magi_attn_flex_key(mask, cp_size=cp_size, chunk_size=chunk_size)

  work = key if whole_keys else plan
  begin = time.perf_counter()
  work()
  seconds = time.perf_counter() - begin
  tracemalloc.start()
  work()
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()

  pieces = cut_by_chunks(mask.slices, chunk_size)
  area = np.bincount(
    pieces.chunk, area_of(pieces.slices), num_chunks(mask.q_len, chunk_size, cp_size)
  )
  units = Units.of_chunks(area, chunk_size, pieces.chunk, *key_ranges(pieces.slices))
  links = Links()
  costs = CostModel(units, cp_size, width or cp_size, links.near_row, links.far_row).costs(plan())
  far = np.maximum(costs.far_received, costs.far_sent).max()
  near = np.maximum(costs.received, costs.sent)
  mean = costs.load.mean()
  return (
    f"| {name} | {cp_size} | {chunk_size} | {seconds:.2f} | {peak / 1e6:.0f} | "
    f"{costs.load.max() / mean:.3f} | {near.mean():.0f}, {near.max():.0f} | {far:.0f} | "
    f"{costs.total.max() / mean:.3f} |"
  )


def main(argv: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--nodes", type=int, metavar="RANKS", help="ranks per node (default: all)")
  parser.add_argument("--keys", action="store_true", help="time whole keys")
  options = parser.parse_args(argv)
  print(
    "| mask | ranks | chunk | seconds | MB | work, max / mean | rows in a node: mean, busiest "
    "| rows of the busiest NIC | cost of the busiest rank / mean work |"
  )
  print("|---|---|---|---|---|---|---|---|---|")
  for name in CASES:
    print(measure(name, options.nodes, options.keys), flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])
