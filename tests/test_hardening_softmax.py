"""Fused softmax where JAX is used in uncommon ways: second derivatives, strict modes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import reference
from tests.arrays import assert_trees_close, normals


def _operands(dtype=np.float32):
  x, mask, offset = normals((2, 3, 4, 5), (2, 1, 1, 5), (3,), dtype=dtype)
  return x, mask, offset


def _loss(x, mask, offset, **options):
  y = jax_magi.fused_scale_mask_softmax(
    x, mask, scale=0.7, is_causal=True, offset=offset, **options
  )
  return jnp.sin(3.0 * y).sum()


def _expected_loss(x, mask, offset):
  causal = np.tri(4, 5, 1, dtype=bool)
  y = reference.softmax(x, scale=0.7, mask=causal, bias=mask, offset=offset)
  return jnp.sin(3.0 * y).sum()


# --- second derivatives ---

# Without optimization, XLA for x86_64 makes NaN of these programs, on default settings not.
_optimized_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})


@functools.cache
def _expected_second_derivatives():
  return _optimized_jit(jax.hessian(_expected_loss, (0, 1, 2)))(*_operands())


@pytest.mark.parametrize("second", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_of_xla(second):
  fun = functools.partial(_loss, implementation="xla")
  got = _optimized_jit(second(jax.grad(fun, (0, 1, 2)), (0, 1, 2)))(*_operands())
  assert_trees_close(got, _expected_second_derivatives())


def test_second_derivatives_in_float64():
  with jax.enable_x64(True):
    got, expected = (
      _optimized_jit(jax.hessian(loss))(*_operands(np.float64)) for loss in (_loss, _expected_loss)
    )
    assert got.dtype == np.float64
    # The offset is float32.
    assert_trees_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", ["cpu", None])
def test_kernels_say_that_they_have_no_second_derivative(implementation):
  with pytest.raises(
    NotImplementedError, match='second derivatives; implementation="xla" supports'
  ):
    jax.hessian(functools.partial(_loss, implementation=implementation))(*_operands())


# --- vmap of control flow ---


@pytest.mark.parametrize("implementation", ["cpu", "xla", None])
def test_vmap_of_cond(implementation):
  (x,) = normals((3, 4, 5))
  is_softmax = np.array([True, False, True])

  def one(x, is_softmax):
    def fused(x):
      return jax_magi.fused_scale_mask_softmax(x, is_causal=True, implementation=implementation)

    return jnp.sin(jax.lax.cond(is_softmax, fused, lambda x: x, x)).sum()

  gradient = jax.value_and_grad(one)
  got, row = jax.jit(jax.vmap(gradient))(x, is_softmax), jax.jit(gradient)
  for i in range(3):
    expected = row(x[i], is_softmax[i])
    assert_trees_close(jax.tree.map(lambda a, i=i: a[i], got), expected)


# --- strict modes ---


def _everything(x, mask, offset, implementation):
  """A number that depends on all public functions of the softmax, and on all kinds of masks."""
  options = {"is_causal": True, "window": (3, 1), "implementation": implementation}
  total = _loss(x, mask, offset, implementation=implementation)
  for other in (mask > 0, mask[0, 0, 0] > 0, mask[0, 0, 0], mask[0, 0, 0, 0], None):
    for logit in (offset, offset[0], "off-by-one", None):
      total += jax_magi.fused_scale_mask_softmax(x, other, offset=logit, **options).sum()
  total += jax_magi.scaled_softmax(x).sum()
  total += jax_magi.scaled_masked_softmax(x, mask).sum()
  total += jax_magi.scaled_upper_triang_masked_softmax(x[0, 0]).sum()
  for fusion in (True, False):
    megatron = jax_magi.FusedScaleMaskSoftmax(False, False, "causal", fusion, None, True, 0.5)
    total += megatron(x, mask > 0, offset).sum()
  return total


@pytest.mark.parametrize("implementation", ["cpu", "xla", None])
def test_no_promotion_of_ranks_or_dtypes(implementation):
  """What is traced is what promotes, and all tests run in strict modes; see `conftest.py`."""
  fun = functools.partial(_everything, implementation=implementation)
  jax.eval_shape(jax.value_and_grad(fun, (0, 1, 2)), *_operands())
  jax.eval_shape(jax.vmap(jax.grad(fun)), *(np.stack([x, x]) for x in _operands()))
