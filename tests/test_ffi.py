"""The native handlers, called directly: what Python's checks do not catch must not crash."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_magi import _ffi

_F32 = np.float32


def _struct(shape, dtype=_F32):
  return jax.ShapeDtypeStruct(shape, dtype)


def _forward(change):
  operands = {
    "q": ((2, 8, 4, 16), _F32),
    "k": ((2, 8, 2, 16), _F32),
    "v": ((2, 8, 2, 16), _F32),
    "slices": ((1, 3, 6), np.int32),
    "sink": ((2, 4), _F32),
    "plan": ((0,), np.int32),
  }
  results = {
    "out": ((2, 8, 4, 16), _F32),
    "lse": ((2, 8, 4), _F32),
    "max_logits": ((2, 4), _F32),
    "workspace": ((1024,), np.uint8),
  }
  attributes = {"softmax_scale": _F32(1), "softcap": _F32(0), "sm_margin": np.int32(0)}
  _run("jax_magi_attention_forward", operands, results, attributes, change)


def _backward(change):
  operands = {
    "q": ((2, 8, 4, 16), _F32),
    "k": ((2, 8, 2, 16), _F32),
    "v": ((2, 8, 2, 16), _F32),
    "dout": ((2, 8, 4, 16), _F32),
    "lse": ((2, 4, 8), _F32),
    "delta": ((2, 4, 8), _F32),
    "slices": ((1, 3, 6), np.int32),
    "plan": ((0,), np.int32),
  }
  results = {
    "dq": ((2, 8, 4, 16), _F32),
    "dk": ((2, 8, 2, 16), _F32),
    "dv": ((2, 8, 2, 16), _F32),
    "workspace": ((0,), np.uint8),
  }
  attributes = {
    "softmax_scale": _F32(1),
    "softcap": _F32(0),
    "deterministic": False,
    "sm_margin": np.int32(0),
  }
  _run("jax_magi_attention_backward", operands, results, attributes, change)


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


_SOFTMAX_ATTRIBUTES = {"scale": _F32(1), "lo": np.int32(-(2**31)), "hi": np.int32(2**31 - 1)}


def _run(target, operands, results, attributes, change):
  operands = {name: change.get(name, x) for name, x in operands.items()}
  results = {name: change.get(name, x) for name, x in results.items()}
  types = [_struct(*x) for x in results.values()]
  call = jax.ffi.ffi_call(target, types)
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
    ("out", ((2, 8, 4, 15), _F32)),
    ("out", ((2, 8, 4, 16), np.float16)),
    ("lse", ((2, 4, 8), _F32)),
    ("max_logits", ((4,), _F32)),
  ],
)
def test_forward_names_the_wrong_operand(name, wrong):
  with pytest.raises(jax.errors.JaxRuntimeError, match=f"attention forward: {name}|forward: [kv] "):
    _forward({name: wrong})


@pytest.mark.parametrize(
  ("name", "wrong"),
  [
    ("dout", ((2, 8, 4, 17), _F32)),
    ("dout", ((2, 8, 4, 16), np.float16)),
    ("lse", ((2, 8, 4), _F32)),
    ("delta", ((2, 4, 9), _F32)),
    ("slices", ((1, 3, 7), np.int32)),
    ("dq", ((2, 8, 4, 16), np.float16)),
    ("dk", ((2, 8, 4, 16), _F32)),
    ("dv", ((2, 8, 2, 16), np.float16)),
  ],
)
def test_backward_names_the_wrong_operand(name, wrong):
  with pytest.raises(jax.errors.JaxRuntimeError, match=f"attention backward: {name}"):
    _backward({name: wrong})


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


def test_wrongly_typed_attribute_is_an_error():
  call = jax.ffi.ffi_call("jax_magi_attention_forward", [_struct((1, 8, 4, 16))] * 4)
  with pytest.raises(jax.errors.JaxRuntimeError):
    jax.block_until_ready(
      call(*[jnp.zeros((1, 8, 4, 16))] * 5, softmax_scale=1, softcap=_F32(0), sm_margin=np.int32(0))
    )


def test_float32_gradients_of_16_bit_keys():
  """What sums of partial gradients use: dk and dv unrounded."""
  rng = np.random.default_rng(0)
  q, k, v, dout = (rng.standard_normal((1, 8, 2, 16)).astype(jnp.bfloat16) for _ in range(4))
  lse = np.zeros((1, 2, 8), _F32)
  slices = np.array([[[0, 8, 0, 8, -(2**30), 2**30]]], np.int32)
  options = {"softmax_scale": 0.1, "softcap": 0.0, "deterministic": False, "sm_margin": 0}
  operands = (q, k, v, dout, lse, lse, slices, np.zeros(0, np.int32))
  wide, narrow = (
    _ffi.attention_backward(*operands, platform="cpu", dkv_dtype=dtype, **options)
    for dtype in (_F32, q.dtype)
  )
  for a, b in zip(wide[1:], narrow[1:], strict=True):
    assert a.dtype == _F32
    np.testing.assert_array_equal(a.astype(b.dtype), b)
    assert (np.asarray(a) != np.asarray(b).astype(_F32)).any()
