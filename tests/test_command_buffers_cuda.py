"""Kernels in command buffers, which is XLA's name for CUDA graphs that it captures; on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask, fused_scale_mask_softmax
from tests.arrays import normals

pytestmark = pytest.mark.gpu

_OPTIONS = {
  "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
  "xla_gpu_graph_min_graph_size": 1,
}
_LENGTH = 300


def _operands(head_dim, seed=0):
  shapes = [(_LENGTH, heads, head_dim) for heads in (4, 2, 2)]
  return [jnp.asarray(x, jnp.bfloat16) for x in normals(*shapes, seed=seed)]


def _terms(kind):
  if kind == "plain":
    return {}
  (bias,) = normals((4, _LENGTH, _LENGTH))
  return {"bias": jnp.asarray(bias, jnp.bfloat16), "alibi_slopes": jnp.full(4, 0.1, np.float32)}


def _calls(program, *operands):
  """The results of several calls of a program, because the first calls run before the capture."""
  for _ in range(5):
    results = program(*operands)
  return results


def _assert_same(got, expected, *, is_exact):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    if is_exact:
      np.testing.assert_array_equal(a, b)
    else:  # Additions to dq come in any order.
      np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * np.abs(b).max())


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("kind", ["plain", "terms"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_forward(head_dim, kind, is_known):
  mask, terms = AttentionMask.causal(_LENGTH), _terms(kind)

  def layers(q, k, v, slices):
    used = mask if is_known else AttentionMask(slices, _LENGTH, _LENGTH)
    for _ in range(3):
      q = jax_magi.attention(2 * q, k, v, used, implementation="cuda", **terms)[0]
    return q

  operands = (*_operands(head_dim), jnp.asarray(mask.slices))
  captured = jax.jit(layers, compiler_options=_OPTIONS)
  _assert_same(_calls(captured, *operands), jax.jit(layers)(*operands), is_exact=True)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["plain", "terms"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_backward(head_dim, kind, deterministic):
  mask, terms = AttentionMask.causal(_LENGTH), _terms(kind)

  def loss(q, k, v, terms):
    call = functools.partial(
      jax_magi.attention, mask=mask, deterministic=deterministic, implementation="cuda", **terms
    )
    return (call(q, k, v)[0] ** 2).astype(np.float32).sum()

  program = jax.grad(loss, (0, 1, 2, 3) if terms else (0, 1, 2))
  operands = (*_operands(head_dim), terms)
  captured = jax.jit(program, compiler_options=_OPTIONS)
  expected = jax.jit(program)(*operands)
  _assert_same(_calls(captured, *operands), expected, is_exact=deterministic)


def test_softmax():
  (x,) = normals((2, 4, 100, 100))

  def layers(x):
    for _ in range(3):
      x = 5 * fused_scale_mask_softmax(x, is_causal=True, implementation="cuda")
    return x

  def gradient(x):
    return jax.grad(lambda x: (layers(x) ** 2).sum())(x)

  for program in (layers, gradient):
    captured = jax.jit(program, compiler_options=_OPTIONS)
    _assert_same(_calls(captured, x), jax.jit(program)(x), is_exact=True)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_operands_may_be_written_right_before_the_call(head_dim, is_known, is_captured):
  """Kernels start before the previous kernel has ended, and read operands at once.

  One small kernel of ours precedes each. If the mask is traced, another one makes its tile list.
  """
  mask = AttentionMask.causal(_LENGTH)

  def results(q, k, v, slices, *, is_written):
    """out, and gradients of q, k and v. `is_written`: XLA's kernels write the operands first."""
    if is_written:
      q, k, v, slices = jax.lax.optimization_barrier((q * 3, k * 2, v * 5, slices + 0))
    used = mask if is_known else AttentionMask(slices, _LENGTH, _LENGTH)
    attention = functools.partial(
      jax_magi.attention, mask=used, deterministic=True, implementation="cuda"
    )
    out, pull = jax.vjp(lambda q, k, v: attention(q, k, v)[0], q, k, v)
    return out, *pull(out * 3)

  options = _OPTIONS if is_captured else None
  program = jax.jit(functools.partial(results, is_written=True), compiler_options=options)
  expect = jax.jit(functools.partial(results, is_written=False))
  for seed in range(20):  # What an earlier turn left in memory is another array.
    q, k, v = _operands(head_dim, seed)
    expected = expect(*jax.block_until_ready((q * 3, k * 2, v * 5)), mask.slices)
    for a, b in zip(program(q, k, v, mask.slices), expected, strict=True):
      np.testing.assert_array_equal(a, b)
