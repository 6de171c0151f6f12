"""Only a bias, or only slopes, in the Hopper kernels that support nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask
from tests.accuracy import DTYPES, check_attention, check_results, make_inputs, named_results

pytestmark = pytest.mark.gpu

_MASKS = {
  "full": AttentionMask.full,
  "causal": AttentionMask.causal,
  "window": lambda n: AttentionMask.sliding_window(n, left=70, right=3),
  "part_of_it": lambda n: AttentionMask.from_ranges(
    [[n // 5, n - n // 7]], [[n // 3, n - n // 9]], q_len=n, k_len=n
  ),
  "two_documents": lambda n: AttentionMask.from_cu_seqlens([0, n // 3, n], causal=True),
}
masks = pytest.mark.parametrize("mask", _MASKS)
head_dims = pytest.mark.parametrize("head_dim", [64, 128])


@pytest.mark.parametrize("is_mask_known", [False, True])
@masks
@head_dims
@pytest.mark.parametrize("length", [8, 64, 72, 128, 136, 192, 200, 1000])
def test_bias(length, head_dim, mask, is_mask_known):
  inputs = make_inputs(
    np.random.default_rng(0),
    DTYPES["bf16"],
    *(length, length, 4, 2, head_dim, head_dim),
    bias="hqk",
  )
  check_attention(inputs, _MASKS[mask](length), "cuda", is_mask_known=is_mask_known)


def _poison(shape):
  """Leaves memory that is not zero, to which results are then written."""
  jnp.full(shape, jnp.nan, jnp.bfloat16).block_until_ready().delete()


def _slice(q_range, k_range, kind, k_len):
  return AttentionMask.from_ranges([q_range], [k_range], [kind], q_len=200, k_len=k_len)


_HIDING = {
  "causal": _slice([0, 200], [0, 2056], 1, 2056),
  "bi_causal": _slice([0, 200], [0, 9000], 3, 9000),
  "full": _slice([0, 200], [0, 9000], 0, 9000),
  "inverse_causal-uneven_keys": _slice([3, 150], [1001, 8430], 2, 9000),
  "no_queries": _slice([7, 7], [0, 2056], 0, 2056),
  "four_keys": _slice([0, 72], [2050, 2054], 0, 2056),
  "few_pairs": _slice([3, 5], [3, 5], 0, 16),
  "documents": AttentionMask.from_cu_seqlens([0, 1, 30, 77, 180, 200], causal=True),
  "100_slices": AttentionMask.from_ranges(
    np.tile([[20, 150]], (100, 1)),
    np.stack([11 * np.arange(100), 11 * np.arange(100) + 5], axis=1),
    q_len=200,
    k_len=1104,
  ),
}


@pytest.mark.parametrize("is_mask_known", [False, True])
@pytest.mark.parametrize("mask", _HIDING)
@head_dims
def test_pairs_that_are_hidden_have_no_gradient(head_dim, mask, is_mask_known):
  """The backward kernel writes zeros for them: some CTAs at first, all at the end."""
  mask = _HIDING[mask]
  inputs = make_inputs(
    np.random.default_rng(0),
    DTYPES["bf16"],
    *(mask.q_len, mask.k_len, 4, 2, head_dim, head_dim),
    bias="hqk",
  )
  _poison((4, mask.q_len, mask.k_len))
  check_attention(inputs, mask, "cuda", is_mask_known=is_mask_known)


@head_dims
def test_pairs_that_are_hidden_in_a_batch(head_dim):
  """Each row of the batch has its own mask."""
  rng = np.random.default_rng(0)
  length, lengths = 304, jnp.array([304, 1, 77], jnp.int32)
  q, k, v = (
    jnp.asarray(rng.standard_normal((3, length, heads, head_dim)), jnp.bfloat16)
    for heads in (4, 2, 2)
  )
  bias = jnp.asarray(rng.standard_normal((3, 4, length, length)), jnp.bfloat16)

  def loss(bias, implementation):
    out = jax_magi.dot_product_attention(
      q,
      k,
      v,
      bias,
      is_causal=True,
      key_value_seq_lengths=lengths,
      implementation=implementation,
    )
    return (out * v.repeat(2, axis=2)).astype(jnp.float32).sum()

  _poison(bias.shape)
  ours = jax.jit(jax.grad(lambda x: loss(x, "cuda")))(bias)
  plain = jax.jit(jax.grad(lambda x: loss(x, "xla")))(bias)
  token = np.arange(length)
  hidden = (token > token[:, None]) | (token >= np.asarray(lengths)[:, None, None, None])
  hidden = np.broadcast_to(hidden, bias.shape)
  assert not np.asarray(ours)[hidden].astype(np.float32).any()
  np.testing.assert_allclose(
    np.asarray(ours, np.float32), np.asarray(plain, np.float32), rtol=0.03, atol=0.02
  )


def _check_slopes(length, heads, head_dim, mask, *, is_mask_known=True, deterministic=False):
  inputs = make_inputs(
    np.random.default_rng(0),
    DTYPES["bf16"],
    *(length, length, *heads, head_dim, head_dim),
    has_alibi=True,
  )
  mask, slopes = _MASKS[mask](length), jnp.asarray(inputs.alibi_slopes)

  @jax.jit
  def run(operands, cotangents, traced_mask):
    def fun(q, k, v):
      options = {"alibi_slopes": slopes, "return_max_logits": True, "implementation": "cuda"}
      options["deterministic"] = deterministic
      seen = mask if is_mask_known else traced_mask
      out, meta = jax_magi.attention(q, k, v, seen, **options)
      return (out, meta.lse), meta.max_logits

    (out, lse), vjp, max_logits = jax.vjp(fun, *operands, has_aux=True)
    return named_results(out, lse, max_logits, vjp(cotangents))

  check_results(run(inputs.operands[:3], inputs.cotangents, mask), inputs, mask)


@masks
@head_dims
@pytest.mark.parametrize("length", [1, 64, 65, 80, 129, 193, 1000])
def test_slopes_without_a_gradient(length, head_dim, mask):
  _check_slopes(length, (4, 2), head_dim, mask)


@masks
@head_dims
@pytest.mark.parametrize("options", [{"is_mask_known": False}, {"deterministic": True}], ids=str)
def test_slopes_without_a_gradient_in_other_ways(options, head_dim, mask):
  _check_slopes(1000, (4, 2), head_dim, mask, **options)


@pytest.mark.parametrize("mask", ["causal", "two_documents"])
@head_dims
def test_slopes_without_a_gradient_in_many_tiles(head_dim, mask):
  _check_slopes(328, (150, 50), head_dim, mask)
