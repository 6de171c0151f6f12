"""jit, vmap, scan, checkpoint, shardings: attention under JAX's transformations."""

import collections
import contextlib
import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask
from jax_magi._src.transforms import sharding
from tests.arrays import assert_trees_close, normals
from tests.cp_runs import NATIVE
from tests.sizes import in_turns, name_of

_IMPLEMENTATIONS = ["cpu", "blockwise"]
_TARGET = "jax_magi_attention_forward"


def _batch(batch=4, length=64, num_q_heads=8, num_kv_heads=4, dim=16):
  q = (batch, length, num_q_heads, dim)
  kv = (batch, length, num_kv_heads, dim)
  return normals(q, kv, kv)


def _masks(length, cuts):
  """One causal mask with two documents for each cut, stacked."""
  slices = [
    AttentionMask.from_segment_ids(np.repeat([1, 2], [c, length - c]), 2, causal=True).slices
    for c in cuts
  ]
  return np.stack(slices)


def _loss(q, k, v, slices, sink, implementation=NATIVE):
  mask = AttentionMask(slices, q.shape[0], k.shape[0])
  out, meta = jax_magi.attention(
    q, k, v, mask, sink=sink, return_max_logits=True, implementation=implementation
  )
  return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(meta.lse)), (out, meta)


# --- jit ---


def test_new_masks_of_one_shape_compile_once():
  q, k, v = (x[0] for x in _batch())
  traces = []

  @jax.jit
  def step(q, k, v, mask):
    traces.append(None)
    return jax.grad(lambda q: _loss(q, k, v, mask.slices, None)[0])(q)

  masks = [
    AttentionMask.causal(64).pad(3),
    AttentionMask.full(64).pad(3),
    AttentionMask.prefix_lm(20, 64).pad(3),
    AttentionMask.from_cu_seqlens([0, 10, 40, 64]),
    AttentionMask.sliding_window(64, left=3).pad(3),
  ]
  for mask in masks:
    got = step(q, k, v, mask)
    assert_trees_close(got, jax.grad(lambda q, m=mask: _loss(q, k, v, m.slices, None)[0])(q))
  assert len(traces) == 1
  assert step._cache_size() == 1


# --- vmap ---


@pytest.mark.parametrize(
  ("mapped", "implementation"),
  in_turns(["all", "mask_shared", "kv_shared", "only_mask", "only_sink"], _IMPLEMENTATIONS),
)
def test_vmap_is_a_loop(implementation, mapped):
  q, k, v = _batch()
  slices = _masks(64, [10, 20, 30, 64])
  (sink,) = normals((4, 8), seed=1)
  axes = {
    "all": (0, 0, 0, 0, 0),
    "mask_shared": (0, 0, 0, None, 0),
    "kv_shared": (0, None, None, 0, None),
    "only_mask": (None, None, None, 0, None),
    "only_sink": (None, None, None, None, 0),
  }[mapped]
  operands = [x if a == 0 else x[0] for x, a in zip((q, k, v, slices, sink), axes, strict=True)]
  fun = functools.partial(_loss, implementation=implementation)
  fun = jax.value_and_grad(fun, argnums=(0, 1, 2, 4), has_aux=True)
  got = jax.jit(jax.vmap(fun, axes))(*operands)
  one = jax.jit(fun)
  for i in range(4):
    single = [x[i] if a == 0 else x for x, a in zip(operands, axes, strict=True)]
    assert_trees_close(jax.tree.map(lambda x, i=i: x[i], got), one(*single))


def test_vmap_is_one_kernel_call_and_keeps_a_shared_mask_shared():
  q, k, v = _batch()
  mask = AttentionMask.causal(64)
  fun = jax.vmap(lambda q, k, v: jax_magi.attention(q, k, v, mask, implementation="cpu")[0])
  text = str(jax.make_jaxpr(fun)(q, k, v))
  assert text.count(f"target_name={_TARGET}") == 1
  assert "i32[1,1,6]" in text and "i32[4,1,6]" not in text


def test_vmap_of_vmap():
  q, k, v = _batch(6)
  slices = _masks(64, [10, 30])  # Over the outer axis only.
  nested = [x.reshape(2, 3, *x.shape[1:]) for x in (q, k, v)]
  fun = jax.grad(lambda *x: _loss(*x, None)[0], argnums=(0, 1, 2))
  got = jax.jit(jax.vmap(jax.vmap(fun, (0, 0, 0, None))))(*nested, slices)
  one = jax.jit(fun)
  for i in range(2):
    for j in range(3):
      expected = one(*(x[i, j] for x in nested), slices[i])
      assert_trees_close([x[i, j] for x in got], list(expected))


def test_vmap_over_another_axis():
  q, k, v = (x[0] for x in _batch())
  mask = AttentionMask.causal(64)
  stacked = [np.stack([x, 2 * x], axis=1) for x in (q, k, v)]
  out = jax.vmap(lambda *x: jax_magi.attention(*x, mask)[0], in_axes=1, out_axes=2)(*stacked)
  np.testing.assert_allclose(out[:, :, 0], jax_magi.attention(q, k, v, mask)[0], rtol=1e-6)


# --- scan and checkpoint ---


def test_scan_stacks_max_logits():
  x = normals((64, 4, 16))[0]
  mask = AttentionMask.causal(64)

  def layer(x, scale):
    out, meta = jax_magi.attention(scale * x, x, x, mask, return_max_logits=True)
    return out, meta.max_logits

  scales = np.array([1.0, 2.0, 3.0], np.float32)
  final, max_logits = jax.jit(lambda x: jax.lax.scan(layer, x, scales))(x)
  assert max_logits.shape == (3, 4)
  for scale, row in zip(scales, max_logits, strict=True):
    x, expected = layer(x, scale)
    np.testing.assert_allclose(row, expected, rtol=1e-5)
  np.testing.assert_allclose(final, x, rtol=1e-5, atol=1e-6)


_OWN = ("context", "context_lse")


@pytest.mark.parametrize(
  ("kept", "names", "num_forward_calls"),
  [((), None, 2), (jax_magi.CHECKPOINT_NAMES, None, 1), (_OWN[:1], _OWN[0], 1), (_OWN, _OWN, 1)],
)
def test_checkpoint_policy_can_keep_the_residuals(kept, names, num_forward_calls):
  policy = jax.checkpoint_policies.save_only_these_names(*kept)
  x = normals((64, 4, 16))[0]
  mask = AttentionMask.causal(64)

  @functools.partial(jax.checkpoint, policy=policy)
  def block(x):
    return jnp.sin(
      jax_magi.attention(x, x, x, mask, implementation="cpu", checkpoint_names=names)[0]
    )

  def loss(x):
    # In a scan, because XLA's common subexpression elimination could remove the second call.
    return jax.lax.scan(lambda x, _: (block(x), None), x, None, length=2)[0].sum()

  step = jax.jit(jax.value_and_grad(loss)).lower(x).compile()
  assert step.as_text().count(f'custom_call_target="{_TARGET}"') == num_forward_calls
  plain = jax.grad(lambda x: block.__wrapped__(block.__wrapped__(x)).sum())
  np.testing.assert_allclose(step(x)[1], jax.jit(plain)(x), rtol=1e-4, atol=1e-5)


# --- shardings ---


def _mesh(axis_type, shape=(4,), names=("x",)):
  return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))


@pytest.mark.parametrize("implementation", [None, *_IMPLEMENTATIONS])
def test_shard_map(implementation):
  mesh = _mesh(AxisType.Auto)
  q, k, v = _batch()
  slices = _masks(64, [10, 20, 30, 64])
  k, v = k[:1], v[:1]  # Replicated: their gradients are sums over devices.

  def local(q, k, v, slices):
    fun = functools.partial(_loss, implementation=implementation)
    loss, (out, meta) = jax.vmap(fun, (0, None, None, 0, None))(q, k[0], v[0], slices, None)
    return jax.lax.psum(loss.sum(), "x"), (out, meta.lse, meta.max_logits)

  sharded = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(P("x"), P(), P(), P("x")),
    out_specs=(P(), P("x")),
    check_vma=True,
  )
  got = jax.jit(jax.value_and_grad(sharded, (0, 1, 2), has_aux=True))(q, k, v, slices)

  def plain(q, k, v, slices):
    loss, (out, meta) = jax.vmap(_loss, (0, None, None, 0, None))(q, k[0], v[0], slices, None)
    return loss.sum(), (out, meta.lse, meta.max_logits)

  expected = jax.jit(jax.value_and_grad(plain, (0, 1, 2), has_aux=True))(q, k, v, slices)
  assert_trees_close(got, expected)


def test_shard_map_types_results_as_varying():
  q, k, v = _batch()
  mask = AttentionMask.causal(64)

  def local(q, k, v):
    return jax.vmap(lambda *x: jax_magi.attention(*x, mask)[0])(q, k, v)

  mesh = _mesh(AxisType.Auto)
  wrong = jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=True)
  with pytest.raises(ValueError, match="out_specs"):
    jax.jit(wrong)(q, k, v)


_SPECS = {
  "batch": P("x"),
  "heads": P(None, None, "x"),
  "batch_and_heads": P("x", None, "y"),
}


def _btnh(q, k, v, implementation=NATIVE):
  def fun(q, k, v):
    out, meta = jax_magi.dot_product_attention(
      *(q, k, v),
      is_causal=True,
      return_meta=True,
      return_max_logits=True,
      implementation=implementation,
    )
    return (out, meta.lse), meta.max_logits

  (out, lse), vjp, max_logits = jax.vjp(fun, q, k, v, has_aux=True)
  return out, lse, max_logits, vjp((out, lse))


_btnh_on_one_device = jax.jit(_btnh)


@pytest.mark.parametrize("spec", _SPECS)
@pytest.mark.parametrize("num_kv_heads", [8, 4])
def test_jit_keeps_batch_and_head_shardings(spec, num_kv_heads):
  if spec == "batch_and_heads":
    mesh = _mesh(AxisType.Auto, (2, 2), ("x", "y"))
  else:
    mesh = _mesh(AxisType.Auto)
  sharding = NamedSharding(mesh, _SPECS[spec])
  arrays = _batch(num_kv_heads=num_kv_heads)
  sharded = [jax.device_put(x, sharding) for x in arrays]
  compiled = jax.jit(_btnh).lower(*sharded).compile()
  for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
    assert collective not in compiled.as_text()
  got = compiled(*sharded)
  assert got[0].sharding.is_equivalent_to(sharding, 4)
  assert_trees_close(got, _btnh_on_one_device(*arrays))


@pytest.mark.parametrize(
  ("num_kv_heads", "axes"),
  [(1, "x"), (2, "x"), (2, ("a", "b")), (4, ("a", "b", "c"))],
  ids=["mqa", "more_devices_than_kv_heads", "kv_heads_on_one_axis", "kv_heads_on_two_axes"],
)
def test_query_heads_stay_split_over_more_devices_than_kv_heads(num_kv_heads, axes):
  names = tuple("abc") if axes != "x" else ("x",)
  mesh = _mesh(AxisType.Auto, (2, 2, 2) if axes != "x" else (4,), names)
  arrays = _batch(num_kv_heads=num_kv_heads)
  shardings = [NamedSharding(mesh, P(None, None, axes)), *[NamedSharding(mesh, P())] * 2]
  sharded = [jax.device_put(x, s) for x, s in zip(arrays, shardings, strict=True)]
  compiled = jax.jit(_btnh).lower(*sharded).compile()
  # Nothing with the size of q crosses devices.
  assert not re.search(r"\[4,64,8,16\]\S* (all-|collective-)", compiled.as_text())
  got = compiled(*sharded)
  assert got[0].sharding.is_equivalent_to(shardings[0], 4)
  assert_trees_close(got, _btnh_on_one_device(*arrays))


@pytest.mark.parametrize("spec", [P(None, "x"), P(None, None, None, "x"), P(None, None, "x")])
def test_jit_is_right_where_a_sharding_cannot_be_kept(spec):
  # Twelve query heads for three kv heads over four devices, sequences, head dims: gathered.
  arrays = _batch(num_q_heads=12, num_kv_heads=3)
  mesh = _mesh(AxisType.Auto)
  shardings = [NamedSharding(mesh, spec), *[NamedSharding(mesh, P())] * 2]
  sharded = [jax.device_put(x, s) for x, s in zip(arrays, shardings, strict=True)]
  assert_trees_close(jax.jit(_btnh)(*sharded), _btnh_on_one_device(*arrays))


@pytest.mark.usefixtures("without_kept_programs")
@pytest.mark.parametrize(
  "spec", [P(("c", "a"), None, "b"), P("b", "a", "c"), P(None, "b", ("a", "c"))], ids=str
)
def test_shardings_are_kept_on_meshes_with_many_axes(spec, monkeypatch):
  """The work grows at most linearly with the axes: trainers have a dozen, most of size 1."""
  arrays = _batch(length=32)
  events = collections.Counter()
  find_axes = sharding._find_axes

  def observed(mesh, *operands):
    def count(*_):
      events[len(mesh.axis_names)] += 1

    sys.setprofile(count)  # Calls and returns, on the thread that XLA calls it from.
    try:
      return find_axes(mesh, *operands)
    finally:
      sys.setprofile(None)

  monkeypatch.setattr(sharding, "_find_axes", observed)
  for num_axes in (3, 8, 12):
    names = tuple("abcdefghijkl"[:num_axes])
    mesh = _mesh(AxisType.Auto, (2,) * 3 + (1,) * (num_axes - 3), names)
    sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
    compiled = jax.jit(lambda *x: jax_magi.dot_product_attention(*x)).lower(*sharded).compile()
    assert_trees_close(compiled(*sharded), jax_magi.dot_product_attention(*arrays))
    kept = NamedSharding(mesh, P(spec[0], None, spec[2]))
    assert compiled.output_shardings.is_equivalent_to(kept, 4)
  assert events[8] <= 8 / 3 * events[3] > 0
  assert events[12] <= 4 * events[3]


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")])
def test_explicit_axes(spec):
  mesh = _mesh(AxisType.Explicit)
  arrays = _batch()
  expected = _btnh_on_one_device(*arrays)
  with jax.set_mesh(mesh):
    sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
    got = jax.jit(functools.partial(_btnh, implementation=None))(*sharded)
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
  assert_trees_close(jax.device_get(got), jax.device_get(expected))


@pytest.mark.parametrize("is_mesh_set", [True, False])
def test_explicit_axes_of_masks(is_mesh_set):
  """Document numbers and lengths that are sharded like the batch."""
  mesh = _mesh(AxisType.Explicit)
  arrays = _batch()
  ids = np.stack([np.repeat([1, 2], [c, 64 - c]) for c in (10, 20, 30, 64)]).astype(np.int32)
  lengths = np.array([64, 10, 30, 1], np.int32)

  def run(q, k, v, ids, lengths):
    by_ids = jax_magi.dot_product_attention(q, k, v, segment_ids=ids, max_segments=2)
    by_lengths = jax_magi.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)

    def one(q, k, v, ids):
      mask = AttentionMask.from_segment_ids(ids, 2, causal=True)
      return jax_magi.attention(q, k, v, mask)[0]

    return by_ids, by_lengths, jax.vmap(one)(q, k, v, ids)

  expected = jax.jit(run)(*arrays, ids, lengths)
  sharded = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in (*arrays, ids, lengths)]
  with jax.set_mesh(mesh) if is_mesh_set else contextlib.nullcontext():
    got = jax.jit(run)(*sharded)
  assert_trees_close(jax.device_get(got), jax.device_get(expected))


@pytest.mark.parametrize(
  ("implementation", "lengths", "dtype"),
  in_turns([*_IMPLEMENTATIONS, None], [(0, 5), (5, 0), (0, 0)], [jnp.float32, jnp.bfloat16]),
  ids=name_of,
)
def test_empty_sequences(implementation, lengths, dtype):
  q_len, k_len = lengths
  q, k, v = (x.astype(dtype) for x in normals((q_len, 4, 8), (k_len, 2, 8), (k_len, 2, 8)))
  attend = functools.partial(
    jax_magi.attention,
    mask=AttentionMask.full(q_len, k_len),
    return_max_logits=True,
    implementation=implementation,
  )
  grad = jax.grad(lambda *x: attend(*x)[0].sum(), (0, 1, 2))
  for g, x in zip(grad(q, k, v), (q, k, v), strict=True):
    assert g.shape == x.shape and (g == 0).all()
  out, meta = attend(q, k, v)
  assert (out == 0).all() and (meta.lse == -jnp.inf).all() and (meta.max_logits == -jnp.inf).all()


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_traced_slices_may_reach_beyond_the_arrays(implementation):
  length = 600
  q, k, v = normals((length, 4, 8), (length, 2, 8), (length, 2, 8))
  beyond = np.array([[-5, length + 9, -7, length + 100, -(2**30), 2**30]], np.int32)
  fun = functools.partial(_loss, implementation=implementation, sink=None)
  step = jax.jit(jax.value_and_grad(fun, (0, 1, 2), has_aux=True))
  found = step(q, k, v, beyond)
  wanted = step(q, k, v, AttentionMask.full(length).slices)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, wanted)


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_lse_of_rows_that_see_nothing_has_no_gradient(implementation):
  q, k, v = normals((200, 4, 8), (200, 2, 8), (200, 2, 8))
  mask = AttentionMask(np.array([[0, 40, 0, 40, -(2**30), 2**30]], np.int32), 200, 200)
  is_valid = np.arange(200)[:, None] < 40

  def fun(q, k, v):
    lse = jax_magi.attention(q, k, v, mask, implementation=implementation)[1].lse
    return jnp.where(is_valid, lse**2, 0.0).sum()  # Its gradient is 0 * inf for other rows.

  for gradient in jax.grad(fun, (0, 1, 2))(q, k, v):
    assert np.isfinite(gradient).all()
    assert (gradient[40:] == 0).all()


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_scale_that_underflows_is_zero(implementation):
  q, k, v = normals((20, 4, 8), (20, 2, 8), (20, 2, 8))
  fun = functools.partial(
    jax_magi.attention, q, k, v, AttentionMask.causal(20), implementation=implementation
  )
  np.testing.assert_array_equal(fun(softmax_scale=1e-50)[0], fun(softmax_scale=0.0)[0])
