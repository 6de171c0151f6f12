"""Simulates the cost of a fixed order of the additions to dq. Needs no GPU.

python -m benchmarks.dq_order [--lengths LENGTH ...] [--queries-in-turn NUM] [--num-parts NUM]

Multiprocessors take key tiles in the order of the list. All blocks of queries take the same time.
The dq of a block is added when all earlier tiles have added to the same queries, not counting
queries that do not see these tiles and get zeros. Memory is never slow, and all heads are processed
at once. Documents begin at multiples of 8 tokens up to a length of 8192, and anywhere in longer
sequences.
"""

from __future__ import annotations

import argparse
import heapq
from collections import defaultdict
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention_gpu import MODELS
from benchmarks.masks import MASKS
from jax_magi import AttentionMask
from jax_magi._src.masks.slices import grouped_by_keys
from jax_magi._src.native import attention as native
from jax_magi._src.native.backends import CUDA

_HEAD_DIM, _HEADS, _KV_HEADS = MODELS[0]
_BLOCK, _NUM_SMS = 80, 132
_UNIT = 8  # Blocks of queries begin at multiples of it.
# Microseconds, from rates and latencies on an H200.
_BLOCK_TIME, _TILE_TIME = 2.9, 2.0
_READ_TIME = 0.6  # Until dq has left shared memory, and the next one may be written there.
_ADD_TIME, _SEE_TIME = 1.5, 0.7  # Until it is in memory and counted; until others see that.


def _blocks(slices: np.ndarray, tile: np.ndarray) -> tuple[list[list[int]], dict[int, range]]:
  """The first queries of the tile's blocks, for each slice from right to left, and the queries of
  units that see the tile, from the first to the last."""
  _, begin, num_rows, _, first, last = (int(x) for x in tile[:6])
  result, units = [], dict[int, range]()
  for q_begin, q_end, k_begin, k_end, lo, hi in slices[first:last].tolist():
    low, high = max(begin, k_begin), min(begin + num_rows, k_end)
    query, end = max(q_begin, low - hi), min(q_end, high - lo)
    if low < high and query < end:
      for unit in range(query // _UNIT, -(-end // _UNIT)):
        seen = range(max(query, unit * _UNIT), min(end, (unit + 1) * _UNIT))
        other = units.get(unit, seen)
        units[unit] = range(min(seen.start, other.start), max(seen.stop, other.stop))
      end += -end % _UNIT
      result.append([max(x - _BLOCK, 0) for x in range(end, query, -_BLOCK)])
  return result, units


def _splits(seen_by_tile: list[dict[int, range]]) -> dict[int, int]:
  """The begin of the second part of each unit in which two documents meet."""
  begins: defaultdict[int, set[int]] = defaultdict(set)
  crossed: defaultdict[int, set[int]] = defaultdict(set)
  for seen in seen_by_tile:
    for unit, queries in seen.items():
      begins[unit].add(queries.start)
      crossed[unit].update(queries[1:])
  free = {unit: sorted(begins[unit] - crossed[unit]) for unit in begins}
  return {unit: queries[1] for unit, queries in free.items() if len(queries) > 1}


def _visits(blocks: list[list[int]], heads: range, per_turn: int) -> Iterator[tuple[int, int]]:
  """The heads and blocks in the order in which a tile processes them."""
  if len(blocks) > 1:
    yield from ((head, x) for head in heads for of_slice in blocks for x in of_slice)
    return
  for of_slice in blocks:
    for i in range(0, len(of_slice), per_turn):
      yield from ((head, x) for head in heads for x in of_slice[i : i + per_turn])


def simulate(mask: AttentionMask, *, ordered: bool, in_turn: int, num_parts: int) -> float:
  """The microseconds of a backward pass with 48/8 heads of 128."""
  length = mask.q_len
  slices = grouped_by_keys(np.asarray(mask.slices))
  q, k = (
    jax.ShapeDtypeStruct((1, length, heads, _HEAD_DIM), jnp.bfloat16)
    for heads in (_HEADS, _KV_HEADS)
  )
  # In any order, too, the tiles of one: clusters would have others.
  options = {"softcap": 0.0, "is_backward": True, "deterministic": True}
  backend = CUDA.for_attention(q, k)
  _, plan = native.plan_tiles(backend, {"q": q, "k": k, "v": k}, [slices], **options)
  tiles = np.frombuffer(plan.tile_list, np.int32)[16:].reshape(-1, 8)  # Behind the header.
  num_packs, per_pack = _KV_HEADS * num_parts, _HEADS // (_KV_HEADS * num_parts)
  # For each head, of both parts of each unit.
  done: defaultdict[int, np.ndarray] = defaultdict(lambda: np.zeros(2 * (length // _UNIT + 1)))
  free_at = [0.0] * _NUM_SMS
  blocks_of = [_blocks(slices, tile) for tile in tiles]
  splits = _splits([seen for _, seen in blocks_of])
  for blocks, seen in blocks_of:
    parts = {
      x: [
        2 * unit + (seen[unit].start >= splits.get(unit, length))
        for unit in range(x // _UNIT, (x + _BLOCK) // _UNIT)
        if unit in seen
      ]
      for of_slice in blocks
      for x in of_slice
    }
    for pack in range(num_packs):
      time = added = heapq.heappop(free_at) + _TILE_TIME
      heads = range(pack * per_pack, (pack + 1) * per_pack)
      for head, query in _visits(blocks, heads, in_turn // _BLOCK):
        time = added = max(time + _BLOCK_TIME, added + _READ_TIME)
        if ordered:
          added = max(time, done[head][parts[query]].max() + _SEE_TIME)
          done[head][parts[query]] = added + _ADD_TIME
      heapq.heappush(free_at, max(time, added))
  return max(free_at)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
  parser.add_argument("--queries-in-turn", type=int, default=640, help="queries per head")
  parser.add_argument(
    "--num-parts", type=int, default=1, help="parts of dk and dv (a divisor of 6)"
  )
  options = parser.parse_args()
  if CUDA.module is None:
    raise SystemExit("this build of jax_magi has no CUDA kernels, which make the lists of tiles")
  for length in options.lengths:
    for name, make in MASKS.items():
      mask = make(length)
      any_order = simulate(mask, ordered=False, in_turn=2048, num_parts=1)
      in_order = simulate(
        mask,
        ordered=True,
        in_turn=options.queries_in_turn,
        num_parts=options.num_parts,
      )
      print(f"{length:6} {name:20} {100 * (in_order / any_order - 1):+5.1f}%", flush=True)


if __name__ == "__main__":
  main()
