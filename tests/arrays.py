"""Random arrays, and comparisons of trees of them, that tests share."""

import functools

import jax
import numpy as np


def normals(*shapes, seed=0, dtype=np.float32):
  """One array for each shape, from one generator."""
  rng = np.random.default_rng(seed)
  return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def normal(*shape, seed=0, dtype=np.float32):
  """One array."""
  return normals(shape, seed=seed, dtype=dtype)[0]


def assert_same_bits(a, b):
  """Trees of arrays that agree in structure, dtype and every bit."""

  def check(x, y):
    assert x.dtype == y.dtype
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()

  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(check, a, b)


def assert_trees_close(a, b, *, rtol=2e-5, atol=2e-5):
  """Trees of arrays that agree but for the order of additions in float32."""
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), a, b)
