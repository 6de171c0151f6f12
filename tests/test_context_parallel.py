"""Attention split over ranks equals that of one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask, magi_attn_flex_key, magi_attn_varlen_key
from jax_magi._src.attention import checks
from tests.accuracy import DTYPES, check_results, make_inputs
from tests.cases import CASES
from tests.cp_runs import FAST, make_mesh, run

_COMBINATIONS = [(cp, degree) for cp in (1, 2, 3, 4, 8) for degree in (0, 1, 2, 4)]


def _combination(index):
  """Each case meets one, and neighbours, which are often alike, others."""
  return _COMBINATIONS[7 * index % len(_COMBINATIONS)]


@pytest.mark.parametrize(
  ("index", "case"), list(enumerate(CASES)), ids=[case.name for case in CASES]
)
def test_named_masks(index, case):
  cp_size, overlap_degree = _combination(index)
  key = magi_attn_flex_key(case.mask, cp_size=cp_size, overlap_degree=overlap_degree)
  inputs = case.make_inputs("f32")
  results = run(inputs, key, make_mesh(cp=cp_size), **case.options)
  check_results(results, inputs, case.mask, **case.options)


_LENGTH = 96
_ANY = {
  "causal": AttentionMask.causal(_LENGTH),
  "full": AttentionMask.full(_LENGTH),
  "documents": AttentionMask.from_cu_seqlens([0, 1, 40, 41, 70, 93], causal=True, q_len=_LENGTH),
  "full_documents": AttentionMask.from_cu_seqlens([0, 50, 96]),
  "window": AttentionMask.sliding_window(_LENGTH, left=9, right=3),
  "prefix": AttentionMask.prefix_lm(30, _LENGTH),
  "block_causal": AttentionMask.block_causal(16, _LENGTH),
  "shared_question": AttentionMask.shared_question(30, [20, 1, 45]),
  "nothing": AttentionMask(np.zeros((0, 6), np.int32), _LENGTH, _LENGTH),
}


@pytest.mark.parametrize(
  ("cp_size", "overlap_degree", "all_gather"),
  [(*both, False) for both in _COMBINATIONS] + [(4, 0, True), (3, 1, True), (2, 4, True)],
)
def test_every_size_and_degree(cp_size, overlap_degree, all_gather):
  """All masks through one compiled program, as the key is data."""
  options = {"cp_size": cp_size, "overlap_degree": overlap_degree, "all_gather": all_gather}
  keys = {name: magi_attn_flex_key(mask, **options) for name, mask in _ANY.items()}
  room = keys["causal"].capacities
  for key in keys.values():
    room = room | key.capacities
  mesh = make_mesh(cp=cp_size)
  inputs = make_inputs(
    np.random.default_rng(0), np.float32, _LENGTH, _LENGTH, 4, 2, 16, 24, num_sinks=0
  )
  for mask in _ANY.values():
    key = magi_attn_flex_key(mask, capacities=room, **options)
    results = run(inputs, key, mesh, deterministic=overlap_degree == 1)
    check_results(results, inputs, mask)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("overlap_degree", [0, 1, 3])
def test_low_precision(dtype, overlap_degree):
  mask = _ANY["documents"]
  inputs = make_inputs(
    np.random.default_rng(1), DTYPES[dtype], _LENGTH, _LENGTH, 4, 2, 32, 32, num_sinks=2
  )
  key = magi_attn_flex_key(mask, cp_size=4, overlap_degree=overlap_degree)
  check_results(run(inputs, key, make_mesh(cp=4)), inputs, mask)


@pytest.mark.parametrize("dispatch", ["zigzag", "contiguous", [2, 0, 1, 1, 2, 0]])
def test_other_orders(dispatch):
  mask = _ANY["documents"]
  inputs = make_inputs(np.random.default_rng(2), np.float32, _LENGTH, _LENGTH, 2, 1, 16, 16)
  key = magi_attn_flex_key(mask, cp_size=3, dispatch=dispatch)
  check_results(run(inputs, key, make_mesh(cp=3)), inputs, mask)


def test_options_and_kept_keys():
  mask = _ANY["window"]
  inputs = make_inputs(
    np.random.default_rng(3), np.float32, _LENGTH, _LENGTH, 4, 2, 16, 16, num_sinks=0
  )
  key = magi_attn_flex_key(mask, cp_size=4, overlap_degree=2)
  options = {"softcap": 2.0, "softmax_scale": -0.3}
  for more in ({"keep_remote_kv": True}, {"implementation": "blockwise"}):
    results = run(inputs, key, make_mesh(cp=4), **options, **more)
    check_results(results, inputs, mask, **options)


def test_another_mask_on_the_same_dispatch():
  key = magi_attn_flex_key(_ANY["causal"], cp_size=4)
  inputs = make_inputs(np.random.default_rng(4), np.float32, _LENGTH, _LENGTH, 2, 2, 16, 16)
  window = jax_magi.key_for_new_mask(key, _ANY["window"])
  np.testing.assert_array_equal(window.q_chunks, key.q_chunks)
  check_results(run(inputs, window, make_mesh(cp=4)), inputs, _ANY["window"])


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


def test_new_masks_compile_nothing():
  mesh = make_mesh(cp=4)
  traces = []

  @jax.jit
  def fun(q, k, v, key):
    traces.append(key)
    step = lambda q, k, v, key: jax_magi.calc_attn(q, k, v, key)[0]  # noqa: E731
    return jax.shard_map(step, mesh=mesh, in_specs=P("cp"), out_specs=P("cp"))(q, k, v, key)

  documents = [[0, 1024], [0, 500, 1024], [0, 300, 301, 700, 1024], [0, 10, 1000, 1024], [0, 1024]]
  keys = [
    magi_attn_varlen_key(x, causal=True, cp_size=4, chunk_size=32, all_gather=False)
    for x in documents
  ]
  room = keys[0].capacities
  for key in keys:
    room = room | key.capacities
  q = jnp.ones((1024, 2, 16))
  for x in documents:
    key = magi_attn_varlen_key(x, causal=True, cp_size=4, chunk_size=32, capacities=room)
    jax.block_until_ready(fun(q, q, q, key))
  assert len(traces) == 1


def test_collectives():
  mesh = make_mesh(cp=4)
  documents = magi_attn_varlen_key(
    [0, 100, 300, 1024], causal=True, cp_size=4, overlap_degree=2, all_gather=False
  )
  cpu, gpu = (_text(documents, mesh, 1024, platform) for platform in ("cpu", "cuda"))
  for text in (cpu, gpu):
    assert "all_gather" not in text
    assert "reduce_scatter" not in text
  # Two transfers forward, the same again and two back in the backward pass.
  assert cpu.count("stablehlo.all_to_all") == 6
  assert gpu.count("ragged_all_to_all") == 6
  assert "stablehlo.all_to_all" not in gpu

  everything = magi_attn_flex_key(AttentionMask.full(1024), cp_size=4)
  text = _text(everything, mesh, 1024)
  assert text.count("stablehlo.all_gather") == 2
  assert text.count("stablehlo.reduce_scatter") == 1
  assert "all_to_all" not in text


# --- in company of other parts of JAX ---


def _reference(inputs, mask, **options):
  return jax_magi.attention(inputs.q, inputs.k, inputs.v, mask, return_max_logits=True, **options)


def test_scan_over_layers_with_checkpoint():
  mesh = make_mesh(cp=4)
  mask = _ANY["documents"]
  key = magi_attn_flex_key(mask, cp_size=4, overlap_degree=2)
  rng = np.random.default_rng(5)
  x = rng.standard_normal((_LENGTH, 2, 16)).astype(np.float32)
  weights = rng.standard_normal((3, 3, 16, 16)).astype(np.float32) / 4

  def model(attend):
    @jax.checkpoint
    def layer(x, w):
      q, k, v = (x @ w[i] for i in range(3))
      out, meta = attend(q, k, v)
      return x + out, meta.max_logits

    return layer

  def one_device(weights):
    attend = lambda q, k, v: jax_magi.attention(q, k, v, mask, return_max_logits=True)  # noqa: E731
    out, maxima = jax.lax.scan(model(attend), x, weights)
    return (out**2).sum(), maxima

  def ranks(weights):
    def body(x, key, weights):
      attend = lambda q, k, v: jax_magi.calc_attn(  # noqa: E731
        q, k, v, key, return_max_logits=True, reduce_max_logits=False
      )
      out, maxima = jax.lax.scan(model(attend), x, weights)
      loss = jax.lax.psum((out**2).sum(), "cp")
      return loss, jax_magi.optim.reduce_max_logits({"layers": maxima}, axis_name="cp")["layers"]

    fun = jax.shard_map(body, mesh=mesh, in_specs=(P("cp"), P("cp"), P()), out_specs=(P(), P()))
    return fun(jax_magi.dispatch(x, key), key, weights)

  (loss, maxima), grads = jax.jit(jax.value_and_grad(one_device, has_aux=True))(weights)
  (ours, our_maxima), our_grads = jax.jit(jax.value_and_grad(ranks, has_aux=True))(weights)
  np.testing.assert_allclose(ours, loss, rtol=1e-5)
  np.testing.assert_allclose(our_maxima, maxima, rtol=1e-5)
  np.testing.assert_allclose(our_grads, grads, rtol=1e-4, atol=1e-4 * np.abs(grads).max())


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("is_stack", [False, True], ids=["one_mask", "mask_per_row"])
def test_whole_arrays_with_batch_and_heads(axis_type, is_stack):
  """dp x cp x tp, in plain jit."""
  mesh = make_mesh(axis_type, dp=2, cp=2, tp=2)
  masks = [_ANY["documents"], _ANY["window"]] if is_stack else [_ANY["documents"]] * 2
  keys = [magi_attn_flex_key(m, cp_size=2, dispatch="zigzag", all_gather=False) for m in masks]
  key = jax_magi.stack_keys(keys) if is_stack else keys[0]
  rng = np.random.default_rng(6)
  rows = [make_inputs(rng, np.float32, _LENGTH, _LENGTH, 4, 2, 16, 16, num_sinks=0) for _ in masks]
  sink = rows[0].sink
  operands = [
    np.stack([jax_magi.dispatch(getattr(row, name), k) for row, k in zip(rows, keys, strict=True)])
    for name in ("q", "k", "v", "dout")
  ]
  spec = NamedSharding(mesh, P("dp", "cp", "tp"))
  q, k, v, dout = (jax.device_put(x, spec) for x in operands)
  if axis_type == AxisType.Explicit:
    key = jax.device_put(key, NamedSharding(mesh, P("cp", "dp" if is_stack else None)))

  @jax.jit
  def fun(q, k, v, sink, key):
    def loss(q, k, v, sink):
      out, meta = jax_magi.context_parallel_attention(
        q,
        k,
        v,
        key,
        mesh=mesh,
        batch_axis="dp",
        head_axis="tp",
        sink=sink,
        return_max_logits=True,
      )
      return (out * dout).sum(), (out, meta)

    return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, sink)

  with jax.set_mesh(mesh):
    (_, (out, meta)), grads = fun(q, k, v, sink, key)
  dsink = 0.0
  for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):

    def one_device(q, k, v, sink, row=row, mask=mask):
      out, meta = jax_magi.attention(q, k, v, mask, sink=sink, return_max_logits=True)
      return (out * row.dout).sum(), (out, meta)

    arguments = (row.q, row.k, row.v, sink)
    (_, (want, want_meta)), want_grads = jax.value_and_grad(one_device, (0, 1, 2, 3), has_aux=True)(
      *arguments
    )
    back = lambda x, i=i: jax_magi.undispatch(np.asarray(x)[i], keys[i])  # noqa: E731
    np.testing.assert_allclose(back(out), want, atol=1e-5)
    np.testing.assert_allclose(back(meta.lse), want_meta.lse, atol=1e-5)
    np.testing.assert_allclose(np.asarray(meta.max_logits)[i], want_meta.max_logits, atol=1e-5)
    for ours, wanted in zip(grads[:3], want_grads[:3], strict=True):
      np.testing.assert_allclose(back(ours), wanted, atol=2e-5)
    dsink += want_grads[3]
  np.testing.assert_allclose(np.asarray(grads[3]), dsink, atol=1e-4)


def test_heads_exchanged_on_another_axis():
  """In the manner of Ulysses: rows of `sp` ranks become heads, and cp sees longer parts."""
  mesh = make_mesh(sp=2, cp=4)
  mask = _ANY["documents"]
  key = magi_attn_flex_key(mask, cp_size=4)
  inputs = make_inputs(np.random.default_rng(7), np.float32, _LENGTH, _LENGTH, 4, 2, 16, 16)
  order = [jax_magi.dispatch(x, key) for x in (inputs.q, inputs.k, inputs.v)]

  def step(q, k, v, key):
    def to_heads(x):
      return jax.lax.all_to_all(x, "sp", split_axis=1, concat_axis=0, tiled=True)

    out, meta = jax_magi.calc_attn(*map(to_heads, (q, k, v)), key, return_max_logits=True)
    out = jax.lax.all_to_all(out, "sp", split_axis=0, concat_axis=1, tiled=True)
    return out, meta.max_logits

  fun = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(("cp", "sp")),) * 3 + (P("cp"),),
    out_specs=(P(("cp", "sp")), P("sp")),
  )
  out, max_logits = jax.jit(fun)(*order, key)
  want, meta = _reference(inputs, mask)
  np.testing.assert_allclose(jax_magi.undispatch(np.asarray(out), key), want, atol=1e-5)
  np.testing.assert_allclose(max_logits, meta.max_logits, atol=1e-5)


@pytest.mark.parametrize("length", [96, 91])
@pytest.mark.parametrize("shift", [-1, 1, -3, 3, 0])
def test_roll(length, shift):
  key = magi_attn_flex_key(AttentionMask.causal(length), cp_size=4, chunk_size=4)
  tokens = np.arange(1, length + 1)
  ranks = jax_magi.dispatch(tokens, key)
  want = jax_magi.dispatch(np.roll(tokens, shift), key)
  np.testing.assert_array_equal(jax_magi.roll(ranks, key, shift), want)
  fun = jax.shard_map(
    lambda x, key: jax_magi.roll(x, key, shift),
    mesh=make_mesh(cp=4),
    in_specs=P("cp"),
    out_specs=P("cp"),
  )
  np.testing.assert_array_equal(jax.jit(fun)(ranks, key), want)


def test_mesh_of_the_context():
  mesh = make_mesh(cp=4)
  mask = _ANY["documents"]
  key = magi_attn_flex_key(mask, cp_size=4)
  inputs = make_inputs(np.random.default_rng(9), np.float32, _LENGTH, _LENGTH, 2, 2, 16, 16)
  order = [jax_magi.dispatch(x, key) for x in (inputs.q, inputs.k, inputs.v)]
  with jax.set_mesh(mesh):
    out, _ = jax.jit(jax_magi.context_parallel_attention)(*order, key)
  want, _ = _reference(inputs, mask)
  np.testing.assert_allclose(jax_magi.undispatch(np.asarray(out), key), want, atol=1e-5)
  with pytest.raises(ValueError, match="the mesh must have an axis 'cp'"):
    jax_magi.context_parallel_attention(*order, key)
  with pytest.raises(ValueError, match="reduce_max_logits=False is for calc_attn"):
    jax_magi.context_parallel_attention(
      *order, key, mesh=mesh, return_max_logits=True, reduce_max_logits=False
    )


def test_batches_of_batches():
  """Microbatches of rows with a mask each: vmap of vmap, in both orders."""
  mesh = make_mesh(cp=2)
  masks = [_ANY["documents"], _ANY["window"]]
  keys = [magi_attn_flex_key(m, cp_size=2, dispatch="zigzag", all_gather=False) for m in masks]
  x = np.random.default_rng(10).standard_normal((3, 2, _LENGTH, 2, 16)).astype(np.float32)
  order = np.stack(
    [np.stack([jax_magi.dispatch(row, k) for row, k in zip(b, keys, strict=True)]) for b in x]
  )
  attend = lambda x, key: jax_magi.calc_attn(x, x, x, key)[0]  # noqa: E731
  inner = jax.vmap(jax.vmap(attend, (0, 1)), (0, None))
  outer = jax.vmap(jax.vmap(attend, (0, None)), (1, 1), 1)
  for fun in (inner, outer):
    out = jax.jit(
      jax.shard_map(
        fun,
        mesh=mesh,
        in_specs=(P(None, None, "cp"), P("cp")),
        out_specs=P(None, None, "cp"),
      )
    )(order, jax_magi.stack_keys(keys))
    for i in range(3):
      for j, (mask, key) in enumerate(zip(masks, keys, strict=True)):
        want = jax_magi.attention(x[i, j], x[i, j], x[i, j], mask)[0]
        ours = jax_magi.undispatch(np.asarray(out)[i, j], key)
        np.testing.assert_allclose(ours, want, atol=1e-5)


def test_positions_of_a_rank():
  key = magi_attn_flex_key(AttentionMask.causal(96), cp_size=4)
  fun = jax.shard_map(
    jax_magi.get_position_ids, mesh=make_mesh(cp=4), in_specs=P("cp"), out_specs=P("cp")
  )
  np.testing.assert_array_equal(fun(key), jax_magi.get_position_ids(key))


def test_traced_dispatch_has_a_gradient():
  key = magi_attn_flex_key(AttentionMask.causal(91), cp_size=4)
  x = jnp.arange(91.0)

  @jax.jit
  def fun(x, key):
    return jax_magi.undispatch(jax_magi.dispatch(x, key) * 2, key)

  np.testing.assert_array_equal(fun(x, key), 2 * x)
  np.testing.assert_array_equal(jax.grad(lambda x: fun(x, key).sum())(x), np.full(91, 2.0))


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
  with pytest.raises(ValueError, match=r"mesh axis 'cp'.*not there"):
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
  """Of forward and backward calls, in a program for GPUs."""
  return [
    {int(x) for x in re.findall(rf"jax_magi_attention_{name}.*?sm_margin = (\d+)", text)}
    for name in ("forward", "backward")
  ]


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
  for value, message in (("-1", "not be negative, got -1"), ("four", "be an integer in the env")):
    monkeypatch.setenv(names[1], value)
    with pytest.raises(ValueError, match=f"{names[1]} must {message}"):
      _call(magi_attn_flex_key(AttentionMask.causal(96), cp_size=4))
  with pytest.raises(ValueError, match=r"a pair \(forward, backward\)"):
    _call(key, sm_margin=(1, 2, 3))
  monkeypatch.setattr(checks, "num_multiprocessors", lambda: 132)
  with pytest.raises(
    ValueError, match="less than the GPU's 132 streaming multiprocessors, got 132"
  ):
    _call(key, sm_margin=132)


def _call_with_mask():
  x = jnp.ones((8, 2, 16))
  jax_magi.calc_attn(x, x, x, AttentionMask.causal(8))


def test_outside_of_shard_map():
  key = magi_attn_flex_key(AttentionMask.causal(96), cp_size=4)
  x = jnp.ones((96, 2, 16))
  with pytest.raises(ValueError, match="inside shard_map"):
    jax_magi.calc_attn(x, x, x, key)


def test_a_key_for_all_ranks_may_be_closed_over():
  mask = _ANY["documents"]
  key = magi_attn_flex_key(mask, cp_size=4)
  inputs = make_inputs(np.random.default_rng(8), np.float32, _LENGTH, _LENGTH, 2, 2, 16, 16)
  fun = jax.shard_map(
    lambda q, k, v: jax_magi.calc_attn(q, k, v, key)[0],
    mesh=make_mesh(cp=4),
    in_specs=P("cp"),
    out_specs=P("cp"),
  )
  order = [jax_magi.dispatch(x, key) for x in (inputs.q, inputs.k, inputs.v)]
  out = jax_magi.undispatch(np.asarray(jax.jit(fun, compiler_options=FAST)(*order)), key)
  np.testing.assert_allclose(out, _reference(inputs, mask)[0], atol=1e-5)
