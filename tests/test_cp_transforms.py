"""Context parallelism together with other features of JAX: batches, meshes, scans; token order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask, magi_attn_flex_key
from tests.accuracy import make_inputs
from tests.cp_runs import LENGTH, MASKS, NATIVE, make_mesh, on_one_device
from tests.sizes import in_turns


def test_scan_over_layers_with_checkpoint():
  mesh = make_mesh(cp=4)
  mask = MASKS["documents"]
  key = magi_attn_flex_key(mask, cp_size=4, overlap_degree=2)
  rng = np.random.default_rng(5)
  x = rng.standard_normal((LENGTH, 2, 16)).astype(np.float32)
  weights = rng.standard_normal((3, 3, 16, 16)).astype(np.float32) / 4

  def model(attend):
    @jax.checkpoint
    def layer(x, w):
      q, k, v = (x @ w[i] for i in range(3))
      out, meta = attend(q, k, v)
      return x + out, meta.max_logits

    return layer

  def one_device(weights):
    attend = lambda q, k, v: jax_magi.attention(  # noqa: E731
      q, k, v, mask, return_max_logits=True, implementation=NATIVE
    )
    out, maxima = jax.lax.scan(model(attend), x, weights)
    return (out**2).sum(), maxima

  def ranks(weights):
    def body(x, key, weights):
      attend = lambda q, k, v: jax_magi.calc_attn(  # noqa: E731
        q, k, v, key, return_max_logits=True, reduce_max_logits=False, implementation=NATIVE
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


@pytest.mark.parametrize(
  ("axis_type", "is_stack"), in_turns([AxisType.Auto, AxisType.Explicit], [False, True]), ids=str
)
def test_whole_arrays_with_batch_and_heads(axis_type, is_stack):
  """dp x cp x tp, in plain jit."""
  mesh = make_mesh(axis_type, dp=2, cp=2, tp=2)
  masks = [MASKS["documents"], MASKS["window"]] if is_stack else [MASKS["documents"]] * 2
  keys = [
    magi_attn_flex_key(m, cp_size=2, dispatch="zigzag", transport="all_to_all") for m in masks
  ]
  key = jax_magi.stack_keys(keys) if is_stack else keys[0]
  rng = np.random.default_rng(6)
  rows = [make_inputs(rng, np.float32, LENGTH, LENGTH, 4, 2, 16, 16, num_sinks=0) for _ in masks]
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

  def one_device(q, k, v, sink, dout, mask):
    out, meta = jax_magi.attention(
      q, k, v, mask, sink=sink, return_max_logits=True, implementation=NATIVE
    )
    return (out * dout).sum(), (out, meta)

  one_row = jax.jit(jax.value_and_grad(one_device, (0, 1, 2, 3), has_aux=True))
  dsink = 0.0
  for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
    arguments = (row.q, row.k, row.v, sink, row.dout, mask.pad(5))
    (_, (want, want_meta)), want_grads = one_row(*arguments)
    back = lambda x, i=i: jax_magi.undispatch(np.asarray(x)[i], keys[i])  # noqa: E731
    np.testing.assert_allclose(back(out), want, atol=1e-5)
    np.testing.assert_allclose(back(meta.lse), want_meta.lse, atol=1e-5)
    np.testing.assert_allclose(np.asarray(meta.max_logits)[i], want_meta.max_logits, atol=1e-5)
    for ours, wanted in zip(grads[:3], want_grads[:3], strict=True):
      np.testing.assert_allclose(back(ours), wanted, atol=2e-5)
    dsink += want_grads[3]
  np.testing.assert_allclose(np.asarray(grads[3]), dsink, atol=1e-4)


def test_heads_exchanged_on_another_axis():
  """In the style of Ulysses: rows of `sp` ranks become heads, and cp sees longer parts."""
  mesh = make_mesh(sp=2, cp=4)
  mask = MASKS["documents"]
  key = magi_attn_flex_key(mask, cp_size=4)
  inputs = make_inputs(np.random.default_rng(7), np.float32, LENGTH, LENGTH, 4, 2, 16, 16)
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
  want, meta = on_one_device(inputs, mask)
  np.testing.assert_allclose(jax_magi.undispatch(np.asarray(out), key), want, atol=1e-5)
  np.testing.assert_allclose(max_logits, meta.max_logits, atol=1e-5)


@pytest.mark.parametrize("length", [96, 91])
@pytest.mark.parametrize("shift", [-1, 1, -3, 3, 0, -7, 50])
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


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("shift", [-1, 2, -5])
def test_labels_stop_at_the_ends_of_documents(axis_type, shift):
  length = 46
  key = magi_attn_flex_key(AttentionMask.causal(length), cp_size=4, chunk_size=4)
  tokens = np.stack([np.arange(1, length + 1), np.arange(length) * 10 + 5], axis=1)
  want = np.zeros_like(tokens)
  for begin, end in ((0, 9), (9, 10), (10, 31), (31, length)):
    document = tokens[begin:end]
    kept = np.abs(shift) < end - begin
    if kept and shift < 0:
      want[begin : end + shift] = document[-shift:]
    elif kept:
      want[begin + shift : end] = document[:-shift]
  ids = np.repeat([3, 1, 2, 0], [9, 1, 21, 15])
  x, rows, want = (jax_magi.dispatch(one, key) for one in (tokens, ids, want))
  np.testing.assert_array_equal(jax_magi.roll(x, key, shift, segment_ids=rows), want)
  mesh = make_mesh(axis_type, cp=4)
  fun = jax.shard_map(
    lambda x, ids, key: jax_magi.roll(x, key, shift, segment_ids=ids),
    mesh=mesh,
    in_specs=P("cp"),
    out_specs=P("cp"),
  )
  with jax.set_mesh(mesh):
    placed = jax.device_put((x, rows, key), NamedSharding(mesh, P("cp")))
    np.testing.assert_array_equal(jax.jit(fun)(*placed), want)
    whole = jax.jit(lambda x, ids, key: jax_magi.roll(x, key, shift, segment_ids=ids))
    np.testing.assert_array_equal(whole(*placed), want)


@pytest.mark.parametrize("shift", [-1, -9])
def test_labels_of_new_documents_compile_nothing_and_have_gradients(shift):
  """Rows are what the shift by a matrix of zeros and ones makes of them, and so are gradients."""
  length = 46
  mesh = make_mesh(cp=4)
  rng = np.random.default_rng(0)
  x, dy = rng.standard_normal((2, length, 3)).astype(np.float32)

  def labels(x, ids, key):
    return jax_magi.roll(x, key, shift, segment_ids=ids)

  specs = {"mesh": mesh, "in_specs": P("cp"), "out_specs": P("cp")}

  @jax.jit
  def run(x, ids, key, dy):
    found = []
    for fun in (labels, jax.shard_map(labels, **specs)):
      y, pull = jax.vjp(lambda x, fun=fun: fun(x, ids, key), x)
      found.append((y, *pull(dy)))
    return found

  for lengths in ([9, 1, 21, 15], [30, 2, 3, 11]):
    ids = np.repeat([3, 1, 2, 0], lengths)
    key = magi_attn_flex_key(AttentionMask.causal(length), cp_size=4, chunk_size=4)
    comes_from = np.eye(length, k=-shift, dtype=np.float32) * (ids[:, None] == ids)
    rows = (x, ids, dy, comes_from @ x, comes_from.T @ dy)
    own, own_ids, own_dy, *expected = (jax_magi.dispatch(one, key) for one in rows)
    for found in run(own, own_ids, key, own_dy):
      for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
  assert run._cache_size() == 1


def test_mesh_of_the_context():
  mesh = make_mesh(cp=4)
  mask = MASKS["documents"]
  key = magi_attn_flex_key(mask, cp_size=4)
  inputs = make_inputs(np.random.default_rng(9), np.float32, LENGTH, LENGTH, 2, 2, 16, 16)
  order = [jax_magi.dispatch(x, key) for x in (inputs.q, inputs.k, inputs.v)]
  with jax.set_mesh(mesh):
    out, _ = jax.jit(jax_magi.context_parallel_attention)(*order, key)
  want, _ = on_one_device(inputs, mask)
  np.testing.assert_allclose(jax_magi.undispatch(np.asarray(out), key), want, atol=1e-5)
  with pytest.raises(ValueError, match="the mesh must have an axis 'cp'"):
    jax_magi.context_parallel_attention(*order, key)
  with pytest.raises(ValueError, match="reduce_max_logits=False needs calc_attn"):
    jax_magi.context_parallel_attention(
      *order, key, mesh=mesh, return_max_logits=True, reduce_max_logits=False
    )


def test_batches_of_batches():
  """Microbatches of rows with one mask each: vmap of vmap, in both orders."""
  mesh = make_mesh(cp=2)
  masks = [MASKS["documents"], MASKS["window"]]
  keys = [
    magi_attn_flex_key(m, cp_size=2, dispatch="zigzag", transport="all_to_all") for m in masks
  ]
  x = np.random.default_rng(10).standard_normal((3, 2, LENGTH, 2, 16)).astype(np.float32)
  order = np.stack(
    [np.stack([jax_magi.dispatch(row, k) for row, k in zip(b, keys, strict=True)]) for b in x]
  )
  attend = lambda x, key: jax_magi.calc_attn(x, x, x, key, implementation=NATIVE)[0]  # noqa: E731
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


def test_lists_are_tokens():
  key = jax_magi.magi_attn_varlen_key([0, 5, 8], cp_size=2)
  tokens = list(range(8))
  rows = jax_magi.dispatch(tokens, key)
  np.testing.assert_array_equal(jax_magi.undispatch(rows.tolist(), key), tokens)
  np.testing.assert_array_equal(jax_magi.roll(rows.tolist(), key), jax_magi.roll(rows, key))


@pytest.mark.parametrize(("keep_remote_kv", "saves"), in_turns([False, True], [False, True]))
def test_checkpoint_policy_can_keep_the_results_of_ranks(saves, keep_remote_kv):
  """With a policy that saves only `CHECKPOINT_NAMES`, no forward kernel runs again."""
  key = magi_attn_flex_key(MASKS["documents"], cp_size=4, overlap_degree=1)
  own = "context" if keep_remote_kv else None
  names = () if not saves else [own] if own else jax_magi.CHECKPOINT_NAMES

  def rank(x, key):
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*names))
    def layer(x):
      attended, _ = jax_magi.calc_attn(
        *(x, x, x, key),
        keep_remote_kv=keep_remote_kv,
        checkpoint_names=own,
        implementation=NATIVE,
      )
      return jnp.sin(attended)

    # In a scan, because XLA's common subexpression elimination could remove the second calls.
    return jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=2)[0]

  ranks = jax.shard_map(rank, mesh=make_mesh(cp=4), in_specs=P("cp"), out_specs=P("cp"))
  x = np.zeros((LENGTH, 2, 16), np.float32)
  grad = jax.jit(jax.grad(lambda x: ranks(x, key).sum()))
  text = grad.lower(jax_magi.dispatch(x, key)).compile().as_text()
  once = jax.jit(ranks).lower(jax_magi.dispatch(x, key), key).compile().as_text()
  forward = 'custom_call_target="jax_magi_attention_forward"'
  assert text.count(forward) == (1 if saves else 2) * once.count(forward) > 0
