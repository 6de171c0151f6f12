"""QK-Clip for parameters that hold several projections."""

import jax
import numpy as np
import pytest

from jax_magi.optim import Projection, QkProjections, apply_qk_clip
from tests.arrays import assert_same_bits, normal

_Q = Projection("q", "embed -> heads dim")


def _projections(layout, *indices, **options):
  parts = [Projection("fused", layout, index=i, **options) for i in indices]
  return QkProjections(*((_Q, *parts) if len(parts) == 1 else parts))


def test_keys_are_scaled_and_values_beside_them_are_not():
  """A kernel `[2, heads, embed, dim]` of keys and values."""
  params = {"q": normal(8, 4, 6), "fused": normal(2, 2, 8, 6, seed=1)}
  maxima = np.array([1.0, 16.0, 4.0, 2.0], np.float32)
  projections = _projections("parts heads embed -> dim", 0)
  found = jax.jit(lambda p, m: apply_qk_clip(p, m, projections, 4.0))(params, maxima)
  assert_same_bits(found["fused"][1], params["fused"][1])
  assert_same_bits(found["fused"][0, 1], params["fused"][0, 1])
  np.testing.assert_allclose(found["fused"][0, 0], params["fused"][0, 0] / 2, rtol=1e-6)
  np.testing.assert_allclose(found["q"][:, :2], params["q"][:, :2] / 2, rtol=1e-6)
  assert_same_bits(found["q"][:, 2:], params["q"][:, 2:])


def test_queries_keys_and_values_in_one_stacked_kernel():
  """`[layers, embed, 3, heads, dim]`, and no other projection."""
  fused = normal(2, 8, 3, 4, 6)
  maxima = np.array([[1.0, 16.0, 4.0, 2.0], [8.0, 1.0, 1.0, 1.0]], np.float32)
  projections = _projections("layers embed -> parts heads dim", 0, 1)
  found = np.asarray(apply_qk_clip({"fused": fused}, maxima, projections, 4.0)["fused"])
  gamma = np.minimum(1.0, 4.0 / maxima)[:, None, None, :, None]
  expected = np.where(np.arange(3)[:, None, None] < 2, fused * np.sqrt(gamma), fused)
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  assert_same_bits(found[:, :, 2], fused[:, :, 2])


def test_parts_and_dims_of_one_parameter():
  """Products of queries and keys are divided by gamma even if both are a part of a part."""
  fused = normal(2, 8, 4, 6)
  layout = "parts embed -> heads dim"
  sides = (Projection("fused", layout, index=0, dims=(d, d + 3)) for d in (0, 3))
  projections = QkProjections(tuple(sides), Projection("fused", layout, index=1))
  found = apply_qk_clip({"fused": fused}, np.full(4, 8.0, np.float32), projections, 2.0)
  np.testing.assert_allclose(found["fused"], fused / 2, rtol=1e-6)


@pytest.mark.parametrize(
  ("make", "match"),
  [
    (lambda: Projection("x", "parts embed -> heads dim"), "needs index if and only if its layout"),
    (
      lambda: Projection("x", "embed -> heads dim", index=0),
      "needs index if and only if its layout",
    ),
    (lambda: Projection("x", "parts embed -> heads dim", index=-1), "non-negative integer, got -1"),
    (lambda: _clip(0, 0), "fused is named twice"),
    (lambda: _clip(0, 2), "fused has 2 parts, but index is 2"),
  ],
)
def test_bad_parts_are_named(make, match):
  with pytest.raises(ValueError, match=match):
    make()


def _clip(*indices):
  projections = _projections("parts embed -> heads dim", *indices)
  return apply_qk_clip({"fused": normal(2, 8, 4, 6)}, np.ones(4, np.float32), projections)
