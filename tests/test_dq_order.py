"""The simulation of additions to dq in order: `benchmarks/dq_order.py`."""

import pytest

from benchmarks.dq_order import simulate
from benchmarks.masks import MASKS
from jax_magi import AttentionMask
from jax_magi._src.native.backends import CUDA

if CUDA.module is None:
  pytest.skip("built without the CUDA kernels", allow_module_level=True)


def _cost(mask, **options):
  plain = {"in_turn": 2048, "num_parts": 1}
  any_order = simulate(mask, ordered=False, **plain)
  return simulate(mask, ordered=True, **(plain | options)) / any_order


def test_who_waits_for_nobody_loses_nothing():
  """Under a window, a tile reaches its queries one tile length after the tile before it."""
  assert _cost(MASKS["window"](4096)) == pytest.approx(1.0, abs=0.02)


def test_causal_tiles_wait_less_if_heads_take_few_queries_in_turn():
  costs = [_cost(AttentionMask.causal(4096), in_turn=in_turn) for in_turn in (2048, 640, 80)]
  assert costs[0] > costs[1] > costs[2] > 1.0


def test_any_order_takes_as_long_as_its_blocks():
  """32 tiles, 48 heads and 52 blocks, on 132 multiprocessors."""
  time = simulate(AttentionMask.full(4096), ordered=False, in_turn=2048, num_parts=1)
  assert 2.9 * 32 * 48 * 52 / 132 < time < 1.1 * 2.9 * 32 * 48 * 52 / 132


@pytest.mark.parametrize("name", ["varlen_causal", "varlen_block_causal"])
def test_documents_do_not_wait_for_their_neighbours(name):
  """Blocks that reach into the previous document add zeros there, and no tile waits for these."""
  assert _cost(MASKS[name](8192), in_turn=640) < 1.06


def test_documents_that_meet_in_a_unit_do_not_wait_for_each_other():
  """Queries are counted in units of 8, and in two parts where two documents meet in one."""
  bounds = [0, 3501, 6157, 8192]
  assert _cost(AttentionMask.from_cu_seqlens(bounds, causal=True), in_turn=640) < 1.07
