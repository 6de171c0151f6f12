"""Attention where JAX is used in uncommon ways: second derivatives, strict modes, hidden NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask, reference
from tests.arrays import assert_trees_close, normals

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


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("second", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_of_blockwise(second, softcap):
  fun = functools.partial(_loss, implementation="blockwise", softcap=softcap)
  got = second(jax.grad(fun, (0, 1, 2, 3)), (0, 1, 2, 3))(*_operands())
  expected = jax.hessian(functools.partial(_expected_loss, softcap=softcap), (0, 1, 2, 3))
  assert_trees_close(got, expected(*_operands()))


def test_second_derivatives_of_blockwise_without_sink():
  q, k, v, _ = _operands()

  def hessian(fun, **options):
    return jax.jit(jax.hessian(lambda *x: fun(*x, None, **options), (0, 1, 2)))(q, k, v)

  assert_trees_close(hessian(_loss, implementation="blockwise"), hessian(_expected_loss))


@pytest.mark.parametrize("mapped", [(0, 0), (None, 0), (0, None)])
def test_vmap_of_hessian_vector_products(mapped):
  q, k, v, sink = _operands()
  qs, tangents = normals((3, *q.shape), (3, *q.shape), seed=1)
  points = [x if axis == 0 else x[0] for x, axis in zip((qs, tangents), mapped, strict=True)]

  def products(fun):
    def one(q, tangent):
      return jax.jvp(jax.grad(fun), (q, k, v, sink), (tangent, *map(np.zeros_like, (k, v, sink))))

    return jax.vmap(one, mapped)(*points)

  got = products(functools.partial(_loss, implementation="blockwise"))
  assert_trees_close(got, products(_expected_loss))


@pytest.mark.parametrize("implementation", ["cpu", None])
def test_kernels_say_that_they_have_no_second_derivative(implementation):
  q, k, v, sink = _operands()
  fun = functools.partial(_loss, implementation=implementation)
  for wrap in (jax.jit, lambda f: f):
    with pytest.raises(NotImplementedError, match='second derivative; implementation="blockwise"'):
      wrap(jax.hessian(fun))(q, k, v, sink)


# --- vmap of control flow ---


def _cond(index, x, attend):
  return jax.lax.cond(index > 0, attend, lambda x: x, x)


def _switch(index, x, attend):
  return jax.lax.switch(index, [attend, lambda x: x, lambda x: 2.0 * x], x)


def _scan(index, x, attend):
  def step(x, i):
    return attend(x * (1.0 + i)), None

  return jax.lax.scan(step, x, index + jnp.arange(2.0))[0]


@pytest.mark.parametrize("mapped", ["both", "index"])
@pytest.mark.parametrize("control", [_cond, _switch, _scan])
@pytest.mark.parametrize("implementation", [*_IMPLEMENTATIONS, None])
def test_vmap_of_control_flow(implementation, control, mapped):
  index = np.array([0, 1, 2], np.int32)
  (x,) = normals((3, 6, 2, 4))
  x = x if mapped == "both" else x[0]

  def attend(x):
    return jax_magi.attention(x, x, x, _MASK, implementation=implementation)[0]

  one = jax.value_and_grad(lambda x, i: jnp.sin(control(i, x, attend)).sum())
  got = jax.vmap(one, (0 if mapped == "both" else None, 0))(x, index)
  for i in range(3):
    expected = one(x[i] if mapped == "both" else x, index[i])
    assert_trees_close(jax.tree.map(lambda a, i=i: a[i], got), expected)
