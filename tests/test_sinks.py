"""Sinks in 16 bits, and sinks of each token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask, reference
from tests.arrays import assert_same_bits, assert_trees_close, normal, normals

_SHAPES = [(40, 4, 16), (40, 2, 16), (40, 2, 16)]
_MASK = AttentionMask.from_cu_seqlens([0, 15, 33], causal=True, q_len=40)  # The last see nothing.


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=["one", "two"])
def test_sinks_of_16_bits_are_used_in_float32(dtype, shape):
  q, k, v = normals(*_SHAPES)
  sink = jnp.asarray(normal(*shape, seed=1)).astype(dtype)

  def loss(sink):
    out, meta = jax_magi.attention(q, k, v, _MASK, sink=sink)
    return jnp.sum(out**2) + jnp.sum(meta.lse), out

  (_, out), grad = jax.value_and_grad(loss, has_aux=True)(sink)
  (_, expected), expected_grad = jax.value_and_grad(loss, has_aux=True)(sink.astype(np.float32))
  assert grad.dtype == dtype
  assert_same_bits((out, grad), (expected, expected_grad.astype(dtype)))
  batched = jax_magi.dot_product_attention(*(x[None] for x in (q, k, v)), mask=_MASK, sink=sink)
  assert_same_bits(batched[0], out)


def _with_token_sinks(out, lse, z):
  """Sinks per token, as in docs/design.md."""
  return (out * jax.nn.sigmoid(lse - z)[..., None]).astype(out.dtype), jnp.logaddexp(lse, z)


def test_sinks_of_each_token_come_from_lse():
  q, k, v = normals(*_SHAPES)
  z = normal(40, 4, seed=1)
  dense = _MASK.to_dense()

  def ours(q, k, v, z):
    out, meta = jax_magi.attention(q, k, v, _MASK)
    return _with_token_sinks(out, meta.lse, z)

  def expected(q, k, v, z):
    def row(q, visible, z):
      out, lse, _ = reference.attention(q[None], k, v, visible[None], sink=z)
      return out[0], lse[0]

    return jax.vmap(row)(q, dense, z)

  def with_grads(fun):
    def loss(*operands):
      out, lse = fun(*operands)
      return jnp.sum(out**2) + jnp.sum(jnp.sin(lse)), (out, lse)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(q, k, v, z)

  assert_trees_close(with_grads(ours), with_grads(expected), rtol=1e-4)
