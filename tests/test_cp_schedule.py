"""The order of kernels and transfers: which steps there are, and that none of a step waits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask, overlap
from jax_magi._src.context_parallel.schedule import (
  WHOLE,
  Order,
  num_parts_of,
  orders_of,
  part_of_rows,
  slices_of_keys,
  slices_of_queries,
  steps_of,
)
from jax_magi._src.native.backends import CUDA
from tests.cp_runs import NATIVE, make_mesh
from tests.sizes import in_turns


@pytest.mark.parametrize("is_fetching", [True, False])
@pytest.mark.parametrize(
  "num_hops", [[1], [1, 1], [1, 1, 1, 1], [2], [1, 2], [1, 2, 2], [1, 2, 2, 2, 2]], ids=str
)
def test_a_backward_pass_does_everything_once_and_in_time(num_hops, is_fetching):
  orders = orders_of(num_hops, is_backward=True)
  assert len(set(orders)) == len(orders) > 1
  for order in orders:
    _check_backward(num_hops, steps_of(num_hops, order, is_fetching=is_fetching, is_backward=True))
  steps = steps_of(num_hops, is_fetching=is_fetching, is_backward=True)
  assert all(step.stage >= 0 for step in steps)  # Each transfer has a kernel to hide behind.


def _check_backward(num_hops, steps):
  everything = {(stage, hop) for stage, count in enumerate(num_hops, 1) for hop in range(count)}
  fetched = set() if any(step.casts for step in steps) else set(everything)
  returned, computed = [], []
  for step in steps:
    if step.stage > 0:
      assert {(step.stage, hop) for hop in range(num_hops[step.stage - 1])} <= fetched
    for stage, hop in step.reduces:
      assert computed.count(stage) == num_parts_of(steps, stage)  # All of its gradients.
      assert all((stage, later) in returned for later in range(hop + 1, num_hops[stage - 1]))
    for stage, hop in step.casts:
      assert all((stage, earlier) in fetched for earlier in range(hop))
    # One in flight on each kind of link.
    lanes = [hop - num_hops[stage - 1] for stage, hop in (*step.casts, *step.reduces)]
    assert len(set(lanes)) == len(lanes)
    fetched.update(step.casts)
    returned += step.reduces
    if step.stage >= 0:
      computed.append(step.stage)
      assert step.part == computed.count(step.stage) - 1
  assert sorted(returned) == sorted(everything)
  assert fetched == everything
  assert set(computed) == set(range(len(num_hops) + 1))


def test_a_stage_around_another_hides_what_that_one_fetches_and_returns():
  order = Order(stages=(1, 2, 1), parts=(1, 1, 2))
  kernels, casts, reduces = [], {}, {}
  for number, step in enumerate(steps_of([1, 2], order, is_backward=True)):
    kernels.append((step.stage, step.part))
    casts.update(dict.fromkeys(step.casts, number))
    reduces.update(dict.fromkeys(step.reduces, number))
  assert kernels == [(0, 0), (1, 0), (2, 0), (1, 1), (1, 2), (0, 1)]
  assert casts == {(1, 0): 0, (2, 0): 0, (2, 1): 1}
  assert reduces == {(2, 1): 3, (2, 0): 4, (1, 0): 5}


@pytest.mark.parametrize("num_hops", [[], [1], [1, 1, 1], [2], [1, 2, 2]], ids=str)
def test_a_forward_pass_fetches_everything_in_time(num_hops):
  default, *others = orders_of(num_hops, is_backward=False)
  # The rank's own keys are computed in two parts if the first transfer has two hops.
  own = [0] * (1 + (num_hops == [2]))
  assert _check_forward(num_hops, steps_of(num_hops)) == own + list(range(1, len(num_hops) + 1))
  assert steps_of(num_hops, default) == steps_of(num_hops)
  for order in others:
    assert set(_check_forward(num_hops, steps_of(num_hops, order))) == set(range(len(num_hops) + 1))


def _check_forward(num_hops, steps):
  """Checks that the kernels process the stages in order."""
  fetched = set()
  computed = []
  for step in steps:
    if step.stage > 0:
      assert {(step.stage, hop) for hop in range(num_hops[step.stage - 1])} <= fetched
    assert not step.reduces
    fetched.update(step.casts)
    if step.stage >= 0:
      computed.append(step.stage)
  assert len(fetched) == sum(num_hops)
  return computed


@pytest.mark.parametrize("num_rows", [0, 1, 3, 127, 255, 256, 1000, 1024, 8192])
@pytest.mark.parametrize("cuts", [(), (12,), (3,), (8, 16), (3, 6, 9, 12, 15, 18, 21)], ids=str)
def test_parts_of_rows_are_all_rows(num_rows, cuts):
  parts = [part_of_rows(num_rows, part) for part in itertools.pairwise((0, *cuts, WHOLE))]
  assert parts[0][0] == 0
  assert parts[-1][1] == num_rows
  assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(parts))
  if num_rows >= 1024:
    assert all(begin < end and begin % 128 == 0 for begin, end in parts)


def test_rows_are_divided_where_an_order_says_so():
  order = Order(stages=(1, 2, 1), parts=(1, 1, 1), cuts=((9,), (6,), ()))
  steps = steps_of([1, 1], order, is_backward=True)
  rows = {(step.stage, step.part): step.rows for step in steps}
  assert rows == {
    (0, 0): (0, 9), (1, 0): (0, 6), (2, 0): (0, 24), (1, 1): (6, 24), (0, 1): (9, 24)
  }  # fmt: skip
  # Without a fetch, the own kernel is whole, and its cut is not used.
  steps = steps_of([1, 1], order, is_backward=True, is_fetching=False)
  assert [step.rows for step in steps if step.stage == 0] == [(0, 24)]


def test_slices_without_keys_belong_to_every_part():
  """The first part fills the rows of queries that see nothing: all of them, not only its own."""
  slices = np.array([[2, 9, 0, 5, -7, 7], [3, 12, 0, 0, 0, 0], [0] * 6], np.int32)
  part = slices_of_queries(slices, 0, 4)
  np.testing.assert_array_equal(part, [[2, 4, 0, 5, -7, 7], [3, 12, 0, 0, 0, 0], [0] * 6])


def test_slices_of_parts_show_the_same():
  mask = AttentionMask.from_ranges(
    [[0, 9], [9, 9], [10, 31], [33, 40]],
    [[2, 9], [0, 4], [5, 40], [0, 33]],
    [1, 0, 3, 2],
    q_len=40,
    k_len=44,
  )
  dense = mask.to_dense()
  slices = jnp.asarray(mask.slices)
  for begin, end in [(0, 40), (0, 17), (17, 40), (20, 20), (9, 12)]:
    part = slices_of_queries(slices, begin, end)
    seen = AttentionMask(np.asarray(part), 40, 44).to_dense()
    expected = np.zeros_like(dense)
    expected[begin:end] = dense[begin:end]
    np.testing.assert_array_equal(seen, expected)
    part = slices_of_keys(slices, begin, end)
    seen = AttentionMask(np.asarray(part), 40, end - begin).to_dense()
    np.testing.assert_array_equal(seen, dense[:, begin:end])


def _step(key, implementation=NATIVE, **options):
  def step(q, k, v, key):
    def attend(q, k, v):
      return jax_magi.calc_attn(q, k, v, key, implementation=implementation, **options)[0]

    out, backward = jax.vjp(attend, q, k, v)
    return out, backward(out)

  mesh = make_mesh(cp=8)
  spec = P("cp")
  return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=(spec, spec)))


def _operands(key, length):
  rng = np.random.default_rng(0)
  arrays = [jnp.asarray(rng.standard_normal((length, h, 16)), np.float32) for h in (4, 2, 2)]
  return (*(jax_magi.dispatch(x, key) for x in arrays), key)


@pytest.mark.parametrize(
  ("overlap_degree", "transport"), in_turns([1, 2, 4], ["all_to_all", "all_gather", "two_level"])
)
def test_no_transfer_waits_for_all_attention_nor_all_attention_for_it(overlap_degree, transport):
  mask = AttentionMask.from_cu_seqlens([0, 384, 640, 1024], causal=True)
  key = jax_magi.magi_attn_flex_key(
    mask, cp_size=8, overlap_degree=overlap_degree, transport=transport, ranks_per_node=4
  )
  text = _step(key).lower(*_operands(key, 1024)).compile().as_text()
  transfers = overlap.schedule_of(text).collectives
  # XLA for CPUs ignores barriers, and may keep the rows that the forward pass fetched.
  num_hops = sum(map(len, key.capacities.hops))
  assert 2 * num_hops <= len(transfers) <= 3 * num_hops
  for transfer in transfers:
    assert transfer.independent_attention, transfer


def test_a_shard_map_takes_no_empty_array():
  """An unused empty array crashes jaxlib 0.11.2 when it compiles."""
  key = jax_magi.magi_attn_flex_key(
    AttentionMask.full(1024), cp_size=8, overlap_degree=1, transport="all_gather"
  )
  (equation,) = _step(key).trace(*_operands(key, 1024)).jaxpr.eqns
  assert all(operand.aval.size for operand in equation.invars)


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


@pytest.mark.skipif(CUDA.module is None, reason="built without the CUDA kernels")
def test_the_kernel_barrier_is_in_the_program_of_a_gpu():
  key = _documents_key()
  operands = _operands(key, 1024)
  for with_barrier, count in ((False, 0), (True, 6)):
    lowered = _step(key, implementation=None, kernel_barrier=with_barrier).trace(
      *(x.astype(jnp.bfloat16) for x in operands[:3]), key
    )
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@jax_magi_kernel_barrier") == count


def test_stages_without_a_row_to_fetch():
  """Each stage has room for one row, and is divided in two in the backward pass."""
  mesh = make_mesh(cp=4)
  ends = [0, 16, 32, 48, 64]
  key = jax_magi.magi_attn_varlen_key(
    ends, causal=True, cp_size=4, overlap_degree=4, transport="all_to_all", dispatch="contiguous"
  )
  assert key.capacities.rows == (1, 1, 1, 1)
  q, k, v = (jax.random.normal(jax.random.key(h), (64, h, 16)) for h in (4, 2, 2))
  mask = AttentionMask.from_cu_seqlens(ends, causal=True)

  def gradients(attend):
    return jax.jit(jax.grad(lambda *x: (attend(*x)[0] ** 2).sum(), (0, 1, 2)))(q, k, v)

  options = {"implementation": NATIVE}
  got = gradients(lambda *x: jax_magi.context_parallel_attention(*x, key, mesh=mesh, **options))
  expected = gradients(lambda *x: jax_magi.attention(*x, mask, **options))
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
