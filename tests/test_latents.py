"""Ranks that exchange latents compute the same as one device with expanded keys and values."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask, magi_attn_flex_key, magi_attn_varlen_key
from tests import latent_runs
from tests.accuracy import DTYPES, check_close
from tests.cp_runs import LENGTH, MASKS, NATIVE, make_mesh
from tests.latent_runs import check_equal, expand, make_operands, on_one_device, on_ranks
from tests.sizes import in_turns


@functools.cache
def _operands():
  return make_operands(np.random.default_rng(0), LENGTH)


@functools.cache
def _expected(name, **options):
  return on_one_device(_operands(), MASKS[name], **options)


@pytest.mark.parametrize(
  ("overlap_degree", "transport"),
  in_turns([1, 0, 2, 4], ["two_level", "all_to_all", "all_gather", "ragged"], every=2),
)
def test_every_degree_and_transport(overlap_degree, transport):
  """All masks through one compiled program; documents are packed in some of them."""
  # The size of nodes makes no difference to the other two transports.
  sizes = {"two_level": {0: 4, 1: 2, 2: 4, 4: 2}, "all_gather": {0: 2, 1: 4, 2: 2, 4: 4}}
  options = {"cp_size": 8, "overlap_degree": overlap_degree, "transport": transport}
  options["ranks_per_node"] = sizes[transport][overlap_degree] if transport in sizes else 8
  keys = [magi_attn_flex_key(mask, **options) for mask in MASKS.values()]
  room = functools.reduce(lambda a, b: a | b, (key.capacities for key in keys))
  for name, mask in MASKS.items():
    key = magi_attn_flex_key(mask, capacities=room, **options)
    ours = on_ranks(_operands(), key, make_mesh(cp=8), deterministic=overlap_degree == 1)
    check_equal(ours, _expected(name))


@pytest.mark.parametrize(
  "options",
  [{"keep_remote_kv": True}, {"check_vma": False}, {"softcap": 2.0, "softmax_scale": -0.3}],
  ids=lambda options: next(iter(options)),
)
def test_options(options):
  key = magi_attn_flex_key(MASKS["window"], cp_size=4, overlap_degree=2)
  shared = {name: x for name, x in options.items() if name.startswith("soft")}
  check_equal(on_ranks(_operands(), key, make_mesh(cp=4), **options), _expected("window", **shared))


@pytest.mark.parametrize(("overlap_degree", "keeps"), in_turns([2, 4, 1], [False, True], every=2))
def test_stages_of_whole_queries(overlap_degree, keeps):
  """Forward stages expand all rows that have arrived; backward stages those of one transfer."""
  options = {"overlap_degree": (overlap_degree,), "links": jax_magi.Links(merge_seconds=1.0)}
  key = magi_attn_flex_key(MASKS["documents"], cp_size=4, **options)
  assert key.whole_slices is not None
  ours = on_ranks(_operands(), key, make_mesh(cp=4), keep_remote_kv=keeps)
  check_equal(ours, _expected("documents"))


def test_one_rank():
  key = magi_attn_flex_key(MASKS["documents"], cp_size=1, overlap_degree=2)
  check_equal(on_ranks(_operands(), key, make_mesh(cp=1)), _expected("documents"))


def test_parts_of_stages_without_a_row():
  """Each stage has room for one row, and some of them are divided in the backward pass."""
  ends = [0, LENGTH // 4, LENGTH // 2, 3 * LENGTH // 4, LENGTH]
  key = magi_attn_varlen_key(
    ends, causal=True, cp_size=4, overlap_degree=4, transport="all_to_all", dispatch="contiguous"
  )
  assert key.capacities.rows == (1, 1, 1, 1)
  expected = on_one_device(_operands(), AttentionMask.from_cu_seqlens(ends, causal=True))
  check_equal(on_ranks(_operands(), key, make_mesh(cp=4)), expected)


def test_low_precision():
  """Latents in bfloat16, within the rule: twice the error of the plain computation."""
  mask = MASKS["documents"]
  operands = make_operands(np.random.default_rng(1), LENGTH, DTYPES["bf16"])
  wide = jax.tree.map(lambda x: np.asarray(x, np.float32), operands)
  key = magi_attn_flex_key(mask, cp_size=4, overlap_degree=1)
  truth, plain = on_one_device(wide, mask), on_one_device(operands, mask)
  for name, x in on_ranks(operands, key, make_mesh(cp=4)).items():
    check_close(name, x, truth[name], plain[name], DTYPES["bf16"])


def test_rows_of_several_dtypes_travel_as_they_are():
  """Positions, flags and floats of two sizes. Only floats have gradients, in their dtypes."""
  mask = MASKS["documents"]
  key = magi_attn_flex_key(mask, cp_size=4, overlap_degree=2)
  rng = np.random.default_rng(2)
  latent = {
    "wide": rng.standard_normal((LENGTH, 2, 8)).astype(np.float32),
    "half": rng.standard_normal((LENGTH, 6)).astype(jnp.bfloat16),
    "position": (np.arange(LENGTH) + 2**20 + 1).astype(np.int32),
    "flag": rng.random((LENGTH, 1)) < 0.5,
  }
  q = rng.standard_normal((LENGTH, 2, 16)).astype(np.float32)

  def expand(rows):
    angle = (rows["position"] - 2**20)[:, None, None].astype(np.float32)
    half = rows["half"].astype(np.float32)
    half = jnp.where(rows["flag"], half, -half)
    flat = jnp.concatenate([half, half[:, :2]], axis=1)[:, None]
    k = jnp.concatenate([rows["wide"] * jnp.cos(angle), rows["wide"] + flat], axis=2)
    return k, rows["wide"] * 2

  def both(attend, latent, q):
    def loss(floats, q):
      out, _ = attend(q, latent | floats)
      return (jnp.sin(out)).sum(), out

    floats = {name: latent[name] for name in ("wide", "half")}
    return jax.value_and_grad(loss, (0, 1), has_aux=True)(floats, q)

  def ranks(q, latent):
    fun = lambda q, latent, key: jax_magi.calc_latent_attn(  # noqa: E731
      q, latent, key, expand=expand, implementation=NATIVE
    )[0]
    fun = jax.shard_map(fun, mesh=make_mesh(cp=4), in_specs=P("cp"), out_specs=P("cp"))
    return fun(q, latent, key), None

  order = jax.tree.map(lambda x: jax_magi.dispatch(x, key), (latent, q))
  (_, out), grads = jax.jit(functools.partial(both, ranks))(*order)
  one_device = lambda q, latent: jax_magi.attention(  # noqa: E731
    q, *expand(latent), mask, implementation=NATIVE
  )
  (_, want), want_grads = jax.jit(functools.partial(both, one_device))(latent, q)
  assert grads[0]["half"].dtype == jnp.bfloat16
  back = jax.tree.map(lambda x: jax_magi.undispatch(np.asarray(x), key), (out, grads))
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(back), jax.tree.leaves((want, want_grads)), strict=True
  ):
    x, y = (np.asarray(array, np.float32) for array in (x, y))
    # With bfloat16 rows, the part of each of four ranks is rounded, and so is their sum.
    allowed = 4 * 2**-9 * np.abs(y).max() if "half" in str(path) else 2e-5
    np.testing.assert_allclose(x, y, atol=allowed, rtol=0, err_msg=str(path))


@pytest.mark.parametrize(
  "axis_type",
  [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.long)],
  ids=str,
)
def test_whole_arrays_with_batch_and_heads(axis_type):
  """dp x cp x tp in plain jit: each device expands its own heads; a mask for each row."""
  mesh = make_mesh(axis_type, dp=2, cp=2, tp=2)
  masks = [MASKS["documents"], MASKS["window"]]
  keys = [
    magi_attn_flex_key(m, cp_size=2, dispatch="zigzag", transport="all_to_all") for m in masks
  ]
  rows = [make_operands(np.random.default_rng(seed), LENGTH) for seed in (3, 4)]
  params = rows[0][2]

  def stacked(which):
    found = [
      jax.tree.map(lambda x, key=key: jax_magi.dispatch(x, key), row[which])
      for row, key in zip(rows, keys, strict=True)
    ]
    return jax.tree.map(lambda *x: np.stack(x), *found)

  specs = {"scale": P(), "kv_b": P(None, "tp")}
  q, dout = (
    jax.device_put(x, NamedSharding(mesh, P("dp", "cp", "tp"))) for x in (stacked(0), stacked(3)[0])
  )
  latent = jax.device_put(stacked(1), NamedSharding(mesh, P("dp", "cp")))
  key = jax.device_put(jax_magi.stack_keys(keys), NamedSharding(mesh, P("cp", "dp")))
  params_there = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in params.items()}

  @jax.jit
  def fun(q, latent, params, key):
    def loss(q, latent, params):
      out, meta = jax_magi.context_parallel_latent_attention(
        q,
        latent,
        key,
        expand=expand,
        params=params,
        param_specs=specs,
        mesh=mesh,
        batch_axis="dp",
        head_axis="tp",
        return_max_logits=True,
      )
      return (out * dout).sum(), (out, meta)

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, latent, params)

  with jax.set_mesh(mesh):
    (_, (out, meta)), (dq, dlatent, dparams) = fun(q, latent, params_there, key)
  total = jax.tree.map(np.zeros_like, params)
  for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
    no_dlse = (row[3][0], np.zeros_like(row[3][1]))
    want = on_one_device((*row[:2], params, no_dlse), mask)
    back = lambda x, i=i: jax_magi.undispatch(np.asarray(x)[i], keys[i])  # noqa: E731
    ours = latent_runs.named(
      back(out),
      back(meta.lse),
      np.asarray(meta.max_logits)[i],
      (back(dq), jax.tree.map(back, dlatent), {n: want[f"params {n}"] for n in params}),
    )
    check_equal(ours, want)
    total = {n: total[n] + want[f"params {n}"] for n in params}
  for name, x in total.items():
    np.testing.assert_allclose(np.asarray(dparams[name]), x, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
  "transport", ["all_to_all", pytest.param("all_gather", marks=pytest.mark.long)]
)
def test_layers_in_a_scan_with_checkpoint_and_vmap(transport):
  """Parameters of each layer are closed over, and differentiated through the scan."""
  masks = [MASKS["documents"], MASKS["window"]]
  options = {"cp_size": 4, "overlap_degree": 2, "transport": transport, "dispatch": "zigzag"}
  keys = [magi_attn_flex_key(m, **options) for m in masks]
  rng = np.random.default_rng(5)
  x = rng.standard_normal((2, LENGTH, 2, 8)).astype(np.float32)
  weights = rng.standard_normal((3, 16, 2, 16)).astype(np.float32) / 4

  def layer(attend, x, w):
    def one(x, mask):
      def expand(rows):
        # `silu` and `checkpoint` are calls inside what is traced; `w` is used in both.
        both = jax.checkpoint(lambda rows: jnp.einsum("tr,rhd->thd", rows, w))(rows)
        return jax.nn.silu(both[..., :8]), both[..., 8:] * w.mean()

      return x + attend(x, x.reshape(len(x), 16), mask, expand)

    return one

  def model(attend, x, masks, weights, in_axis):
    @jax.checkpoint
    def body(x, w):
      return jax.vmap(layer(attend, x, w), in_axes=(0, in_axis))(x, masks), None

    return jax.lax.scan(body, x, weights)[0]

  def ranks(x, weights, key):
    attend = lambda q, x, key, expand: jax_magi.calc_latent_attn(  # noqa: E731
      q, x, key, expand=expand, implementation=NATIVE
    )[0]
    return jax.lax.psum((model(attend, x, key, weights, 1) ** 2).sum(), "cp")

  def one_device(x, weights):
    attend = lambda q, x, mask, expand: jax_magi.attention(  # noqa: E731
      q, *expand(x), mask, implementation=NATIVE
    )[0]
    total = 0.0
    for y, mask in zip(x, masks, strict=True):
      body = lambda y, w, mask=mask: (layer(attend, y, w)(y, mask), None)  # noqa: E731
      total += (jax.lax.scan(body, y, weights)[0] ** 2).sum()
    return total

  order = np.stack([jax_magi.dispatch(row, key) for row, key in zip(x, keys, strict=True)])
  fun = jax.shard_map(
    ranks, mesh=make_mesh(cp=4), in_specs=(P(None, "cp"), P(), P("cp")), out_specs=P()
  )
  loss, grads = jax.jit(jax.value_and_grad(fun, (0, 1)))(order, weights, jax_magi.stack_keys(keys))
  want, want_grads = jax.jit(jax.value_and_grad(one_device, (0, 1)))(x, weights)
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  np.testing.assert_allclose(
    grads[1], want_grads[1], rtol=1e-4, atol=1e-4 * np.abs(want_grads[1]).max()
  )
  for i, key in enumerate(keys):
    dx = jax_magi.undispatch(np.asarray(grads[0])[i], key)
    np.testing.assert_allclose(dx, want_grads[0][i], atol=1e-4 * np.abs(want_grads[0]).max())


def test_one_device_keeps_latents_alone():
  """Results and gradients equal those of expanded keys, which are not among the residuals."""
  mask = MASKS["documents"]

  def attend(q, latent, params):
    return jax_magi.latent_attention(
      q, latent, mask, expand=lambda rows: expand(rows, params), return_max_logits=True
    )

  # No query sees rows from 93 on, which are zeros. The gradient of their norm is not finite.
  q, latent, params, cotangents = _operands()
  latent = jax.tree.map(lambda x: np.where(np.arange(LENGTH)[:, None] < 93, x, 0), latent)
  operands = q, latent, params, cotangents
  ours = on_one_device(operands, mask, attend)
  want = _expected("documents")
  check_equal({n: ours[n] for n in want}, want)

  # Only q and out have the shapes of k and v, and nothing has the shape from which both are cut.
  _, vjp = jax.vjp(lambda *x: attend(*x)[0], q, latent, params)
  kept = collections.Counter(x.shape[x.shape[0] == 1 :] for x in jax.tree.leaves(vjp))
  k, v = jax.eval_shape(expand, latent, params)
  assert kept[k.shape] == kept[v.shape] == 1
  assert kept[LENGTH, latent_runs.HEADS, k.shape[2] + v.shape[2] - latent_runs.ROPE] == 0
  text = jax.jit(jax.grad(lambda *x: attend(*x)[0].sum())).lower(q, latent, params).compile()
  assert text.as_text().count('custom_call_target="jax_magi_attention_forward"') == 1


def test_bad_input_is_named():
  key = magi_attn_flex_key(AttentionMask.causal(96), cp_size=4)
  mesh = make_mesh(cp=4)

  def call(latent, expand=lambda x: (x, x), **options):
    q = jnp.ones((96, 2, 16))
    fun = lambda q, x, key: jax_magi.calc_latent_attn(q, x, key, expand=expand, **options)[0]  # noqa: E731
    fun = jax.shard_map(fun, mesh=mesh, in_specs=P("cp"), out_specs=P("cp"))
    return jax.eval_shape(fun, q, latent, key)

  x = jnp.ones((96, 2, 16))
  call(x)
  with pytest.raises(ValueError, match="latent must have the 24 rows of a rank"):
    call(jnp.ones((128, 2, 16)))
  with pytest.raises(ValueError, match="latent must have at least one array"):
    call({})
  with pytest.raises(ValueError, match=r"expand must return \(k, v\), got"):
    call(x, lambda x: x)
  with pytest.raises(ValueError, match="with the 24 rows that it was given"):
    call(x, lambda x: (x[:8], x[:8]))
  with pytest.raises(ValueError, match="expand's k must have q's dtype float32, got bfloat16"):
    call(x, lambda x: (x.astype(jnp.bfloat16), x))
  with pytest.raises(ValueError, match="latent must hold real numbers"):
    call(x.astype(np.complex64))
  with pytest.raises(ValueError, match="equally many rows"):
    call((x, jnp.ones((48, 2))))
  with pytest.raises(ValueError, match="keep_remote_kv must be True or False"):
    call(x, keep_remote_kv=1)


def test_replicated_parameters_in_a_loop_must_vary():
  """If `expand` passes them to a loop. Elsewhere, they are made to vary automatically."""
  key = magi_attn_flex_key(AttentionMask.causal(96), cp_size=4)
  mesh = make_mesh(cp=4)

  def step(x, w, key, *, varies):
    w = jax.lax.pcast(w, "cp", to="varying") if varies else w

    def expand(rows):
      looped = jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ w), rows)
      return looped, looped

    return jax.lax.psum(jax_magi.calc_latent_attn(x, x, key, expand=expand)[0].sum(), "cp")

  def trace(varies):
    specs = P("cp"), P(), P("cp")
    fun = functools.partial(step, varies=varies)
    fun = jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P())
    return jax.eval_shape(jax.grad(fun, 1), jnp.ones((96, 2, 16)), jnp.ones((16, 16)), key)

  assert trace(True).shape == (16, 16)
  with pytest.raises(NotImplementedError, match=r"replicated over a mesh axis.*pcast"):
    trace(False)
