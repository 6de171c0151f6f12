"""Head dims beyond 128, which have separate backward kernels: 192 with values of 128, and 256."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask
from tests.accuracy import DTYPES, check_attention, make_inputs
from tests.arrays import assert_same_bits, normals
from tests.stages import check_stages, mask_of_weights

pytestmark = pytest.mark.gpu

_DIMS = [(192, 128), (256, 256)]
# Blocks have 64 queries, and tiles 128 keys or 64.
_MASKS = {
  "one_pair": AttentionMask.full(1),
  "one_block": AttentionMask.full(64, 128),
  "one_past_a_block": AttentionMask.full(65, 129),
  "two_blocks": AttentionMask.causal(128),
  "full": AttentionMask.full(520, 391),
  "causal": AttentionMask.causal(777),
  "window": AttentionMask.sliding_window(900, left=130),
  "documents": AttentionMask.from_cu_seqlens([0, 131, 402, 410, 700], causal=True),
  "short_documents": AttentionMask.from_cu_seqlens(np.arange(0, 601, 24)),
  "nothing": AttentionMask.full(200, 300).crop(0, 200, 300, 400),
  "many_slices": AttentionMask.from_ranges(
    [[i, i + 30] for i in range(0, 600, 40)], [[0, 200]] * 15, k_len=250
  ),
}


@pytest.fixture(params=_DIMS, ids=lambda dims: f"{dims[0]}_{dims[1]}")
def dims(request):
  return request.param


def _inputs(mask, dims, heads=(4, 2), dtype="bf16", seed=0):
  shape = (mask.q_len, mask.k_len, *heads, *dims)
  return make_inputs(np.random.default_rng(seed), DTYPES[dtype], *shape, 0)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"is_mask_known": True}], ids=str)
@pytest.mark.parametrize("name", _MASKS)
def test_mask(name, dims, options):
  check_attention(_inputs(_MASKS[name], dims), _MASKS[name], "cuda", **options)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (8, 1), (12, 4)], ids=str)
def test_heads(heads, dims, dtype):
  mask = _MASKS["documents"]
  check_attention(_inputs(mask, dims, heads, dtype), mask, "cuda")


_PADDED = [(136, 128), (160, 96), (192, 8), (184, 120), (200, 64), (64, 136), (256, 8), (232, 248)]


@pytest.mark.parametrize("padded", _PADDED, ids=str)
def test_dims_that_are_padded(padded):
  mask = _MASKS["window"]
  check_attention(_inputs(mask, padded), mask, "cuda")


@pytest.mark.parametrize("sm_margin", [0, 120, 131])
def test_few_blocks_of_threads_take_many_tiles(dims, sm_margin):
  mask = _MASKS["causal"]
  check_attention(_inputs(mask, dims, (6, 6)), mask, "cuda", sm_margin=sm_margin)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["full", "window", "documents"])
def test_softcap(name, dims, dtype):
  inputs = _inputs(_MASKS[name], dims, dtype=dtype)
  check_attention(inputs, _MASKS[name], "cuda", softcap=2.0)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("group", [1, 4, 6])
def test_heads_are_cut_where_gradients_are_float32(group, dims, softcap):
  mask = mask_of_weights(64)
  inputs = _inputs(mask, dims, (2 * group, 2))
  check_stages(inputs, mask, ((0, mask.k_len),), "cuda", softcap=softcap)


def test_stages_add_to_one_dq(dims):
  mask = _MASKS["documents"]
  check_stages(_inputs(mask, dims), mask, ((128, 400), (0, 128), (400, 700)), "cuda")


@pytest.mark.parametrize("name", ["causal", "documents", "window"])
def test_runs_are_equal_bit_for_bit(name, dims):
  mask = _MASKS[name]
  of_all = [dims[0], dims[0], dims[1], dims[1]]  # q, k, v, dout
  heads = (6, 2, 2, 6)
  shapes = [(mask.q_len, h, d) for h, d in zip(heads, of_all, strict=True)]
  operands = [jnp.asarray(x) for x in normals(*shapes, dtype=jnp.bfloat16)]

  @functools.partial(jax.jit, static_argnums=0)
  def gradients(sm_margin, q, k, v, dout):
    def fun(q, k, v):
      options = {"deterministic": True, "sm_margin": sm_margin, "implementation": "cuda"}
      return jax_magi.attention(q, k, v, mask, **options)[0]

    return jax.vjp(fun, q, k, v)[1](dout)

  first = gradients(0, *operands)
  for sm_margin in (0, 90, 131):
    for _ in range(3):
      assert_same_bits(gradients(sm_margin, *operands), first)
