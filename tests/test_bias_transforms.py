"""Bias and ALiBi slopes under JAX's transformations, and what they cost."""

import functools
import math
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask, reference
from tests.arrays import assert_trees_close, normals
from tests.cp_runs import NATIVE
from tests.sizes import in_turns

_BATCH, _LENGTH, _HEADS = 4, 40, 8
_TARGETS = ("jax_magi_attention_forward", "jax_magi_attention_backward")
IMPLEMENTATIONS = ["cpu", "blockwise"]
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def _arrays(lead=(_BATCH,), length=_LENGTH):
  q, k = (*lead, length, _HEADS, 16), (*lead, length, 4, 16)
  return normals(q, k, k)


def _bias(shape, length=_LENGTH):
  sizes = {"b": _BATCH, "h": _HEADS, "q": length, "k": length, "1": 1}
  return normals(tuple(sizes[letter] for letter in shape), seed=1)[0]


def _slopes(*lead):
  return normals((*lead, _HEADS), seed=2)[0] / 8


def _loss(q, k, v, bias, slopes, implementation=None, slices=None):
  slices = AttentionMask.causal(q.shape[0], k.shape[0]).slices if slices is None else slices
  mask = AttentionMask(slices, q.shape[0], k.shape[0])
  out, meta = jax_magi.attention(
    q, k, v, mask, bias=bias, alibi_slopes=slopes, implementation=implementation
  )
  return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(meta.lse))


def _btnh(q, k, v, bias, slopes, implementation=NATIVE, **options):
  out, lse = jax_magi.dot_product_attention(
    *(q, k, v, bias),
    alibi_slopes=slopes,
    is_causal=True,
    return_residual=True,
    implementation=implementation,
    **options,
  )
  return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))


_gradients = functools.partial(jax.value_and_grad, argnums=(0, 1, 2, 3, 4))
_gradients_of_btnh = jax.jit(_gradients(_btnh))


# --- 64-bit types ---


@pytest.mark.parametrize(("implementation", "bias"), in_turns(IMPLEMENTATIONS, ["hqk", "h1k"]))
def test_x64_changes_nothing(implementation, bias):
  operands = (*_arrays(lead=()), _bias(bias), _slopes())
  gradients = jax.jit(_gradients(functools.partial(_loss, implementation=implementation)))
  expected = gradients(*operands)
  with jax.enable_x64(True):
    got = gradients(*operands)
  assert all(x.dtype == np.float32 for x in jax.tree.leaves(got))
  assert_trees_close(got, expected)


# --- vmap ---


@pytest.mark.parametrize(
  ("implementation", "slices", "bias"),
  in_turns(IMPLEMENTATIONS, ["shared", "mapped"], ["bhqk", "b1qk", "bh1k", "hqk", "1qk"]),
)
def test_vmap_is_a_loop(implementation, slices, bias):
  """For attention and its gradient. Gradients of unmapped operands are sums, others separate."""
  operands = (*_arrays(), _bias(bias), _slopes(_BATCH))
  axes = [0, 0, 0, 0 if bias[0] == "b" else None, 0]
  masks = [AttentionMask.sliding_window(_LENGTH, left=5 + i).slices for i in range(_BATCH)]

  def one(*operands):
    *operands, slices = operands
    return _loss(*operands, implementation=implementation, slices=slices)

  if slices == "mapped":
    operands, axes = (*operands, np.stack(masks)), [*axes, 0]
  else:
    operands, axes = (*operands, masks[0]), [*axes, None]

  def rows(fun):
    def row(i):
      return fun(*(x if a is None else x[i] for x, a in zip(operands, axes, strict=True)))

    return jax.tree.map(lambda *x: np.stack(x), *map(row, range(_BATCH)))

  expected = rows(jax.jit(_gradients(one)))
  assert_trees_close(jax.jit(jax.vmap(_gradients(one), axes))(*operands), expected)

  def total(*operands):
    return jnp.sum(jax.vmap(one, axes)(*operands))

  summed = [g if a == 0 else g.sum(axis=0) for g, a in zip(expected[1], axes, strict=False)]
  assert_trees_close(jax.jit(_gradients(total))(*operands)[1], tuple(summed), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ("implementation", "inner", "outer"),
  in_turns(IMPLEMENTATIONS, [0, None], [None, 0]),
)
def test_vmap_of_vmap(implementation, inner, outer):
  q, k, v = _arrays(lead=(2, 3))
  lead = [n for n, axis in ((2, outer), (3, inner)) if axis == 0]
  bias = normals((*lead, 1, _LENGTH, _LENGTH))[0]
  slopes = _slopes()
  loss = functools.partial(_loss, implementation=implementation)

  def nested(fun):
    mapped = jax.vmap(fun, (0, 0, 0, inner, None))
    return jax.vmap(mapped, (0, 0, 0, outer, None))

  got = jax.jit(nested(_gradients(loss)))(q, k, v, bias, slopes)
  one = jax.jit(_gradients(loss))
  for i in range(2):
    for j in range(3):
      row = bias[i] if outer == 0 else bias
      row = row[j] if inner == 0 else row
      expected = one(q[i, j], k[i, j], v[i, j], row, slopes)
      assert_trees_close(jax.tree.map(lambda x, i=i, j=j: x[i, j], got), expected)


@pytest.mark.parametrize(
  ("implementation", "bias"), in_turns(IMPLEMENTATIONS, ["bhqk", "1hqk", "b11k", "11qk"])
)
def test_vmap_over_a_batch(implementation, bias):
  """A bias that is shared inside the batch, and mapped or not outside of it."""
  q, k, v = _arrays(lead=(2, _BATCH))
  loss = functools.partial(_btnh, implementation=implementation)
  gradients = jax.jit(_gradients(loss))
  for axis in (0, None):
    one = _bias(bias)
    both = np.stack([one, one + 1]) if axis == 0 else one
    got = jax.jit(jax.vmap(_gradients(loss), (0, 0, 0, axis, None)))(q, k, v, both, _slopes())
    for i in range(2):
      expected = gradients(q[i], k[i], v[i], both[i] if axis == 0 else both, _slopes())
      assert_trees_close(jax.tree.map(lambda x, i=i: x[i], got), expected)


def test_vmap_keeps_a_shared_bias_shared():
  q, k, v = _arrays()

  def run(q, k, v, bias):
    return jax_magi.attention(q, k, v, AttentionMask.causal(_LENGTH), bias=bias)[0]

  mapped = jax.vmap(run, (0, 0, 0, None))
  text = str(jax.make_jaxpr(mapped)(q, k, v, _bias("1qk")))
  assert f"f32[{_BATCH},1,{_LENGTH},{_LENGTH}]" not in text


# --- gradients that are not requested ---


@implementations
@pytest.mark.parametrize("stop", ["constant", "stop_gradient", "not_differentiated"])
def test_no_gradient_of_the_bias_is_computed_in_vain(implementation, stop):
  q, k, v = _arrays()
  bias = _bias("bhqk")

  def loss(q, bias):
    return _btnh(q, k, v, bias, None, implementation=implementation)

  funs = {
    "constant": lambda q: jax.grad(lambda q: loss(q, jnp.asarray(bias)))(q),
    "stop_gradient": lambda q: jax.grad(
      lambda q: loss(q, jax.lax.stop_gradient(jnp.cos(q.sum()) + bias))
    )(q),
    "not_differentiated": lambda q: jax.grad(loss)(q, jnp.asarray(bias)),
  }

  def wants(fun):
    # dbias is the only result with the shape of the bias.
    name = _TARGETS[1] if implementation == "cpu" else "scan"
    equations = [
      e
      for e in _equations(jax.make_jaxpr(fun)(q).jaxpr)
      if name in str(e.params.get("target_name", e.primitive))
    ]
    return any(math.prod(v.aval.shape) == bias.size for e in equations for v in e.outvars)

  assert not wants(funs[stop])
  assert wants(lambda q: jax.grad(lambda bias: loss(q, bias))(jnp.asarray(bias)))


def _equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for value in jax.tree.leaves(
      list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    ):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from _equations(inner)


# --- memory ---


@pytest.mark.parametrize(
  ("implementation", "shape", "has_gradient"),
  in_turns(IMPLEMENTATIONS, ["1h1k", "11qk", "b11k", "1hqk"], [False, True]),
)
def test_a_shared_bias_never_grows(implementation, shape, has_gradient):
  """Neither the program's arrays nor its memory have the size `[batch, heads, q, k]`."""
  length = 640
  q, k, v = _arrays(length=length)
  bias = _bias(shape, length)

  def loss(q, k, v, bias):
    return _btnh(q, k, v, bias, None, implementation=implementation)

  fun = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)) if has_gradient else loss)
  full = _BATCH * _HEADS * length * length
  compiled = fun.lower(q, k, v, bias).compile()
  shapes = re.findall(r"\w+\[([\d,]+)\]", compiled.as_text())
  sizes = [math.prod(map(int, s.split(","))) for s in shapes]
  # The plain path has blocks of scores of 512 x 512, for all heads and the whole batch.
  block = _BATCH * _HEADS * 512 * 512 if implementation == "blockwise" else 0
  assert max(sizes) <= max(block, 2 * bias.size, 2 * q.size) < full
  if implementation == "cpu":
    stats = compiled.memory_analysis()
    assert stats.temp_size_in_bytes < 4 * (4 * bias.size + 16 * q.size)


# --- shardings ---


_SPECS = {"batch": P("x"), "heads": P(None, None, "x"), "both": P("x", None, "y")}


@pytest.mark.parametrize(
  ("spec", "bias"), in_turns(_SPECS, ["bhqk", "1hqk", "b1qk", "11qk", "b11k", "1h1k"])
)
def test_jit_keeps_batch_and_head_shardings(spec, bias):
  """The gradient of a bias that devices share is summed over them."""
  mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
  arrays = (*_arrays(), _bias(bias), _slopes())
  sharding = NamedSharding(mesh, _SPECS[spec])
  sharded = [*(jax.device_put(x, sharding) for x in arrays[:3]), *arrays[3:]]
  compiled = _gradients_of_btnh.lower(*sharded).compile()
  for line in compiled.as_text().splitlines():
    if "custom-call" in line and any(target in line for target in _TARGETS):
      assert f"[{_BATCH},{_LENGTH},{_HEADS}," not in line
  expected = _gradients_of_btnh(*arrays)
  assert_trees_close(compiled(*sharded), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("spec", "bias"), in_turns(_SPECS, ["bhqk", "11qk"]))
def test_explicit_axes(spec, bias):
  mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
  arrays = (*_arrays(), _bias(bias), _slopes())
  expected = _gradients_of_btnh(*arrays)
  with jax.set_mesh(mesh):
    sharded = [jax.device_put(x, NamedSharding(mesh, _SPECS[spec])) for x in arrays[:3]]
    rest = [jax.device_put(x, NamedSharding(mesh, P())) for x in arrays[3:]]
    got = jax.jit(_gradients(functools.partial(_btnh, implementation=None)))(*sharded, *rest)
  assert_trees_close(got, expected, rtol=1e-4, atol=1e-5)


@implementations
def test_shard_map(implementation):
  mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
  arrays = (*_arrays(), _bias("1hqk"), _slopes())

  def local(*operands):
    return jax.lax.psum(_btnh(*operands, implementation=implementation), "x")

  sharded = jax.shard_map(local, mesh=mesh, in_specs=(*[P("x")] * 3, P(), P()), out_specs=P())
  got = jax.jit(_gradients(sharded))(*arrays)
  expected = _gradients_of_btnh(*arrays)
  assert_trees_close(got, expected, rtol=1e-4, atol=1e-5)


# --- the rest ---


def test_checkpoint():
  arrays = (*_arrays(), _bias("1hqk"), _slopes())
  got = jax.jit(_gradients(jax.checkpoint(_btnh)))(*arrays)
  assert_trees_close(got, _gradients_of_btnh(*arrays))


def test_scan():
  """A bias that layers share, and one bias per layer."""
  q, k, v = _arrays()
  biases = np.stack([_bias("1hqk"), _bias("1hqk") - 1])

  def loss(biases, shared, is_unrolled):
    def layer(q, bias):
      out = jax_magi.dot_product_attention(q, k, v, bias + shared)
      return out, None

    if is_unrolled:
      out = functools.reduce(lambda q, bias: layer(q, bias)[0], biases, q)
    else:
      out, _ = jax.lax.scan(layer, jnp.asarray(q), biases)
    return jnp.sum(jnp.sin(out))

  gradients = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
  got, expected = (gradients(biases, _bias("11qk"), flag) for flag in (False, True))
  assert_trees_close(got, expected)


def test_export_round_trip():
  arrays = (*_arrays(), _bias("1hqk"), _slopes())
  allowed = [jax.export.DisabledSafetyCheck.custom_call(target) for target in _TARGETS]
  exported = jax.export.export(_gradients_of_btnh, disabled_checks=allowed)(*arrays)
  restored = jax.export.deserialize(exported.serialize())
  assert_trees_close(restored.call(*arrays), _gradients_of_btnh(*arrays), rtol=0, atol=0)


@pytest.mark.parametrize(
  ("implementation", "sizes", "bias"),
  in_turns(
    IMPLEMENTATIONS,
    [(0, 5, 6), (2, 0, 6), (2, 5, 0), (2, 0, 0), (2, 1, 1)],
    ["bhqk", "1h1k", "11qk", "1111"],
  ),
  ids=str,
)
def test_empty_sequences(implementation, sizes, bias):
  batch, q_len, k_len = sizes
  q, k, v = normals((batch, q_len, 4, 8), *[(batch, k_len, 2, 8)] * 2)
  letters = {"b": batch, "h": 4, "q": q_len, "k": k_len, "1": 1}
  operands = normals(tuple(letters[letter] for letter in bias), (4,))
  loss = functools.partial(_btnh, implementation=implementation)
  gradients = jax.jit(jax.grad(loss, (3, 4)))(q, k, v, *operands)
  for got, operand in zip(gradients, operands, strict=True):
    assert got.shape == operand.shape and np.isfinite(got).all()
    assert q_len * k_len * batch or not np.any(got)


def test_symbolic_batch():
  """A program of the plain path, for any batch size."""
  arguments = (
    *_arrays(),
    _bias("1hqk"),
    _slopes(),
    np.random.default_rng(0).random((4, 1, 1, 40)) < 0.8,
  )

  def gradients(*operands):
    *operands, mask = operands
    return _gradients(functools.partial(_btnh, implementation=None, mask=mask))(*operands)

  (batch,) = jax.export.symbolic_shape("b")
  types = [
    jax.ShapeDtypeStruct((batch if len(x) == _BATCH else len(x), *x.shape[1:]), x.dtype)
    for x in arguments
  ]
  exported = jax.export.export(jax.jit(gradients))(*types)
  assert_trees_close(
    exported.call(*arguments), jax.jit(gradients)(*arguments), rtol=1e-4, atol=1e-5
  )


def test_second_derivatives_of_the_plain_path():
  q, k, v = (x[0, :6] for x in _arrays())
  bias = normals((1, 6, 6))[0]
  loss = functools.partial(_loss, slopes=None, implementation="blockwise")

  def dense(q, k, v, bias):
    out, lse, _ = reference.attention(q, k, v, np.tri(6, dtype=bool), bias=bias)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

  got = jax.jit(jax.hessian(loss, (0, 3)))(q, k, v, bias)
  expected = jax.jit(jax.hessian(dense, (0, 3)))(q, k, v, bias)
  assert_trees_close(got, expected, rtol=1e-4, atol=1e-5)
