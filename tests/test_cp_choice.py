"""What a planner chooses: degree, order of steps, transport, capacities; and what it predicts."""

import collections

import pytest

import jax_magi
from jax_magi import AttentionMask, magi_attn_flex_key, magi_attn_varlen_key
from jax_magi._src.context_parallel import plan_choice
from tests.cases import random_documents


@pytest.mark.parametrize("transport", ["two_level", "all_to_all", "all_gather"])
def test_predictions(transport):
  mask = AttentionMask.from_cu_seqlens(random_documents(16 * 1024, 1), causal=True)
  key = magi_attn_flex_key(mask, cp_size=16, ranks_per_node=4, transport=transport)
  slow, fast = (key.predict(jax_magi.Links(far=far)) for far in (1e9, 1e12))
  assert slow.total > fast.total >= fast.kernels > 0
  assert slow.exposed > 0
  kept = key.predict(jax_magi.Links(far=1e9), keep_remote_kv=True)
  assert kept.backward < slow.backward
  assert kept.forward == slow.forward
  alone = magi_attn_flex_key(mask, cp_size=1).predict()
  assert alone.exposed == 0


def test_the_order_of_steps_is_the_one_that_finishes_first():
  """Far keys arrive during a part of the kernel of near ones, and gradients return in the other."""
  mask = AttentionMask.from_cu_seqlens(random_documents(1 << 19, 0), causal=True)
  options = {"cp_size": 64, "ranks_per_node": 8, "transport": "two_level"}
  free = magi_attn_flex_key(mask, overlap_degree=(2,), **options)
  fixed = jax_magi.key_for_new_mask(free, mask, overlap_degree=2, transport="two_level")
  order = free.capacities.orders[1]
  assert order.stages == (1, 2, 1) and order.cuts[1]
  assert free.predict().total < 0.98 * fixed.predict().total
  again = jax_magi.key_for_new_mask(free, mask, transport="two_level")
  assert again.spec == free.spec


@pytest.mark.parametrize(("keys", "is_hidden"), [(1024, True), (512, False)])
def test_a_part_of_a_kernel_takes_the_time_of_its_pairs(keys, is_hidden):
  """Own keys are divided in two, to hide that keys of others arrive and that gradients return."""
  queries = 512 * 1024 // keys
  begins = (0, 1024)
  mask = AttentionMask.from_ranges(
    [[begin, begin + queries] for begin in begins] + [[0, 1024], [1024, 2048]],
    [[begin, begin + keys] for begin in begins] + [[1024, 1088], [0, 64]],
    [0] * 4,
    q_len=2048,
    k_len=2048,
  )
  links = jax_magi.Links(near=26e9, latency=0.0, stage_seconds=(0.0, 0.0), merge_seconds=0.0)
  options = {"cp_size": 2, "dispatch": "contiguous", "transport": "all_to_all"}
  found = magi_attn_flex_key(mask, overlap_degree=1, **options).predict(links)
  # 64 rows of gradients take 20 us, and the kernel over own keys 58.
  assert found.exposed == pytest.approx(0.0 if is_hidden else 20e-6, abs=1e-6)


def test_the_degree_follows_the_links():
  mask = AttentionMask.sliding_window(8 * 8192, left=4095)
  options = {"cp_size": 8, "overlap_degree": "auto"}
  idle = jax_magi.Links(near=1e15, stage_seconds=(1e-3, 1e-3))
  assert magi_attn_flex_key(mask, links=idle, **options).spec.overlap_degree == 0
  slow = jax_magi.Links(near=2e10, latency=0.0, stage_seconds=(0.0, 0.0))
  key = magi_attn_flex_key(mask, links=slow, **options)
  assert key.spec.overlap_degree > 0
  pinned = magi_attn_flex_key(mask, capacities=key.capacities, links=slow, **options)
  assert pinned.spec == key.spec
  with pytest.raises(ValueError, match="overlap_degree is 0, but capacities are of"):
    magi_attn_flex_key(mask, cp_size=8, overlap_degree=0, capacities=key.capacities)


def test_degrees_share_what_ranks_need(monkeypatch):
  """The needs are computed once per dispatch, even if several degrees are tried."""
  calls = collections.Counter()

  def counted(name):
    fun = getattr(plan_choice, name)

    def call(*args):
      calls[name] += 1
      return fun(*args)

    return call

  for name in ("needs_of", "make_plan"):
    monkeypatch.setattr(plan_choice, name, counted(name))
  magi_attn_flex_key(AttentionMask.causal(4096), cp_size=8, overlap_degree=(0, 1, 2))
  assert calls["make_plan"] == 3 * calls["needs_of"] > 0


def test_masks_of_a_loader_fall_into_few_buckets():
  specs = set()
  for seed in range(20):
    documents = random_documents(8 * 4096, seed, median=1000)
    specs.add(magi_attn_varlen_key(documents, causal=True, cp_size=8).spec)
  assert len(specs) <= 7


@pytest.mark.parametrize("seed", [1, 2, 7])
def test_a_mask_fits_in_its_own_capacities(seed):
  """The plan they come from may have another assignment of chunks than the first candidate."""
  documents = random_documents(8 * 4096, seed, median=1000)
  options = {"causal": True, "cp_size": 8, "ranks_per_node": 4}
  key = magi_attn_varlen_key(documents, **options)
  again = magi_attn_varlen_key(documents, capacities=key.capacities, **options)
  assert again.spec == key.spec


def test_everyone_needs_everything():
  key = magi_attn_flex_key(AttentionMask.full(4096), cp_size=8)
  assert key.stats().transport == "all_gather"
  assert key.stats().busiest_share == 1.0
  key = magi_attn_flex_key(AttentionMask.sliding_window(4096, left=100), cp_size=8)
  assert key.stats().transport == "all_to_all"
  assert key.stats().share < 0.1
