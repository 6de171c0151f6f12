"""Attention where JAX is used in uncommon ways: second derivatives, strict modes, debug modes."""

import contextlib
import functools

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask, reference
from jax_magi._src.transforms.eager import is_eager
from tests.arrays import assert_same_bits, assert_trees_close, normals
from tests.compilation import quick_jit
from tests.sizes import in_turns, name_of

_IMPLEMENTATIONS = ["cpu", "blockwise"]

# Two of six rows, and one of six keys, see or are seen by nothing.
_MASK = AttentionMask(np.array([[0, 4, 0, 5, -(2**30), 1]], np.int32), 6, 6)


def _operands():
  q, k, v, sink = normals((6, 4, 4), (6, 2, 4), (6, 2, 4), (4,))
  return q, k, v, sink


def _loss_of(out, lse):
  return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(jnp.where(lse > -jnp.inf, lse, 0.0)))


def _loss(q, k, v, sink, **options):
  out, meta = jax_magi.attention(q, k, v, _MASK, sink=sink, **options)
  return _loss_of(out, meta.lse)


def _expected_loss(q, k, v, sink, **options):
  out, lse, _ = reference.attention(q, k, v, _MASK.to_dense(), sink=sink, **options)
  return _loss_of(out, lse)


# --- second derivatives ---


@pytest.mark.parametrize(
  ("second", "softcap"), in_turns([jax.jacrev, jax.jacfwd], [3.0, 0.0], every=2), ids=name_of
)
def test_second_derivatives_of_blockwise(second, softcap):
  fun = functools.partial(_loss, implementation="blockwise", softcap=softcap)
  got = quick_jit(second(jax.grad(fun, (0, 1, 2, 3)), (0, 1, 2, 3)))(*_operands())
  expected = jax.hessian(functools.partial(_expected_loss, softcap=softcap), (0, 1, 2, 3))
  assert_trees_close(got, quick_jit(expected)(*_operands()))


def test_second_derivatives_of_blockwise_without_sink():
  q, k, v, _ = _operands()

  def hessian(fun, **options):
    return jax.jit(jax.hessian(lambda *x: fun(*x, None, **options), (0, 1, 2)))(q, k, v)

  assert_trees_close(hessian(_loss, implementation="blockwise"), hessian(_expected_loss))


@pytest.mark.parametrize("mapped", in_turns([(0, 0), (None, 0), (0, None)], every=3))
def test_vmap_of_hessian_vector_products(mapped):
  q, k, v, sink = _operands()
  qs, tangents = normals((3, *q.shape), (3, *q.shape), seed=1)
  points = [x if axis == 0 else x[0] for x, axis in zip((qs, tangents), mapped, strict=True)]

  def products(fun):
    def one(q, tangent):
      return jax.jvp(jax.grad(fun), (q, k, v, sink), (tangent, *map(np.zeros_like, (k, v, sink))))

    return quick_jit(jax.vmap(one, mapped))(*points)

  got = products(functools.partial(_loss, implementation="blockwise"))
  assert_trees_close(got, products(_expected_loss))


@pytest.mark.parametrize("implementation", ["cpu", None])
def test_kernels_say_that_they_have_no_second_derivative(implementation):
  q, k, v, sink = _operands()
  fun = functools.partial(_loss, implementation=implementation)
  for wrap in (jax.jit, lambda f: f):
    with pytest.raises(NotImplementedError, match='second derivatives; implementation="blockwise"'):
      wrap(jax.hessian(fun))(q, k, v, sink)


# --- vmap of control flow ---


def _cond(index, x, attend):
  return jax.lax.cond(index > 0, attend, lambda x: x, x)


def _switch(index, x, attend):
  return jax.lax.switch(index, [attend, lambda x: x, lambda x: 2.0 * x], x)


def _scan(index, x, attend):
  def step(x, i):
    return attend(x * (1.0 + i)), None

  return jax.lax.scan(step, x, index.astype(np.float32) + jnp.arange(2.0))[0]


@pytest.mark.parametrize(
  ("implementation", "control", "mapped"),
  in_turns([None, "blockwise"], [_cond, _switch, _scan], ["both", "index"]),
  ids=name_of,
)
def test_vmap_of_control_flow(implementation, control, mapped):
  index = np.array([0, 1, 2], np.int32)
  (x,) = normals((3, 6, 2, 4))
  x = x if mapped == "both" else x[0]

  def attend(x):
    return jax_magi.attention(x, x, x, _MASK, implementation=implementation)[0]

  def loss(x, index):
    return jnp.sin(control(index, x, attend)).sum()

  def loop(fun):
    results = [fun(x[i] if mapped == "both" else x, index[i]) for i in range(3)]
    return jax.tree.map(lambda *x: jnp.stack(x), *results)

  axes = (0 if mapped == "both" else None, 0)
  # The two differ: without a derivative, the operation's constants are operands of the branches.
  for one in (loss, jax.value_and_grad(loss)):
    assert_trees_close(quick_jit(jax.vmap(one, axes))(x, index), loop(quick_jit(one)))


# --- strict modes ---


def _everything(q, k, v, sink, implementation):
  """A number that depends on all public functions of attention, and on traced masks."""
  options = {"implementation": implementation, "softcap": 3.0}
  total = _loss(q, k, v, sink, **options)
  total += _loss(-q, k, v, jnp.stack([sink, sink]), **options, softmax_scale=-2.0)
  ranges = jnp.array([[0, 3], [3, 6]], np.int32)
  out, meta = jax_magi.flex_flash_attn_func(
    q, k, v, ranges, ranges, jnp.array([1, 2], np.int32), implementation=implementation
  )
  merged, lse = jax_magi.merge_attention([out, out], [meta.lse, meta.lse])
  total += jnp.sum(merged) + jnp.sum(lse)
  batched = [jnp.stack([x, x]) for x in (q, k, v)]
  attend = functools.partial(
    jax_magi.dot_product_attention, *batched, is_causal=True, implementation=implementation
  )
  lengths = jnp.array([2, 5], np.int32)
  ids = jnp.array([[1, 1, 2, 2, 2, 0]] * 2, np.int32)
  total += attend(query_seq_lengths=lengths, key_value_seq_lengths=lengths, sink=sink).sum()
  total += attend(segment_ids=ids, max_segments=2, local_window_size=2).sum()
  return total


def _traced_masks(slices, ids):
  mask = AttentionMask(slices, 6, 6)
  document = AttentionMask.from_segment_ids(ids, 2, causal=True, window=(2, 1))
  masks = (mask, mask + document, mask.crop(1, 4, 2, 5), mask.pad(4), document)
  return [(m.to_dense(), m.area()) for m in masks]


@pytest.mark.long
@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_values_are_the_same_with_promotion(implementation):
  """All other tests run without promotion; see `conftest.py`."""
  fun = jax.value_and_grad(functools.partial(_everything, implementation=implementation), (0, 3))
  expected = quick_jit(fun)(*_operands())
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    assert_same_bits(quick_jit(fun)(*_operands()), expected)


def test_vmap_of_everything_can_be_traced_without_promotion():
  operands = [jnp.stack([x, x]) for x in _operands()]
  # None traces the kernels and the plain path.
  fun = functools.partial(_everything, implementation=None)
  jax.eval_shape(jax.vmap(jax.grad(fun)), *operands)


def test_traced_masks_are_the_same_with_promotion():
  ids = np.array([1, 1, 0, 2, 2, 2], np.int32)
  slices = np.array(_MASK.slices)
  values = jax.jit(_traced_masks)(slices, ids)
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    assert_same_bits(values, jax.jit(_traced_masks)(slices, ids))
  with jax.enable_x64(True):
    jax.eval_shape(_traced_masks, slices.astype(np.int64), ids)


# --- eager calls compile once for all masks ---


@contextlib.contextmanager
def _count_compilations():
  events = []

  def listener(name, _, **__):
    if name == "/jax/core/compile/backend_compile_duration":
      events.append(name)

  jax.monitoring.register_event_duration_secs_listener(listener)
  try:
    yield events
  finally:
    jax.monitoring.unregister_event_duration_listener(listener)


def _grad(fun, q, k, v):
  return jax.grad(lambda q: jnp.sum(fun(q, k, v)))(q)


def _vmap(fun, q, k, v):
  return jax.vmap(fun)(*(jnp.stack([x, x]) for x in (q, k, v)))


def _vmap_of_grad(fun, q, k, v):
  return jax.vmap(jax.grad(lambda *x: jnp.sum(fun(*x))))(*(jnp.stack([x, x]) for x in (q, k, v)))


@pytest.mark.parametrize("transform", [_grad, _vmap, _vmap_of_grad])
@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_eager_transforms_compile_once_for_all_masks(implementation, transform):
  q, k, v, _ = _operands()

  def run(begin, end, lo):
    mask = AttentionMask(np.array([[begin, end, 0, 6, lo, 6]], np.int32), 6, 6)
    fun = functools.partial(jax_magi.attention, mask=mask, implementation=implementation)
    return transform(lambda *x: fun(*x)[0], q, k, v)

  masks = [(begin, end, lo) for begin in (0, 3) for end in (4, 5) for lo in range(3)]
  run(0, 6, -6)
  with _count_compilations() as compilations:
    for mask in masks:
      run(*mask)
  assert compilations == []


def test_is_eager_sees_through_grad_and_vmap():
  seen = []

  def look(x):
    seen.append(is_eager(x))
    return jnp.sum(x)

  x = np.ones(3, np.float32)
  look(x)
  jax.grad(look)(x)
  jax.vmap(look)(np.ones((2, 3), np.float32))
  jax.vmap(jax.grad(look))(np.ones((2, 3), np.float32))
  jax.jvp(look, (x,), (x,))
  jax.hessian(look)(x)
  assert seen and all(seen)
  seen.clear()
  jax.jit(look)(x)
  jax.grad(jax.jit(look))(x)
  jax.jit(jax.grad(look))(x)
  jax.jit(jax.vmap(jax.grad(look)))(np.ones((2, 3), np.float32))
  jax.lax.map(look, np.ones((2, 3), np.float32))
  assert seen and not any(seen)


# --- jax_debug_nans and jax_debug_infs ---


@pytest.mark.parametrize("has_sink", [True, False])
@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_debug_nans_finds_none_where_rows_see_nothing(implementation, has_sink):
  q, k, v, sink = _operands()
  fun = functools.partial(_loss, implementation=implementation)
  with jax.debug_nans(True):
    jax.grad(fun, (0, 1, 2, 3) if has_sink else (0, 1, 2))(q, k, v, sink if has_sink else None)


@pytest.mark.parametrize("is_jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_debug_nans_blames_the_operation_that_made_one(implementation, is_before, is_jit):
  q, k, v, _ = _operands()

  def fun(q):  # Without a sink, rows that see nothing have an lse of -inf.
    if is_before:
      return _loss(jnp.log(q - 100.0), k, v, None, implementation=implementation)
    return jnp.log(_loss(q, k, v, None, implementation=implementation) - 1000.0)

  for one in (fun, jax.value_and_grad(fun)):
    with (
      jax.debug_nans(True),
      pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in log"),
    ):
      jax.block_until_ready((jax.jit(one) if is_jit else one)(q))


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_debug_infs_finds_none_where_all_rows_see_something(implementation):
  q, k, v, _ = _operands()
  causal = AttentionMask.causal(6)

  def fun(q):
    out, meta = jax_magi.attention(q, k, v, causal, implementation=implementation)
    again = jax_magi.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    return jnp.sum(jnp.sin(out)) + jnp.sum(meta.lse) + jnp.sum(jnp.sin(again))

  with jax.debug_infs(True):
    jax.grad(fun)(q)


# --- integers ---


def test_traced_wide_integers_do_not_wrap():
  with jax.enable_x64(True):

    def dense(end):
      ranges = jnp.stack([jnp.zeros_like(end), end])[None]
      return AttentionMask.from_ranges(ranges, ranges, q_len=4, k_len=4).to_dense()

    assert jax.jit(dense)(np.int64(2**32)).all()
    assert not jax.jit(dense)(np.int64(-(2**32) + 3)).any()
    assert jax.jit(dense)(np.uint32(2**32 - 1)).all()


@pytest.mark.parametrize("is_tall", [True, False])
def test_many_slices_along_one_axis_are_checked(is_tall):
  n = 10_000
  begin = np.arange(n)
  narrow, whole = np.stack([begin, begin + 1], 1), np.tile([0, n], (n, 1))
  ranges = (whole, narrow) if is_tall else (narrow, whole)
  AttentionMask.from_ranges(*ranges)
  ranges[int(is_tall)][-1] -= 1
  with pytest.raises(ValueError, match="slices 9998 and 9999 overlap"):
    AttentionMask.from_ranges(*ranges)


def test_slices_cannot_be_changed():
  slices = np.array([[0, 4, 0, 4, -(2**30), 0]], np.int32)
  mask = AttentionMask(slices, 4, 4)
  with pytest.raises(ValueError, match="read-only"):
    mask.slices[0, 1] = 100
  slices[0, 1] = 2  # The caller's own stays writable, and the mask as it was.
  assert mask.slices[0, 1] == 4
