"""Fused scale + mask + softmax: values and gradients, on the CPU."""

import doctest
import re
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jax_magi
from jax_magi import fused_scale_mask_softmax
from jax_magi._src.softmax import api, megatron
from tests.accuracy import DTYPES
from tests.arrays import normal
from tests.sizes import in_turns, name_of
from tests.softmax_cases import BROADCASTS, CASES, ROWS, SoftmaxCase, check_softmax

_IMPLEMENTATIONS = ["cpu", "xla"]


@pytest.mark.parametrize(("case", "dtype"), in_turns(ROWS, DTYPES), ids=name_of)
def test_row(case, dtype):
  check_softmax(case, dtype, "cpu")


@pytest.mark.parametrize(("case", "dtype"), in_turns(CASES, DTYPES), ids=name_of)
def test_case(case, dtype):
  check_softmax(case, dtype, "cpu")


@pytest.mark.parametrize("case", BROADCASTS, ids=lambda case: case.name)
def test_broadcast(case):
  check_softmax(case, "bf16", "cpu")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_in_plain_jax(case):
  check_softmax(case, "bf16", "xla")


@st.composite
def _cases(draw):
  shape = tuple(draw(st.integers(1, n)) for n in (3, 3, 40, 70))
  kind = draw(st.sampled_from(["mask", "bias", None]))
  window = draw(st.none() | st.tuples(*[st.none() | st.integers(0, 50)] * 2))
  operand = tuple(draw(st.sampled_from([1, size])) for size in shape)
  return SoftmaxCase(
    "random",
    shape,
    scale=draw(st.sampled_from([1.0, 0.1, -2.0])),
    is_causal=draw(st.booleans()),
    window=window,
    has_offset=draw(st.booleans()),
    **({kind: operand} if kind else {}),
  )


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(_cases(), st.sampled_from(["f32", "bf16"]))
def test_random_case(case, dtype):
  check_softmax(case, dtype, "cpu", num_draws=8)


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_what_is_added_to_a_whole_row_has_no_gradient(implementation):
  x, dy = normal(2, 3, 5, 40), normal(2, 3, 5, 40, seed=1)

  def fun(bias):
    y = fused_scale_mask_softmax(x, bias, is_causal=True, implementation=implementation)
    return jnp.sum(y * dy)

  assert (jax.grad(fun)(normal(3, 5, 1, seed=2)) == 0).all()


# --- Special rows ---


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
@pytest.mark.parametrize("hidden_by", ["mask", "bias", "band", "scores"])
def test_rows_that_see_nothing_are_zero(implementation, hidden_by):
  x = normal(2, 3, 8, 5)
  options = {"scale": 0.5, "implementation": implementation}
  mask = None
  if hidden_by == "mask":
    mask = np.zeros((8, 1), bool)
  elif hidden_by == "bias":
    mask = np.full((8, 1), -np.inf, np.float32)
  elif hidden_by == "scores":
    x[:] = -np.inf
  is_causal = hidden_by == "band"  # Hides the first three rows of eight.
  rows = slice(0, 3) if is_causal else slice(None)

  def fun(x):
    return fused_scale_mask_softmax(x, mask, is_causal=is_causal, **options)

  y, vjp = jax.vjp(fun, x)
  (dx,) = vjp(normal(*x.shape))
  assert (np.asarray(y)[..., rows, :] == 0).all() and (np.asarray(dx)[..., rows, :] == 0).all()


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_special_scores_are_as_in_jax(implementation, value):
  x = normal(4, 21)
  x[1, 7] = value
  x[3, :] = 2.0
  got = fused_scale_mask_softmax(x, implementation=implementation)
  np.testing.assert_allclose(got, jax.nn.softmax(x, axis=-1), rtol=1e-6)


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_finite_additive_masks_do_not_hide(implementation):
  """Only -inf hides, as everywhere. A row of the smallest float is uniform."""
  bias = np.full((1, 8), np.finfo(np.float32).min, np.float32)
  y = fused_scale_mask_softmax(normal(3, 8), bias, implementation=implementation)
  np.testing.assert_allclose(y, 1 / 8, rtol=1e-6)


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_what_the_band_hides_is_not_read(implementation):
  causal = np.tril(np.ones((30, 40), bool), 10)
  x, dy = normal(2, 30, 40), normal(2, 30, 40, seed=1)

  def fun(x):
    return fused_scale_mask_softmax(x, is_causal=True, implementation=implementation)

  y, vjp = jax.vjp(fun, x)
  poisoned, poisoned_vjp = jax.vjp(fun, np.where(causal, x, np.nan))
  np.testing.assert_array_equal(poisoned, y)
  np.testing.assert_array_equal(poisoned_vjp(np.where(causal, dy, np.nan))[0], vjp(dy)[0])


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_what_the_band_hides_is_not_in_a_bias_gradient(implementation):
  causal = np.tril(np.ones((30, 40), bool), 10)
  x, bias, dy = (normal(30, 40, seed=i) for i in range(3))

  def fun(bias):
    return fused_scale_mask_softmax(x, bias, is_causal=True, implementation=implementation)

  vjp = jax.vjp(fun, bias)[1]
  np.testing.assert_array_equal(vjp(np.where(causal, dy, np.nan))[0], vjp(dy)[0])


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
def test_scores_near_overflow(implementation):
  x = np.array([[2e38, -2e38]], np.float32)
  y = fused_scale_mask_softmax(x, scale=2e-38, implementation=implementation)
  np.testing.assert_allclose(y, jax.nn.softmax(np.array([[4.0, -4.0]])), rtol=1e-5)
  y = fused_scale_mask_softmax(
    np.zeros((1, 4), np.float32), scale=3e38, implementation=implementation
  )
  np.testing.assert_array_equal(y, np.full((1, 4), 0.25))


def test_empty_leading_axis_beside_a_mask_that_has_another():
  y = fused_scale_mask_softmax(np.zeros((2, 0, 3, 4, 5)), np.ones((2, 1, 1, 4, 5), bool))
  assert y.shape == (2, 0, 3, 4, 5)


def test_large_offsets_take_everything():
  x = normal(2, 3, 4, 5)
  offset = np.array([1e4, -1e4, -np.inf], np.float32)

  def fun(offset):
    return fused_scale_mask_softmax(x, offset=offset)

  y, vjp = jax.vjp(fun, offset)
  assert (np.asarray(y)[:, 0] == 0).all()
  np.testing.assert_allclose(y[:, 1:], jax.nn.softmax(x, axis=-1)[:, 1:], rtol=1e-6)
  np.testing.assert_array_equal(vjp(np.ones_like(x))[0], 0.0)


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 0)])
def test_empty_arrays(implementation, shape):
  x = np.zeros(shape, np.float32)
  offset = np.zeros(shape[-3] if len(shape) > 2 else 1, np.float32)

  def fun(x, offset):
    return fused_scale_mask_softmax(
      x, np.ones(shape, bool), is_causal=True, offset=offset, implementation=implementation
    )

  y, vjp = jax.vjp(fun, x, offset)
  assert y.shape == shape
  dx, doffset = vjp(y)
  assert dx.shape == shape
  np.testing.assert_array_equal(doffset, 0.0)


# --- The named functions ---


def test_named_functions_are_the_general_one():
  x = normal(2, 3, 4, 5)
  mask = normal(4, 5) > 0
  np.testing.assert_array_equal(
    jax_magi.scaled_softmax(x, 0.5), fused_scale_mask_softmax(x, scale=0.5)
  )
  np.testing.assert_array_equal(
    jax_magi.scaled_masked_softmax(x, mask, 0.5), fused_scale_mask_softmax(x, mask, scale=0.5)
  )
  np.testing.assert_array_equal(
    jax_magi.scaled_upper_triang_masked_softmax(x, 0.5),
    fused_scale_mask_softmax(x, scale=0.5, is_causal=True),
  )


def test_off_by_one_adds_one_to_the_denominator():
  x = normal(2, 3, 4, 5)
  expected = np.exp(x) / (1 + np.exp(x).sum(axis=-1, keepdims=True))
  np.testing.assert_allclose(fused_scale_mask_softmax(x, offset="off-by-one"), expected, rtol=1e-6)


def test_one_offset_for_all_heads_has_one_gradient():
  x, dy = normal(2, 3, 4, 5), normal(2, 3, 4, 5, seed=1)

  def loss(offset):
    return jnp.sum(fused_scale_mask_softmax(x, offset=offset) * dy)

  np.testing.assert_allclose(
    jax.grad(loss)(0.3), jax.grad(loss)(np.full(3, 0.3, np.float32)).sum(), rtol=1e-5
  )


def test_float64_runs_in_plain_jax():
  with jax.enable_x64(True):
    x = normal(2, 3, 9, dtype=np.float64)
    y = fused_scale_mask_softmax(x)
    assert y.dtype == np.float64 and jax_magi.explain_softmax(x).native == ()
    np.testing.assert_allclose(y, jax.nn.softmax(x, axis=-1), rtol=1e-12)
    grad = jax.grad(lambda x: jnp.sin(fused_scale_mask_softmax(x)).sum())(x)
    expected = jax.grad(lambda x: jnp.sin(jax.nn.softmax(x, axis=-1)).sum())(x)
    np.testing.assert_allclose(grad, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("module", [api, megatron], ids=lambda m: m.__name__)
def test_docstrings_show_what_runs(module):
  results = doctest.testmod(module, extraglobs={"jnp": jnp})
  assert results.attempted > 0 and results.failed == 0


def test_documentation_shows_what_runs():
  text = (Path(__file__).parent.parent / "docs" / "softmax.md").read_text()
  blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
  assert len(blocks) == 3
  q = jnp.ones((2, 8, 3, 16), jnp.bfloat16)
  names = {"q": q, "k": q, "v": q, "mask": np.ones((2, 1, 8, 8), bool)}
  for block in blocks:
    exec(block, names)
