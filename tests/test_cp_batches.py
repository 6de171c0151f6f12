"""Keys in a data pipeline: planned for a batch, of shapes that are known before it."""

import functools
import pickle

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask, Capacities
from tests.accuracy import make_inputs
from tests.compilation import quick_jit
from tests.cp_runs import NATIVE, make_mesh
from tests.random_masks import random_cuts

_LENGTH, _MAX = 64, 6
_PACKINGS = [
  np.repeat([[1, 2, 3, 0], [4, 4, 5, 5]], [20, 1, 30, 13], axis=1),
  np.repeat([[9, 9, 9, 9], [0, 7, 0, 8]], [20, 1, 30, 13], axis=1),
]


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_any_packing_fits_into_the_bound(seed, data):
  rng = np.random.default_rng(seed)
  cp_size = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
  options = {
    "dispatch": data.draw(st.sampled_from(["zigzag", "contiguous", "chunks"])),
    "overlap_degree": data.draw(st.sampled_from([0, 1])),
    "transport": data.draw(st.sampled_from(["auto", "all_to_all", "all_gather", "two_level"])),
  }
  if options["transport"] == "two_level" and cp_size in (4, 8):
    options["ranks_per_node"] = 2
  if options["dispatch"] == "chunks":
    options["dispatch"] = rng.permutation(np.repeat(np.arange(cp_size), 3))
  length = data.draw(st.integers(2 * cp_size * 4, 150))
  causal = data.draw(st.booleans())
  window = data.draw(st.sampled_from([None, (3, 0), (20, 2), (None, 1)]))
  count = data.draw(st.sampled_from([1, 2, 7, 40]))
  arguments = {"causal": causal, "window": window, "max_segments": count, **options}
  room = Capacities.bound(length, cp_size, **arguments)
  cuts = random_cuts(rng, length, count)
  ids = np.repeat(np.arange(len(cuts) - 1) + 1, np.diff(cuts))
  if data.draw(st.booleans()):  # Padding between documents.
    ids = np.where(rng.random(length) < 0.1, 0, ids)
    ids = np.cumsum(np.append(1, (ids[1:] != ids[:-1]) & (ids[1:] != 0))) * (ids != 0)
    ids[ids > count] = 0
  key = jax_magi.plan_batch(ids[None], cp_size=cp_size, **arguments)
  assert key.capacities == room


def _operands():
  rng = np.random.default_rng(4)
  rows = [make_inputs(rng, np.float32, *[_LENGTH] * 2, 2, 1, 8, 8) for _ in range(2)]
  return [np.stack([getattr(row, x) for row in rows]) for x in ("q", "k", "v", "dout")]


@quick_jit
def _on_one_device(q, k, v, dout, slices):
  def loss(q, k, v):
    def row(q, k, v, slices):
      mask = jax.tree.unflatten(jax.tree.structure(AttentionMask.causal(_LENGTH)), [slices])
      return jax_magi.attention(q, k, v, mask)[0]

    out = jax.vmap(row)(q, k, v, slices)
    return (out * dout).sum(), out

  return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_two_windows_share_tokens_and_no_packing_compiles(axis_type):
  """One sharding for every leaf of a batch: tokens and both keys."""
  mesh = make_mesh(axis_type, dp=2, cp=2)
  rows = jax_magi.zigzag_positions(_LENGTH, 2)
  operands = [x[:, rows] for x in _operands()]
  windows = {"global": None, "local": (5, 0)}
  place = functools.partial(jax.device_put, device=NamedSharding(mesh, P("dp", "cp")))

  @quick_jit
  def run(q, k, v, dout, key):
    def loss(q, k, v):
      out, _ = jax_magi.context_parallel_attention(
        *(q, k, v, key), mesh=mesh, batch_axis="dp", implementation=NATIVE
      )
      return (out * dout).sum(), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

  for ids in _PACKINGS:
    keys = jax_magi.plan_batch(ids, cp_size=2, max_segments=_MAX, window=windows)
    assert jax.tree.all(jax.tree.map(lambda x: x.shape[:2] == (2, 2), keys))
    np.testing.assert_array_equal(keys["global"].q_chunks, keys["local"].q_chunks)
    placed, batch = jax.tree.map(place, (keys, operands))
    for name, window in windows.items():
      with jax.set_mesh(mesh):
        (_, out), grads = run(*batch, placed[name])
      slices = [
        AttentionMask.from_segment_ids(row, _MAX, causal=True, window=window).slices for row in ids
      ]
      (_, want), want_grads = _on_one_device(*_operands(), np.stack(slices))
      for a, b in zip((out, *grads), (want, *want_grads), strict=True):
        np.testing.assert_allclose(a, np.asarray(b)[:, rows], atol=1e-5)
  assert run._cache_size() == 2, "a program for each window"


def test_keys_can_be_cut_into_microbatches_and_sent():
  key = jax_magi.plan_batch(np.concatenate(_PACKINGS), cp_size=2, max_segments=_MAX)
  half = jax.tree.map(lambda x: x[:2], key)
  alone = jax_magi.plan_batch(_PACKINGS[0], cp_size=2, max_segments=_MAX)
  sent = pickle.loads(pickle.dumps(alone))
  for other in (alone, sent):
    assert jax.tree.structure(half) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, half, other)


@pytest.mark.parametrize("padding_id", [-1, 0, None])
def test_numbers_of_a_pipeline_make_the_same_keys(padding_id):
  """From 0 or from a corpus, in any order, with padding that has its own number or none."""
  numbers = {-1: [5, 0, 2, -1], 0: [9, 2**31 - 1, 3, 0], None: [5, 0, 9, 4]}[padding_id]
  plain = [1, 2, 3, 0 if padding_id is not None else 4]
  ids, plain = (np.repeat([x], [20, 1, 30, 13], axis=1) for x in (numbers, plain))
  found = jax_magi.plan_batch(ids, cp_size=2, max_segments=4, padding_id=padding_id)
  expected = jax_magi.plan_batch(plain, cp_size=2, max_segments=4)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_one_partition_spec_fits_every_leaf():
  mesh = make_mesh(cp=2, dp=2)
  one = jax_magi.magi_attn_flex_key(AttentionMask.causal(64), cp_size=2)
  cases = [
    (one, P("cp")),
    (jax_magi.stack_keys([one] * 4), P("cp", "dp")),
    (jax_magi.stack_keys([one] * 4, axis=0), P("dp", "cp")),
  ]
  for key, expected in cases:
    spec = key.partition_spec(batch_axis="dp")
    assert spec == expected
    jax.device_put(key, NamedSharding(mesh, spec))


def test_area_is_planned_for_the_batch():
  ids = _PACKINGS[0]
  options = {"cp_size": 2, "max_segments": _MAX, "dispatch": "area", "chunk_size": 4}
  keys = jax_magi.plan_batch(ids, window={"a": None, "b": (3, 0)}, **options)
  for a, b in zip(keys["a"].q_chunks, keys["b"].q_chunks, strict=True):
    np.testing.assert_array_equal(a, b)
  room = {name: key.capacities for name, key in keys.items()}
  again = jax_magi.plan_batch(ids[:1], window={"a": None, "b": (3, 0)}, capacities=room, **options)
  assert {name: key.capacities for name, key in again.items()} == room


@pytest.mark.parametrize(
  ("options", "error", "match"),
  [
    ({"max_segments": 1}, ValueError, "ids must have at most"),
    ({"capacities": {"a": None}, "window": {"b": None}}, ValueError, "the same keys as window"),
    ({"overlap_degree": 2}, ValueError, "overlap_degree must be one of"),
    ({"segment_ids": np.ones((0, 8), int)}, ValueError, "at least one row"),
    ({"segment_ids": np.ones(8, int)}, ValueError, "segment_ids must be"),
  ],
)
def test_bad_arguments_are_named(options, error, match):
  options = {"segment_ids": _PACKINGS[0], "cp_size": 2, "max_segments": _MAX, **options}
  with pytest.raises(error, match=match):
    jax_magi.plan_batch(options.pop("segment_ids"), **options)


def test_what_cannot_be_bounded_is_named():
  with pytest.raises(NotImplementedError, match="no bound for all packings; use 'zigzag'"):
    Capacities.bound(64, 2, 4, dispatch="area")
  with pytest.raises(ValueError, match="planned on the host"):
    jax.jit(lambda ids: jax_magi.plan_batch(ids, cp_size=2, max_segments=2))(_PACKINGS[0])
  with pytest.raises(ValueError, match="axis must be one of"):
    jax_magi.stack_keys([jax_magi.magi_attn_varlen_key([0, 8], cp_size=2)], axis=2)
