"""The order of kernels and transfers: which steps there are, and that neither of a step waits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask, overlap
from jax_magi._src.context_parallel.schedule import backward_steps, part_of_rows, slices_of_rows
from jax_magi._src.native.backends import HOPPER
from tests.cp_runs import make_mesh
from tests.sizes import in_turns


@pytest.mark.parametrize("is_fetching", [True, False])
@pytest.mark.parametrize("overlap_degree", [1, 2, 3, 4, 7])
def test_a_backward_pass_does_everything_once_and_in_time(overlap_degree, is_fetching):
  parts, fetched, returned = [], set() if is_fetching else set(range(1, overlap_degree + 1)), []
  for step in backward_steps(overlap_degree, is_fetching):
    assert step.stage == 0 or step.stage in fetched
    assert step.cast is None or step.reduce is None  # One in flight.
    if step.reduce is not None:
      stage = [(part, n) for number, part, n in parts if number == step.reduce]
      assert sorted(part for part, _ in stage) == list(range(stage[0][1]))  # All of its gradients.
      returned.append(step.reduce)
    parts.append((step.stage, step.part, step.num_parts))
    if step.cast is not None:
      assert step.cast not in fetched
      fetched.add(step.cast)
  stages = range(overlap_degree + 1)
  assert sorted(returned) == list(stages)[1:]
  assert fetched == set(returned)
  expected = {(s, part, n) for s, _, n in parts for part in range(n)}
  assert sorted(parts) == sorted(expected)
  assert {s for s, _, _ in parts} == set(stages)
  # No kernel without a transfer but the one that has to wait for the first keys.
  steps = list(backward_steps(overlap_degree, is_fetching))
  idle = [step for step in steps if step.cast is None and step.reduce is None]
  assert len(idle) == (1 if overlap_degree == 1 or not is_fetching else 0)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 127, 255, 256, 1000, 8192])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_parts_of_rows_are_all_rows(num_rows, num_parts):
  parts = [part_of_rows(num_rows, part, num_parts) for part in range(num_parts)]
  assert parts[0][0] == 0
  assert parts[-1][1] == num_rows
  assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(parts))


def test_slices_of_rows_show_the_same():
  mask = AttentionMask.from_ranges(
    [[0, 9], [9, 9], [10, 31], [33, 40]],
    [[2, 9], [0, 4], [5, 40], [0, 33]],
    [1, 0, 3, 2],
    q_len=40,
    k_len=44,
  )
  dense = mask.to_dense()
  for begin, end in [(0, 40), (0, 17), (17, 40), (20, 20), (9, 12)]:
    part = slices_of_rows(jnp.asarray(mask.slices), slice(begin, end))
    seen = AttentionMask(np.asarray(part), end - begin, 44).to_dense()
    np.testing.assert_array_equal(seen, dense[begin:end])


def _step(key, **options):
  def step(q, k, v, key):
    def attend(q, k, v):
      return jax_magi.calc_attn(q, k, v, key, **options)[0]

    out, backward = jax.vjp(attend, q, k, v)
    return out, backward(out)

  mesh = make_mesh(cp=8)
  spec = P("cp")
  return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=(spec, spec)))


def _operands(key, length):
  rng = np.random.default_rng(0)
  arrays = [jnp.asarray(rng.standard_normal((length, h, 16)), np.float32) for h in (4, 2, 2)]
  return (*(jax_magi.dispatch(x, key) for x in arrays), key)


@pytest.mark.parametrize(("overlap_degree", "all_gather"), in_turns([1, 2, 4], [False, True]))
def test_no_transfer_waits_for_all_attention_nor_all_attention_for_it(overlap_degree, all_gather):
  mask = AttentionMask.from_cu_seqlens([0, 384, 640, 1024], causal=True)
  key = jax_magi.magi_attn_flex_key(
    mask, cp_size=8, overlap_degree=overlap_degree, all_gather=all_gather
  )
  text = _step(key).lower(*_operands(key, 1024)).compile().as_text()
  transfers = overlap.schedule_of(text).collectives
  # XLA for CPUs sees through barriers, and may keep what the forward pass fetched.
  assert 2 * overlap_degree <= len(transfers) <= 3 * overlap_degree
  for transfer in transfers:
    assert transfer.independent_attention, transfer


def _documents_key():
  mask = AttentionMask.from_cu_seqlens([0, 384, 640, 1024], causal=True)
  return jax_magi.magi_attn_flex_key(mask, cp_size=8, overlap_degree=2)


def test_the_kernel_barrier_is_nothing_to_a_cpu():
  key = _documents_key()
  operands = _operands(key, 1024)
  for got, expected in zip(
    jax.tree.leaves(_step(key, kernel_barrier=True)(*operands)),
    jax.tree.leaves(_step(key)(*operands)),
    strict=True,
  ):
    np.testing.assert_array_equal(got, expected)
  with pytest.raises(ValueError, match="kernel_barrier"):
    _step(key, kernel_barrier=1)(*operands)


@pytest.mark.skipif(HOPPER.module is None, reason="built without the CUDA kernels")
def test_the_kernel_barrier_is_in_the_program_of_a_gpu():
  key = _documents_key()
  operands = _operands(key, 1024)
  for with_barrier, count in ((False, 0), (True, 6)):
    lowered = _step(key, kernel_barrier=with_barrier).trace(
      *(x.astype(jnp.bfloat16) for x in operands[:3]), key
    )
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@jax_magi_kernel_barrier") == count
