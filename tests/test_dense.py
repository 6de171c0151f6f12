"""The NumPy computation that tests compare with follows the specification, and is exact enough."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

from jax_magi import AttentionMask, reference
from tests import dense
from tests.accuracy import DTYPES, expected_results, named_results
from tests.bias_cases import BIAS_CASES, BiasCase
from tests.cases import Case
from tests.compilation import quick_jit
from tests.softmax_cases import CASES as SOFTMAX_CASES

# Each of the operands and options, and rows that see nothing.
_NAMES = (
  "uncovered_rows-three_sinks-gqa2-bias_hqk",
  "uncovered_rows-three_sinks-gqa2-bias_h1k",
  "softcap-sink-bias_1qk-f32_bias",
  "softcap-sink-bias_hq1",
  "causal-gqa3-long_keys-alibi",
  "causal-gqa3-long_keys-bias_k",
  "sliding_window-two_sided-bias_qk",
)
_SOFTMAX_NAMES = ("everything", "bias-causal-offset", "matrix", "five_dimensions", "negative_scale")


def _cases():
  by_name = {case.name: case for case in BIAS_CASES}
  for name in _NAMES:
    yield by_name[name]
  without_terms = next(case for case in BIAS_CASES if case.case.name == "negative_scale")
  yield dataclasses.replace(without_terms, bias=None, has_alibi=False)
  # Enough heads to compare errors of gradients that have one value per head.
  shape = {"num_q_heads": 64, "num_kv_heads": 16, "head_dim": 16, "value_dim": 16}
  sinks = Case("three_sinks-many_heads", AttentionMask.causal(150), num_sinks=3, **shape)
  yield BiasCase(sinks, has_alibi=True)


CASES = list(_cases())
_softmax_cases = pytest.mark.parametrize(
  "case", [c for c in SOFTMAX_CASES if c.name in _SOFTMAX_NAMES], ids=lambda case: case.name
)


def _specified(inputs, mask, options, dtype):
  """The results and gradients of `reference.attention`, computed in a dtype by XLA."""

  def fun(q, k, v, sink, bias, slopes):
    terms = {"sink": sink, "bias": bias, "alibi_slopes": slopes}
    out, lse, max_logits = reference.attention(q, k, v, mask.to_dense(), **terms, **options)
    return (out, lse), max_logits

  @quick_jit
  def run(operands, cotangents):
    (out, lse), vjp, max_logits = jax.vjp(fun, *operands, has_aux=True)
    return named_results(out, lse, max_logits, vjp(cotangents))

  with jax.default_device(jax.devices("cpu")[0]):
    return run(*jax.tree.map(lambda x: x.astype(dtype), (inputs.all_operands, inputs.cotangents)))


def _specified_softmax(case, dtype):
  operands, dy = case.make_inputs("f32")
  mask = operands.pop("mask", True) & case.in_band()

  @quick_jit
  def run(operands, dy):
    y, vjp = jax.vjp(lambda x: reference.softmax(**x, scale=case.scale, mask=mask), operands)
    return {"y": y, **{f"d{name}": g for name, g in vjp(dy)[0].items()}}

  with jax.default_device(jax.devices("cpu")[0]):
    return run(*jax.tree.map(lambda x: x.astype(dtype), (operands, dy)))


def _assert_equal_in_float64(got, expected):
  assert got.keys() == expected.keys()
  for name, x in expected.items():
    assert x.dtype == np.float64
    scale = np.abs(np.where(np.isfinite(x), x, 0.0)).max(initial=1.0)
    np.testing.assert_allclose(got[name], x, rtol=0, atol=1e-12 * scale, err_msg=name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_is_the_specification(case):
  inputs, mask, options = case.make_inputs("f32"), case.case.mask, case.case.options
  with jax.enable_x64(True):
    expected = _specified(inputs, mask, options, np.float64)
  _assert_equal_in_float64(expected_results(inputs, mask, **options)[0], expected)


@_softmax_cases
def test_softmax_is_the_specification(case):
  with jax.enable_x64(True):
    expected = _specified_softmax(case, np.float64)
  operands, dy = case.make_inputs("f32")
  mask = operands.pop("mask", True) & case.in_band()
  got = dense.softmax(**operands, dy=dy, dtype=np.float64, scale=case.scale, mask=mask)
  _assert_equal_in_float64(got, expected)


def _mean_error(x, truth):
  """The root mean square error of finite values."""
  x, truth = np.asarray(x).astype(np.float64), np.asarray(truth)
  finite = np.isfinite(truth)
  return np.sqrt(np.mean((x[finite] - truth[finite]) ** 2))


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("f16", marks=pytest.mark.long)])
def test_plain_computation_is_as_exact_as_that_of_xla(dtype):
  """It sets the tolerance of every test. If it were less exact, tests would allow more."""
  ratios = collections.defaultdict(list)
  for case in CASES:
    inputs, mask, options = case.make_inputs(dtype), case.case.mask, case.case.options
    truth, plain = expected_results(inputs, mask, **options)
    for name, x in _specified(inputs, mask, options, DTYPES[dtype]).items():
      if x.size >= 64:  # Fewer are right or wrong by chance.
        ratios[name].append(_mean_error(plain[name], truth[name]) / _mean_error(x, truth[name]))
  assert {"out", "lse", "dq", "dk", "dv", "dsink", "dbias", "dslopes"} <= ratios.keys()
  for name, values in ratios.items():
    # Sums over two axes are stricter than XLA's.
    lowest = 0.4 if name == "dslopes" else 0.8
    assert lowest < np.exp(np.mean(np.log(values))) < 1.2, name
