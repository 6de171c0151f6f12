"""Attention split over ranks equals that of one device."""

import dataclasses
import itertools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask, magi_attn_flex_key, magi_attn_varlen_key
from jax_magi._src.attention import checks
from jax_magi._src.context_parallel.schedule import Order
from jax_magi._src.native.backends import CUDA
from tests.accuracy import DTYPES, check_results, expected_results, make_inputs
from tests.cases import CASES
from tests.compilation import quick_jit
from tests.cp_runs import LENGTH, MASKS, NATIVE, check_all_masks, make_mesh, on_one_device, run
from tests.sizes import in_turns, name_of

# With these links, plans that are free to do so compute each query in one stage.
MERGING_IS_SLOW = jax_magi.Links(merge_seconds=1.0)
_SIZES, _DEGREES = (1, 2, 3, 4, 8), (0, 1, 2, 4)
_COMBINATIONS = list(itertools.product(_SIZES, _DEGREES))


def _combination(index):
  """Each case gets one combination, and neighbouring cases, which are often similar, get others."""
  return _COMBINATIONS[7 * index % len(_COMBINATIONS)]


@pytest.mark.parametrize("case", in_turns(CASES[::2], every=4), ids=name_of)
def test_named_masks(case):
  """Half of the masks. `test_cp_plan.py` checks the tables of all, with every size and degree."""
  cp_size, overlap_degree = _combination(CASES.index(case))
  key = magi_attn_flex_key(case.mask, cp_size=cp_size, overlap_degree=overlap_degree)
  inputs = case.make_inputs("f32")
  results = run(inputs, key, make_mesh(cp=cp_size), **case.options)
  check_results(results, inputs, case.mask, **case.options)


@pytest.mark.parametrize(
  ("cp_size", "overlap_degree", "transport"),
  [
    *(pytest.param(*x.values, "all_to_all", marks=x.marks) for x in in_turns(_SIZES, _DEGREES)),
    *[(4, 0, "all_gather"), (3, 1, "all_gather"), (2, 5, "all_gather")],  # The last is uneven.
    pytest.param(2, 4, "all_gather", marks=pytest.mark.long),
  ],
)
def test_every_size_and_degree(cp_size, overlap_degree, transport):
  check_all_masks(cp_size, overlap_degree=overlap_degree, transport=transport)


# With nodes of one rank, or one node, two levels are one. Other transports have no levels, and
# `test_every_size_and_degree` has their degrees.
_ON_NODES = [
  *itertools.product([2, 4], ["two_level", "auto"], [0, 1, 2, 4]),
  *[(1, "two_level", 1), (8, "two_level", 2), (1, "auto", 2), (8, "auto", 4)],
  *[(1, "all_to_all", 0), (2, "all_to_all", 4), (4, "all_to_all", 2), (8, "all_to_all", 1)],
  *[(1, "all_gather", 0), (2, "all_gather", 2), (4, "all_gather", 4), (8, "all_gather", 1)],
]
_ON_NODES_ALWAYS = [(2, "two_level", 1), (4, "all_to_all", 2), (1, "all_gather", 0), (8, "auto", 4)]


@pytest.mark.parametrize(
  ("ranks_per_node", "transport", "overlap_degree"),
  [
    pytest.param(*case, marks=() if case in _ON_NODES_ALWAYS else (pytest.mark.long,))
    for case in _ON_NODES
  ],
)
def test_every_transport_on_nodes(ranks_per_node, transport, overlap_degree):
  check = _check_own_programs if transport == "auto" else check_all_masks
  check(8, overlap_degree=overlap_degree, transport=transport, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize(
  ("overlap_degree", "transport_and_nodes"),
  # The size of nodes makes no difference to exchanges in one step.
  in_turns([2, 4, 1], [("two_level", 2), ("two_level", 4), ("all_to_all", 4)], every=2),
  ids=str,
)
def test_queries_in_one_stage_each(overlap_degree, transport_and_nodes):
  transport, ranks_per_node = transport_and_nodes
  check_all_masks(
    8,
    overlap_degree=(overlap_degree,),
    transport=transport,
    ranks_per_node=ranks_per_node,
    links=MERGING_IS_SLOW,
  )


@pytest.mark.parametrize("overlap_degree", in_turns([2, 0, 1, 4], every=4))
def test_a_ragged_exchange(overlap_degree):
  """CPUs lack it, so equal blocks replace it. The tables are those of the key."""
  check_all_masks(4, overlap_degree=overlap_degree, transport="ragged")


@pytest.mark.long
def test_sixteen_devices_in_four_nodes():
  command = [sys.executable, "-m", "tests.sixteen_devices", "1", "2"]
  done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
  assert done.stdout.strip().endswith("right"), done.stderr[-3000:]


def _check_own_programs(cp_size, **options):
  """Runs each mask in a separate program, because "auto" takes a transport for each."""
  inputs = make_inputs(np.random.default_rng(0), np.float32, LENGTH, LENGTH, 2, 1, 16, 16)
  for name in ("documents", "window"):
    key = magi_attn_flex_key(MASKS[name], cp_size=cp_size, **options)
    results = run(inputs, key, make_mesh(cp=cp_size))
    check_results(results, inputs, MASKS[name])


def test_one_rank_has_nothing_to_overlap_with():
  mask = MASKS["documents"]
  inputs = make_inputs(np.random.default_rng(2), np.float32, LENGTH, LENGTH, 2, 2, 16, 16)
  key = magi_attn_flex_key(mask, cp_size=1, overlap_degree=2)
  check_results(run(inputs, key, make_mesh(cp=1)), inputs, mask)


@pytest.mark.parametrize(("overlap_degree", "dtype"), in_turns([1, 3, 0], ["bf16", "f16"], every=2))
def test_low_precision(dtype, overlap_degree):
  mask = MASKS["documents"]
  inputs = make_inputs(
    np.random.default_rng(1), DTYPES[dtype], LENGTH, LENGTH, 4, 2, 32, 32, num_sinks=2
  )
  for degree, links in ((overlap_degree, None), ((overlap_degree,), MERGING_IS_SLOW)):
    key = magi_attn_flex_key(mask, cp_size=4, overlap_degree=degree, links=links)
    assert (key.whole_slices is not None) == (links is not None and overlap_degree > 0)
    results = run(inputs, key, make_mesh(cp=4), keep_remote_kv=links is not None)
    check_results(results, inputs, mask)


def test_stages_are_rounded_once():
  """The out of several stages is the rounded truth, so it was not rounded before the merge."""
  inputs = make_inputs(
    np.random.default_rng(1), DTYPES["bf16"], LENGTH, LENGTH, 4, 2, 32, 32, num_sinks=2
  )
  key = magi_attn_flex_key(MASKS["causal"], cp_size=4, overlap_degree=3, transport="all_to_all")
  out = run(inputs, key, make_mesh(cp=4))["out"]
  truth = expected_results(inputs, MASKS["causal"])[0]["out"].astype(out.dtype)
  assert (out == truth).mean() > 0.97


@pytest.mark.parametrize("dispatch", ["zigzag", "contiguous", [2, 0, 1, 1, 2, 0]])
def test_other_orders(dispatch):
  mask = MASKS["documents"]
  inputs = make_inputs(np.random.default_rng(2), np.float32, LENGTH, LENGTH, 2, 1, 16, 16)
  key = magi_attn_flex_key(mask, cp_size=3, dispatch=dispatch)
  check_results(run(inputs, key, make_mesh(cp=3)), inputs, mask)


@pytest.mark.parametrize("transport", ["all_to_all", "two_level"])
def test_a_stage_whose_parts_run_around_another(transport):
  mask = MASKS["causal"]
  inputs = make_inputs(np.random.default_rng(6), np.float32, LENGTH, LENGTH, 4, 2, 16, 16)
  options = {"cp_size": 8, "overlap_degree": 2, "transport": transport, "ranks_per_node": 4}
  capacities = magi_attn_flex_key(mask, **options).capacities
  orders = None, Order(stages=(1, 2, 1), parts=(1, 1, 2), cuts=((9,), (3, 15), ()))
  capacities = dataclasses.replace(capacities, orders=orders)
  key = magi_attn_flex_key(mask, capacities=capacities, **options)
  assert key.capacities == capacities
  check_results(run(inputs, key, make_mesh(cp=8)), inputs, mask)


def test_options_and_kept_keys():
  mask = MASKS["window"]
  inputs = make_inputs(
    np.random.default_rng(3), np.float32, LENGTH, LENGTH, 4, 2, 16, 16, num_sinks=0
  )
  key = magi_attn_flex_key(mask, cp_size=4, overlap_degree=2)
  options = {"softcap": 2.0, "softmax_scale": -0.3}
  for more in ({"keep_remote_kv": True}, {"implementation": "blockwise"}):
    results = run(inputs, key, make_mesh(cp=4), **options, **more)
    check_results(results, inputs, mask, **options)


@pytest.mark.parametrize("transport", ["two_level", "all_gather"])
def test_gradients_that_travel_in_16_bits(transport):
  """Each row of a rank's gradients is rounded once per hop, and sums are not."""
  mask = MASKS["causal"]
  inputs = make_inputs(np.random.default_rng(5), np.float32, LENGTH, LENGTH, 4, 2, 16, 16)
  key = magi_attn_flex_key(mask, cp_size=8, overlap_degree=2, transport=transport, ranks_per_node=4)
  mesh = make_mesh(cp=8)
  exact = run(inputs, key, mesh)
  rounded = run(inputs, key, mesh, remote_grad_dtype=jnp.bfloat16)
  for name in ("out", "lse", "dq"):
    np.testing.assert_array_equal(rounded[name], exact[name])
  for name in ("dk", "dv"):
    error = np.abs(rounded[name] - exact[name]).max()
    # Two roundings of the parts of eight ranks, which are not much larger than their sum.
    assert 0 < error <= 2 * 2**-8 * np.abs(exact[name]).max()
  with pytest.raises(
    ValueError, match="remote_grad_dtype must be None or one of float32, bfloat16"
  ):
    _call(key, mesh, remote_grad_dtype="int8")


def test_another_mask_on_the_same_dispatch():
  key = magi_attn_flex_key(MASKS["causal"], cp_size=4)
  inputs = make_inputs(np.random.default_rng(4), np.float32, LENGTH, LENGTH, 2, 2, 16, 16)
  window = jax_magi.key_for_new_mask(key, MASKS["window"])
  np.testing.assert_array_equal(window.q_chunks, key.q_chunks)
  check_results(run(inputs, window, make_mesh(cp=4)), inputs, MASKS["window"])


# --- what compiles, and to what ---


def _text(key, mesh, length, platform="cpu", **options):
  def step(q, k, v, key):
    return jax_magi.calc_attn(q, k, v, key, return_max_logits=True, **options)[0]

  fun = jax.shard_map(step, mesh=mesh, in_specs=P("cp"), out_specs=P("cp"))

  def loss(q, k, v, key):
    return fun(q, k, v, key).sum()

  x = jax.ShapeDtypeStruct((length, 2, 64), jnp.bfloat16)
  traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x, key)
  return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("transport", ["all_to_all", "two_level"])
def test_new_masks_compile_nothing(transport):
  mesh = make_mesh(cp=4)
  options = {"cp_size": 4, "chunk_size": 32, "transport": transport, "ranks_per_node": 2}
  traces = []

  @jax.jit
  def fun(q, k, v, key):
    traces.append(key)
    step = lambda *x: jax_magi.calc_attn(*x, implementation=NATIVE)[0]  # noqa: E731
    return jax.shard_map(step, mesh=mesh, in_specs=P("cp"), out_specs=P("cp"))(q, k, v, key)

  documents = [[0, 1024], [0, 500, 1024], [0, 300, 301, 700, 1024], [0, 10, 1000, 1024], [0, 1024]]
  keys = [magi_attn_varlen_key(x, causal=True, **options) for x in documents]
  room = keys[0].capacities
  for key in keys:
    room = room | key.capacities
  q = jnp.ones((1024, 2, 16))
  for x in documents:
    key = magi_attn_varlen_key(x, causal=True, capacities=room, **options)
    jax.block_until_ready(fun(q, q, q, key))
  assert len(traces) == 1


def test_collectives():
  mesh = make_mesh(cp=4)
  documents = magi_attn_varlen_key(
    [0, 100, 300, 1024], causal=True, cp_size=4, overlap_degree=2, transport="all_to_all"
  )
  for platform in ("cpu", "cuda"):
    text = _text(documents, mesh, 1024, platform)
    assert "all_gather" not in text
    assert "reduce_scatter" not in text
    assert "ragged" not in text
    # Two transfers forward, the same again and two back in the backward pass.
    assert text.count("stablehlo.all_to_all") == 6

  ragged = magi_attn_varlen_key(
    [0, 100, 300, 1024], causal=True, cp_size=4, overlap_degree=2, transport="ragged"
  )
  text = _text(ragged, mesh, 1024, "cuda")
  assert text.count("ragged_all_to_all") == 6
  assert "stablehlo.all_to_all" not in text
  assert "ragged" not in _text(ragged, mesh, 1024)

  everything = magi_attn_flex_key(AttentionMask.full(1024), cp_size=4)
  text = _text(everything, mesh, 1024)
  assert text.count("stablehlo.all_gather") == 2
  assert text.count("stablehlo.reduce_scatter") == 1
  assert "all_to_all" not in text


def test_ranks_of_a_node_that_need_everything_gather_it():
  """Then nothing is packed. Gradients that return as blocks can be summed in a fixed order."""
  mesh, mask = make_mesh(cp=4), MASKS["full"]
  options = {"cp_size": 4, "overlap_degree": 2, "transport": "two_level", "ranks_per_node": 2}
  key = magi_attn_flex_key(mask, **options)
  (near,), (node, local) = key.capacities.hops
  assert (near.level, near.kind, near.rows) == ("local", "all_gather", (key.spec.k_local,))
  assert (node.kind, local.kind) == ("all_gather", "all_to_all")
  counts = {
    deterministic: [
      text.count(f"stablehlo.{kind}") for kind in ("all_gather", "reduce_scatter", "all_to_all")
    ]
    for deterministic in (False, True)
    for text in (_text(key, mesh, LENGTH, deterministic=deterministic),)
  }
  # Each of the three hops brings keys twice, and gradients once.
  assert counts == {False: [4, 2, 3], True: [4, 1, 4]}
  inputs = make_inputs(np.random.default_rng(6), np.float32, LENGTH, LENGTH, 2, 1, 16, 16)
  for deterministic in (False, True):
    check_results(run(inputs, key, mesh, deterministic=deterministic), inputs, mask)


# --- errors, when the step is traced ---


def _call(key, mesh=None, length=None, k_length=None, **options):
  mesh = mesh or make_mesh(cp=4)
  length = length or key.spec.q_local * key.spec.cp_size
  q, k = jnp.ones((length, 2, 16)), jnp.ones((k_length or length, 2, 16))
  axis = mesh.axis_names[0]
  fun = lambda q, k, key: jax_magi.calc_attn(q, k, k, key, **options)[0]  # noqa: E731
  fun = jax.shard_map(fun, mesh=mesh, in_specs=(P(axis), P(axis), None), out_specs=P(axis))
  return jax.eval_shape(lambda q, k: fun(q, k, key), q, k)


def test_bad_input_is_named():
  key = magi_attn_flex_key(AttentionMask.causal(96), cp_size=4)
  _call(key)
  with pytest.raises(ValueError, match="inside shard_map over a mesh axis 'cp'"):
    _call(key, make_mesh(sequence=4))
  with pytest.raises(ValueError, match="cp_size=4, but the mesh axis 'cp' has size 2"):
    _call(key, make_mesh(cp=2))
  with pytest.raises(ValueError, match="q must have the 24 rows of a rank"):
    _call(key, length=64)
  with pytest.raises(ValueError, match="k must have the 24 rows of a rank"):
    _call(key, k_length=128)
  with pytest.raises(ValueError, match="key must be a DistAttnKey"):
    _call_with_mask()
  with pytest.raises(ValueError, match="keep_remote_kv must be True or False"):
    _call(key, keep_remote_kv=1)
  with pytest.raises(ValueError, match="use vmap with in_axes=1"):
    _call(jax_magi.stack_keys([key, key]))


def _margins(text):
  """The margins of forward and backward calls, in a program for GPUs."""
  return [
    {int(x) for x in re.findall(rf"jax_magi_attention_{name}.*?sm_margin = (\d+)", text)}
    for name in ("forward", "backward")
  ]


@pytest.mark.skipif(CUDA.module is None, reason="built without the CUDA kernels")
def test_sm_margins(monkeypatch):
  mesh = make_mesh(cp=4)
  key = magi_attn_flex_key(AttentionMask.causal(1024), cp_size=4)
  names = [f"MAGI_ATTENTION_FFA_{name}_SM_MARGIN" for name in ("FORWARD", "BACKWARD")]
  assert _margins(_text(key, mesh, 1024, "cuda")) == [{0}, {0}]
  for name, value in zip(names, ("4", "8"), strict=True):
    monkeypatch.setenv(name, value)
  assert _margins(_text(key, mesh, 1024, "cuda")) == [{4}, {8}]
  assert _margins(_text(key, mesh, 1024, "cuda", sm_margin=3)) == [{3}, {3}]
  assert _margins(_text(key, mesh, 1024, "cuda", sm_margin=(1, 2))) == [{1}, {2}]


def test_bad_sm_margin_is_named(monkeypatch):
  key = magi_attn_flex_key(AttentionMask.causal(96), cp_size=4)
  with pytest.raises(ValueError, match=r"a pair \(forward, backward\)"):
    _call(key, sm_margin=(1, 2, 3))
  monkeypatch.setattr(checks, "num_multiprocessors", lambda: 132)
  with pytest.raises(
    ValueError, match="less than the GPU's 132 streaming multiprocessors, got 132"
  ):
    _call(key, sm_margin=132)
  name = "MAGI_ATTENTION_FFA_BACKWARD_SM_MARGIN"
  for value, message in (("-1", "not be negative, got -1"), ("four", "be an integer in the env")):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} must {message}"):
      _call(key)


def _call_with_mask():
  x = jnp.ones((8, 2, 16))
  jax_magi.calc_attn(x, x, x, AttentionMask.causal(8))


def test_outside_of_shard_map():
  key = magi_attn_flex_key(AttentionMask.causal(96), cp_size=4)
  x = jnp.ones((96, 2, 16))
  with pytest.raises(ValueError, match="inside shard_map"):
    jax_magi.calc_attn(x, x, x, key)


def test_a_key_for_all_ranks_may_be_closed_over():
  mask = MASKS["documents"]
  key = magi_attn_flex_key(mask, cp_size=4)
  inputs = make_inputs(np.random.default_rng(8), np.float32, LENGTH, LENGTH, 2, 2, 16, 16)
  fun = jax.shard_map(
    lambda q, k, v: jax_magi.calc_attn(q, k, v, key)[0],
    mesh=make_mesh(cp=4),
    in_specs=P("cp"),
    out_specs=P("cp"),
  )
  order = [jax_magi.dispatch(x, key) for x in (inputs.q, inputs.k, inputs.v)]
  out = jax_magi.undispatch(np.asarray(quick_jit(fun)(*order)), key)
  np.testing.assert_allclose(out, on_one_device(inputs, mask)[0], atol=1e-5)
