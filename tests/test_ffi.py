"""The native handlers, called directly: what Python's checks do not catch must not crash."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi  # noqa: F401 (it registers the targets)

_F32 = np.float32


def _struct(shape, dtype=_F32):
  return jax.ShapeDtypeStruct(shape, dtype)


def _forward(change, aliases=None):
  operands = {
    "q": ((2, 8, 4, 16), _F32),
    "k": ((2, 8, 2, 16), _F32),
    "v": ((2, 8, 2, 16), _F32),
    "slices": ((1, 3, 6), np.int32),
    "sink": ((2, 4), _F32),
    "bias": ((0, 0, 0, 0), _F32),
    "alibi_slopes": ((0, 0), _F32),
    "tile_list": ((0,), np.int32),
  }
  results = {
    "out": ((2, 8, 4, 16), _F32),
    "lse": ((2, 8, 4), _F32),
    "max_logits": ((2, 4), _F32),
    "workspace": ((1024,), np.uint8),
  }
  _run("jax_magi_attention_forward", operands, results, _FORWARD_ATTRIBUTES, change, aliases)


def _backward(change, aliases=None):
  operands = {
    "q": ((2, 8, 4, 16), _F32),
    "k": ((2, 8, 2, 16), _F32),
    "v": ((2, 8, 2, 16), _F32),
    "dout": ((2, 8, 4, 16), _F32),
    "lse": ((2, 8, 4), _F32),
    "delta": ((2, 8, 4), _F32),
    "slices": ((1, 3, 6), np.int32),
    "bias": ((0, 0, 0, 0), _F32),
    "alibi_slopes": ((0, 0), _F32),
    "tile_list": ((0,), np.int32),
  }
  results = {
    "dq": ((2, 8, 4, 16), _F32),
    "dk": ((2, 8, 2, 16), _F32),
    "dv": ((2, 8, 2, 16), _F32),
    "dbias": ((0,), _F32),
    "dslopes": ((0,), _F32),
    "workspace": ((0,), np.uint8),
  }
  attributes = _FORWARD_ATTRIBUTES | {"deterministic": False, "num_dkv_parts": np.int32(1)}
  _run("jax_magi_attention_backward", operands, results, attributes, change, aliases)


def _softmax_forward(change):
  operands = {
    "x": ((2, 3, 4, 5), _F32),
    "mask": ((2, 1, 4, 5), np.bool_),
    "offset": ((1, 3), _F32),
  }
  results = {"y": ((2, 3, 4, 5), _F32), "offset_probability": ((2, 3, 4), _F32)}
  _run("jax_magi_softmax_forward", operands, results, _SOFTMAX_ATTRIBUTES, change)


def _softmax_backward(change):
  operands = {"y": ((2, 3, 4, 5), _F32), "dy": ((2, 3, 4, 5), _F32)}
  results = {"dx": ((2, 3, 4, 5), _F32), "dot": ((2, 3, 4), _F32)}
  _run("jax_magi_softmax_backward", operands, results, _SOFTMAX_ATTRIBUTES, change)


_FORWARD_ATTRIBUTES = {
  "softmax_scale": _F32(1),
  "softcap": _F32(0),
  "sm_margin": np.int32(0),
  "tile_stamp": np.int32(0),
  "architecture": "none",
  "shared_memory_bytes": np.int32(0),
}
_SOFTMAX_ATTRIBUTES = {"scale": _F32(1), "lo": np.int32(-(2**31)), "hi": np.int32(2**31 - 1)}


def _run(target, operands, results, attributes, change, aliases=None):
  """Calls a target. Running results are operands; `aliases` maps operands to results, by index."""
  running = {name: x for name, x in change.items() if name.startswith("running")}
  change = {name: x for name, x in change.items() if name not in running}
  assert change.keys() <= operands.keys() | results.keys() | attributes.keys()
  operands = {name: change.get(name, x) for name, x in operands.items()} | running
  results = {name: change.get(name, x) for name, x in results.items()}
  attributes = {name: change.get(name, x) for name, x in attributes.items()}
  types = [_struct(*x) for x in results.values()]
  call = jax.ffi.ffi_call(target, types, input_output_aliases=aliases)
  values = [jnp.zeros(*x) for x in operands.values()]
  jax.block_until_ready(jax.jit(lambda *x: call(*x, **attributes))(*values))


def test_right_shapes_are_accepted():
  _forward({})
  _backward({})
  _softmax_forward({})
  _softmax_forward({"mask": ((0,), np.bool_), "offset": ((0, 0), _F32)})
  _softmax_backward({})
  _softmax_backward({"dot": ((0,), _F32)})


@pytest.mark.parametrize(
  ("name", "wrong"),
  [
    ("q", ((8, 4, 16), _F32)),
    ("q", ((2, 8, 3, 16), _F32)),
    ("q", ((2, 8, 4, 16), np.int32)),
    ("k", ((8, 2, 16), _F32)),
    ("k", ((2, 8, 2, 17), _F32)),
    ("k", ((3, 8, 2, 16), _F32)),
    ("k", ((2, 8, 2, 16), np.float16)),
    ("v", ((2, 9, 2, 16), _F32)),
    ("slices", ((1, 3, 5), np.int32)),
    ("slices", ((3, 6), np.int32)),
    ("slices", ((3, 3, 6), np.int32)),
    ("slices", ((1, 3, 6), np.int16)),
    ("sink", ((4,), _F32)),
    ("sink", ((2, 4), np.float16)),
    ("bias", ((4, 8, 8), _F32)),
    ("bias", ((2, 4, 8, 7), _F32)),
    ("bias", ((2, 4, 7, 8), _F32)),
    ("bias", ((2, 2, 8, 8), _F32)),
    ("bias", ((3, 1, 1, 8), _F32)),
    ("bias", ((1, 1, 8, 8), np.float16)),
    ("alibi_slopes", ((4,), _F32)),
    ("alibi_slopes", ((1, 4), _F32)),
    ("alibi_slopes", ((2, 4), np.float16)),
    ("out", ((2, 8, 4, 15), _F32)),
    ("out", ((2, 8, 4, 16), np.float16)),
    ("lse", ((2, 4, 8), _F32)),
    ("max_logits", ((4,), _F32)),
  ],
)
def test_forward_names_the_wrong_operand(name, wrong):
  with pytest.raises(jax.errors.JaxRuntimeError, match=f"attention forward: {name} "):
    _forward({name: wrong})


def test_operands_that_contradict_q_are_named():
  """Where q is what was changed, k is the first operand that no longer fits."""
  for change in (((3, 8, 4, 16), _F32), ((2, 8, 4, 17), _F32), ((2, 8, 4, 16), np.float16)):
    with pytest.raises(jax.errors.JaxRuntimeError, match="attention forward: k "):
      _forward({"q": change})


@pytest.mark.parametrize(
  ("name", "wrong"),
  [
    ("dbias", ((1, 1, 8, 8), _F32)),
    ("dslopes", ((2, 4), _F32)),
    ("dout", ((2, 8, 4, 17), _F32)),
    ("dout", ((2, 8, 4, 16), np.float16)),
    ("lse", ((2, 4, 8), _F32)),
    ("lse", ((2, 8, 4), np.float16)),
    ("delta", ((2, 9, 4), _F32)),
    ("slices", ((1, 3, 7), np.int32)),
    ("dq", ((2, 8, 4, 16), np.float16)),
    ("dk", ((2, 8, 4, 16), _F32)),
    ("dv", ((2, 8, 2, 16), np.float16)),
  ],
)
def test_backward_names_the_wrong_operand(name, wrong):
  with pytest.raises(jax.errors.JaxRuntimeError, match=f"attention backward: {name} "):
    _backward({name: wrong})


_RUNNING = {
  "running_out": ((2, 8, 4, 16), _F32),
  "running_lse": ((2, 8, 4), _F32),
  "running_max_logits": ((2, 4), _F32),
}
_DQ_SUM = {"running_dq": ((2, 4, 128), _F32), "dq": ((2, 4, 128), _F32)}


def test_running_results_are_accepted():
  _forward(_RUNNING, {8: 0, 9: 1, 10: 2})
  # The last call rounds.
  shapes = {"q": (2, 8, 4, 16), "k": (2, 8, 2, 16), "v": (2, 8, 2, 16), "out": (2, 8, 4, 16)}
  rounded = {name: (shape, np.float16) for name, shape in shapes.items()}
  _forward(_RUNNING | rounded, {9: 1, 10: 2})
  _backward(_DQ_SUM, {10: 0})
  larger = {name: ((2, 4, 200), _F32) for name in _DQ_SUM}
  _backward(larger, {10: 0})


@pytest.mark.parametrize("aliases", [None, {8: 0}, {8: 0, 9: 1}], ids=str)
def test_running_results_must_lie_where_results_do(aliases):
  with pytest.raises(jax.errors.JaxRuntimeError, match="must share the memory"):
    _forward(_RUNNING, aliases)
  with pytest.raises(jax.errors.JaxRuntimeError, match="dq must share the memory"):
    _backward(_DQ_SUM)


def test_wrong_running_results():
  few = {name: _RUNNING[name] for name in ("running_out", "running_lse")}
  with pytest.raises(jax.errors.JaxRuntimeError, match="there must be 3 running results, got 2"):
    _forward(few, {8: 0, 9: 1})
  with pytest.raises(jax.errors.JaxRuntimeError, match="attention forward: alibi_slopes "):
    _forward(_RUNNING | {"alibi_slopes": ((2, 4), _F32)}, {8: 0, 9: 1, 10: 2})
  with pytest.raises(jax.errors.JaxRuntimeError, match="attention backward: dq must have 3"):
    _backward({"running_dq": ((2, 8, 4, 16), _F32)}, {10: 0})
  small = {name: ((2, 4, 127), _F32) for name in _DQ_SUM}
  with pytest.raises(jax.errors.JaxRuntimeError, match="attention backward: dq is too small"):
    _backward(small, {10: 0})


@pytest.mark.parametrize(
  ("name", "wrong"),
  [
    ("x", ((3, 4, 5), _F32)),
    ("x", ((2, 3, 4, 5), np.int32)),
    ("y", ((2, 3, 4, 6), _F32)),
    ("y", ((2, 3, 4, 5), np.float16)),
    ("mask", ((4, 5), np.bool_)),
    ("mask", ((2, 2, 4, 5), np.bool_)),
    ("mask", ((2, 1, 4, 5), np.int8)),
    ("mask", ((2, 1, 4, 5), np.float16)),
    ("offset", ((3,), _F32)),
    ("offset", ((), _F32)),
    ("offset", ((3, 3), _F32)),
    ("offset", ((1, 3), np.float16)),
    ("offset_probability", ((2, 3, 5), _F32)),
    ("offset_probability", ((0,), _F32)),
  ],
)
def test_softmax_forward_names_the_wrong_operand(name, wrong):
  with pytest.raises(jax.errors.JaxRuntimeError, match=f"softmax forward: {name} "):
    _softmax_forward({name: wrong})


@pytest.mark.parametrize(
  ("name", "wrong"),
  [
    ("y", ((4, 5), _F32)),
    ("dy", ((2, 3, 4, 6), _F32)),
    ("dx", ((2, 3, 4, 5), np.float16)),
    ("dot", ((2, 3, 5), _F32)),
    ("dot", ((2, 3, 4), np.float16)),
  ],
)
def test_softmax_backward_names_the_wrong_operand(name, wrong):
  with pytest.raises(jax.errors.JaxRuntimeError, match=f"softmax backward: {name} "):
    _softmax_backward({name: wrong})


@pytest.mark.parametrize(
  ("run", "name", "wrong", "expected"),
  [
    (_forward, "softmax_scale", np.float64(0.77), "F32"),
    (_forward, "sm_margin", np.int64(77), "S32"),
    (_backward, "deterministic", np.int32(77), "PRED"),
    (_softmax_forward, "lo", np.int64(77), "S32"),
  ],
)
def test_wrongly_typed_attribute_is_an_error(run, name, wrong, expected):
  # XLA caches attributes by value, and would reuse an equal one of the right type from another
  # call. Therefore, these values are used nowhere else.
  match = f"Wrong scalar data type: expected {expected}"
  with jax.enable_x64(True), pytest.raises(jax.errors.JaxRuntimeError, match=match):
    run({name: wrong})


def test_a_million_slices_are_accepted():
  """None of them makes a pair visible."""
  _forward({"slices": ((1, 1 << 20, 6), np.int32)})
  _backward({"slices": ((1, 1 << 20, 6), np.int32)})


@pytest.mark.parametrize("edge", [-(2**31), 2**31 - 1, 2**30, -1])
def test_wild_slices_are_clipped_to_the_arrays(edge):
  """Every number of a slice is at an extreme. Results are finite."""
  rng = np.random.default_rng(0)
  q, k, v = (rng.standard_normal((1, 8, heads, 16)).astype(_F32) for heads in (4, 2, 2))
  rest = np.full((1, 4), -np.inf, _F32), np.zeros((0, 0, 0, 0), _F32), np.zeros((0, 0), _F32)
  types = [_struct((1, 8, 4, 16)), _struct((1, 8, 4)), _struct((1, 4)), _struct((0,), np.uint8)]
  call = jax.ffi.ffi_call("jax_magi_attention_forward", types)
  program = jax.jit(lambda *x: call(*x, **_FORWARD_ATTRIBUTES))
  whole = np.array([0, 8, 0, 8, -(2**30), 2**30], np.int32)
  for i in range(6):
    slices = whole.copy()
    slices[i] = edge
    out, lse, *_ = program(q, k, v, slices[None, None], *rest, np.zeros(0, np.int32))
    assert np.isfinite(out).all() and not np.isnan(lse).any()


def test_lists_are_not_read_by_kernels_that_need_none():
  """CPU kernels accept any tile list, because they do not use it."""
  _forward({"tile_list": ((7,), np.int32), "tile_stamp": np.int32(-1)})
  _backward({"tile_list": ((7,), np.int32), "num_dkv_parts": np.int32(77)})
