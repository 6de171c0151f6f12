"""jax.export with symbolic sizes: one program for any batch; lengths must be known."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask
from tests.arrays import assert_trees_close, normals

_HEADS = (8, 4, 4)  # Of q, k and v.


def _export_symbolic(fun, *shapes):
  """The function for all sizes that the letters in the shapes stand for."""
  scope = jax.export.SymbolicScope()
  types = [
    jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), dtype)
    for shape, dtype in shapes
  ]
  exported = jax.export.export(jax.jit(fun))(*types)
  return jax.export.deserialize(exported.serialize()).call


def _gradients_of_vmap(q, k, v, implementation):
  def loss(q, k, v):
    out, _ = jax_magi.attention(q, k, v, AttentionMask.causal(64), implementation=implementation)
    return jnp.sin(out).sum()

  return jax.vmap(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)


def _dot_product(q, k, v, implementation):
  return jax_magi.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


@pytest.mark.parametrize("fun", [_gradients_of_vmap, _dot_product])
@pytest.mark.parametrize("implementation", ["blockwise", None])
def test_for_any_batch(implementation, fun):
  shapes = [(f"b, 64, {heads}, 16", np.float32) for heads in _HEADS]
  call = _export_symbolic(functools.partial(fun, implementation=implementation), *shapes)
  arrays = normals(*((3, 64, heads, 16) for heads in _HEADS))
  assert_trees_close(call(*arrays), jax.jit(fun, static_argnums=3)(*arrays, "cpu"))


@pytest.mark.parametrize("implementation", ["blockwise", None])
def test_for_any_number_of_slices(implementation):
  def fun(q, k, v, slices):
    mask = AttentionMask(slices, 64, 64)
    return jax_magi.attention(q, k, v, mask, implementation=implementation)[0]

  shapes = [(f"64, {heads}, 16", np.float32) for heads in _HEADS]
  call = _export_symbolic(fun, *shapes, ("n, 6", np.int32))
  arrays = normals(*((64, heads, 16) for heads in _HEADS))
  mask = AttentionMask.from_cu_seqlens([0, 10, 64])
  expected = jax_magi.attention(*arrays, mask, implementation="cpu")[0]
  assert_trees_close(call(*arrays, mask.slices), expected)


def test_of_kernels_for_any_batch_is_refused():
  attend = functools.partial(jax_magi.dot_product_attention, implementation="cpu")
  shapes = [(f"b, 64, {heads}, 16", np.float32) for heads in _HEADS]
  with pytest.raises(NotImplementedError, match=r"'cpu' cannot be used: .* \[b, 64, 8, 16\]"):
    _export_symbolic(attend, *shapes)


_QKV = [(f"s, {heads}, 16", np.float32) for heads in _HEADS]
_QKV_OF_BATCH = [(f"2, {shape}", dtype) for shape, dtype in _QKV]
_SYMBOLIC_LENGTHS = {
  "q": (lambda *x: jax_magi.attention(*x, AttentionMask.causal(64)), _QKV),
  "k": (
    lambda *x: jax_magi.attention(*x, AttentionMask.causal(64)),
    [("64, 8, 16", np.float32), *_QKV[1:]],
  ),
  "q_len": (lambda q, k, v: jax_magi.attention(q, k, v, AttentionMask.causal(q.shape[0])), _QKV),
  "k_len": (lambda k: AttentionMask.full(64, k.shape[0]).slices, _QKV[1:2]),
  "ids": (lambda ids: AttentionMask.from_segment_ids(ids, 2).slices, [("s", np.int32)]),
  "query": (jax_magi.dot_product_attention, _QKV_OF_BATCH),
  "x's last two axes": (jax_magi.fused_scale_mask_softmax, [("2, s, s", np.float32)]),
}


@pytest.mark.parametrize("name", _SYMBOLIC_LENGTHS)
def test_any_length_says_what_to_do(name):
  fun, shapes = _SYMBOLIC_LENGTHS[name]
  match = f"^{name} must be of known size, got the symbolic .*export one program for each length"
  with pytest.raises(NotImplementedError, match=match):
    _export_symbolic(fun, *shapes)


def test_of_softmax_for_any_batch():
  def fun(x, mask, offset):
    def loss(x, offset):
      return jnp.sin(jax_magi.fused_scale_mask_softmax(x, mask, offset=offset)).sum()

    return jax.value_and_grad(loss, (0, 1))(x, offset)

  shapes = [("b, 8, 6, 10", np.float32), ("6, 10", np.bool_), ("8", np.float32)]
  call = _export_symbolic(fun, *shapes)
  x, mask, offset = normals((3, 8, 6, 10), (6, 10), (8,))
  assert_trees_close(call(x, mask > 0, offset), jax.jit(fun)(x, mask > 0, offset))
