"""NaN and infinities in tokens that are in no visible pair have no effect."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask
from tests.accuracy import Inputs, check_results, make_inputs, named_results
from tests.arrays import assert_same_bits
from tests.compilation import quick_jit
from tests.sizes import in_turns, name_of

# Documents and hidden tokens share tiles. Queries and keys have separate hidden tokens.
_Q_LEN, _K_LEN = 330, 350
_MASK = AttentionMask.from_ranges(
  [[0, 50], [60, 130], [140, 142], [150, 320]],
  [[3, 50], [70, 130], [131, 140], [150, 345]],
  [1, 0, 2, 1],
  q_len=_Q_LEN,
  k_len=_K_LEN,
)
_SHOWN = {"q": _MASK.to_dense().any(axis=1), "k": _MASK.to_dense().any(axis=0)}
_SHOWN |= {"v": _SHOWN["k"], "dout": _SHOWN["q"]}
_POISONS = {"nan": np.nan, "inf": np.inf}


def _inputs(dtype, head_dim, num_sinks=None) -> Inputs:
  return make_inputs(
    np.random.default_rng(0), dtype, _Q_LEN, _K_LEN, 4, 2, head_dim, head_dim, num_sinks
  )


def _with_hidden(inputs: Inputs, names, value) -> Inputs:
  """The inputs with a value for all hidden tokens of these arrays."""
  arrays = {name: np.array(getattr(inputs, name)) for name in ("q", "k", "v", "dout")}
  for name in names:
    arrays[name][~_SHOWN[name]] = value
  return Inputs(**arrays, sink=inputs.sink, dlse=inputs.dlse)


@functools.partial(quick_jit, static_argnames=("has_gradients", "options"))
def _run(inputs_, mask, has_gradients, options):
  operands, cotangents = inputs_

  def fun(q, k, v, sink):
    out, meta = jax_magi.attention(
      q, k, v, mask, sink=sink, return_max_logits=True, **dict(options)
    )
    return (out, meta.lse), meta.max_logits

  if not has_gradients:
    (out, lse), max_logits = fun(*operands)
    return named_results(out, lse, max_logits, ())
  (out, lse), vjp, max_logits = jax.vjp(fun, *operands, has_aux=True)
  return named_results(out, lse, max_logits, vjp(cotangents))


def _results(inputs: Inputs, has_gradients=True, **options):
  arguments = (inputs.operands, inputs.cotangents)
  return _run(arguments, _MASK, has_gradients, tuple(sorted(options.items())))


@pytest.mark.parametrize(
  ("implementation", "dtype", "softcap"),
  in_turns(["cpu", "blockwise"], [np.float32, ml_dtypes.bfloat16], [0.0, 3.0]),
  ids=name_of,
)
@pytest.mark.parametrize("poison", _POISONS)
def test_hidden_tokens_reach_nothing(implementation, dtype, softcap, poison):
  clean = _inputs(dtype, 24)
  run = functools.partial(_results, implementation=implementation, softcap=softcap)
  expected = run(clean)
  for names in (["q"], ["k"], ["v"], ["dout"], ["q", "k", "v", "dout"]):
    assert_same_bits(run(_with_hidden(clean, names, _POISONS[poison])), expected)


@pytest.mark.parametrize("num_sinks", [0, 2])
@pytest.mark.parametrize("implementation", ["cpu", "blockwise"])
def test_hidden_tokens_reach_nothing_beside_a_sink(implementation, num_sinks):
  clean = _inputs(np.float32, 24, num_sinks)
  dirty = _with_hidden(clean, ["q", "k", "v"], np.nan)
  run = functools.partial(_results, implementation=implementation)
  assert_same_bits(run(dirty), run(clean))


# --- on a GPU, in whose tiles 0 * NaN is NaN ---


def _check_on_cuda(names, head_dim, poison, **options):
  clean = _with_hidden(_inputs(ml_dtypes.bfloat16, head_dim), ["q", "k", "v", "dout"], 0)
  dirty = _with_hidden(clean, names, _POISONS[poison])
  check_results(_results(dirty, implementation="cuda", **options), clean, _MASK)


@pytest.mark.gpu
@pytest.mark.parametrize("poison", _POISONS)
@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hidden_queries_and_keys_on_cuda(head_dim, name, poison):
  _check_on_cuda([name], head_dim, poison, has_gradients=False)


@pytest.mark.gpu
@pytest.mark.xfail(strict=True, reason="P is 0 for hidden keys, and 0 * NaN is NaN in P V")
@pytest.mark.parametrize("poison", _POISONS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hidden_values_on_cuda(head_dim, poison):
  _check_on_cuda(["v"], head_dim, poison, has_gradients=False)


@pytest.mark.gpu
@pytest.mark.xfail(strict=True, reason="0 * NaN is NaN in dS = P (dP - delta), dS Q, dS K and P dO")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("poison", _POISONS)
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hidden_tokens_in_the_backward_pass_on_cuda(head_dim, name, poison, deterministic):
  _check_on_cuda([name], head_dim, poison, deterministic=deterministic)
