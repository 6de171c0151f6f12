"""Every mistake a caller can make is named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask
from jax_magi._src.native import backends
from tests.needs import with_gpus


def _call(q=(8, 4, 16), k=(8, 2, 16), v=(8, 2, 16), dtype=jnp.float32, mask=None, **options):
  q, k, v = (jnp.zeros(x, dtype) if isinstance(x, tuple) else x for x in (q, k, v))
  mask = AttentionMask.causal(8) if mask is None else mask
  return jax_magi.attention(q, k, v, mask, **options)


@pytest.mark.parametrize(
  ("change", "error", "match"),
  [
    ({"q": (8, 16)}, ValueError, r"q must be \[length, num_heads, head_dim\], got \[8, 16\]"),
    ({"k": (1, 8, 2, 16)}, ValueError, "k must be"),
    ({"v": (8, 2)}, ValueError, "v must be"),
    ({"q": 3.0}, ValueError, "q must be an array"),
    ({"q": (8, 3, 16)}, ValueError, "multiple of k's .* got 3 and 2"),
    ({"k": (8, 0, 16), "v": (8, 0, 16)}, ValueError, "got 4 and 0"),
    ({"q": (8, 4, 32)}, ValueError, "same head_dim, got 32 and 16"),
    ({"q": (8, 4, 0), "k": (8, 2, 0)}, ValueError, "head dims must be positive"),
    ({"v": (9, 2, 16)}, ValueError, r"v must be \[8, 2, value_dim\]"),
    ({"v": (8, 4, 16)}, ValueError, r"v must be \[8, 2, value_dim\]"),
    ({"k": jnp.zeros((8, 2, 16), jnp.bfloat16)}, ValueError, "k must have q's dtype"),
    ({"dtype": jnp.int32}, ValueError, "floating point"),
    ({"dtype": jnp.float8_e4m3fn}, NotImplementedError, "float8_e4m3fn"),
    ({"mask": np.ones((8, 8), bool)}, ValueError, "mask must be an AttentionMask, got ndarray"),
    ({"mask": AttentionMask.causal(9)}, ValueError, "mask is for 9 queries and 9 keys"),
    ({"mask": AttentionMask.full(8, 9)}, ValueError, "mask is for 8 queries and 9 keys"),
    ({"mask": AttentionMask.full(9, 8)}, ValueError, "mask is for 9 queries and 8 keys"),
    ({"softmax_scale": "big"}, ValueError, "softmax_scale must be a number"),
    ({"softmax_scale": np.nan}, ValueError, "softmax_scale must be finite"),
    ({"softmax_scale": "0.5"}, ValueError, "softmax_scale must be a number"),
    ({"softmax_scale": [0.5, 0.5]}, ValueError, r"must be a number, got \[0.5, 0.5\]"),
    ({"softmax_scale": 1e39}, ValueError, "softmax_scale must be finite in float32"),
    ({"softcap": -1.0}, ValueError, "softcap must be positive"),
    ({"softcap": 1e38}, ValueError, "softcap must be 0 or in"),
    ({"softcap": 1e-40}, ValueError, "softcap must be 0 or in"),
    ({"sm_margin": 2**31}, ValueError, "sm_margin must fit in 32 bits"),
    ({"sm_margin": -1}, ValueError, "sm_margin must not be negative, got -1"),
    ({"sm_margin": 1.5}, ValueError, "sm_margin must be an integer"),
    ({"deterministic": "yes"}, ValueError, "deterministic must be"),
    ({"implementation": "fast"}, ValueError, "implementation must be one of .* got 'fast'"),
    ({"sink": jnp.zeros(3)}, ValueError, r"sink must be \[4\] or \[num_sink, 4\], got \[3\]"),
    ({"sink": jnp.zeros((1, 1, 4))}, ValueError, "sink must be"),
    ({"sink": jnp.zeros(4, jnp.int32)}, ValueError, "sink must be float32, bfloat16 or float16"),
  ],
)
def test_bad_argument_is_named(change, error, match):
  with pytest.raises(error, match=match):
    _call(**change)


def test_cuda_kernels_are_missed_by_name(monkeypatch):
  missing = dataclasses.replace(backends.CUDA, module=None)  # As in a build without nvcc.
  monkeypatch.setitem(backends.BACKENDS, "cuda", missing)
  with pytest.raises(NotImplementedError, match="this build of jax_magi has no kernels"):
    _call(implementation="cuda", dtype=jnp.bfloat16)


@pytest.mark.parametrize(
  ("change", "match"),
  [
    ({}, "'cuda' cannot be used: the kernels take bfloat16 and float16, not float32"),
    ({"dtype": jnp.bfloat16, "v": (8, 2, 264)}, "head dims up to 256, not 16 and 264"),
  ],
  ids=["float32", "large_value_dim"],
)
def test_cuda_kernels_name_what_they_do_not_take(change, match, monkeypatch):
  with_gpus(monkeypatch, [])
  with pytest.raises(NotImplementedError, match=match):
    _call(implementation="cuda", **change)


def test_traced_scale_is_named():
  with pytest.raises(ValueError, match="softmax_scale must be a static number"):
    jax.jit(lambda s: _call(softmax_scale=s))(1.0)


_Q, _K = [[0, 4], [4, 8]], [[0, 4], [4, 8]]


@pytest.mark.parametrize(
  ("arguments", "match"),
  [
    (([[0, 4], [4, 9]], _K), r"q_ranges\[1\] = \[4, 9\) is not inside \[0, 8\)"),
    ((_Q, [[-1, 4], [4, 8]]), r"k_ranges\[0\] = \[-1, 4\) is not inside"),
    (([[4, 0], [4, 8]], _K), r"q_ranges\[0\] = \[4, 0\) is reversed"),
    ((np.array(_Q, np.float32), _K), "q_ranges must hold integers, got dtype float32"),
    ((np.full((2, 2), np.nan), _K), "q_ranges must hold integers"),
    ((_Q, [[0, 4]]), r"k_ranges must be \[2, 2\], got \[1, 2\]"),
    (([0, 4], _K), r"q_ranges must be \[n, 2\], got \[2\]"),
    ((_Q, _K, [0]), r"attn_type_map must be \[2\], got \[1\]"),
    ((_Q, _K, [0, 4]), r"attn_type_map\[1\] must be a MaskType in 0 .. 3, got 4"),
    ((_Q, _K, [0.0, 1.0]), "attn_type_map must hold integers"),
    (([[0, 5], [4, 8]], [[0, 8], [0, 8]]), "slices 0 and 1 overlap"),
    ((np.array([[0, 2**40], [4, 8]]), _K), "must lie within"),
  ],
)
def test_bad_range_is_named(arguments, match):
  q, k = jnp.zeros((8, 4, 16)), jnp.zeros((8, 2, 16))
  with pytest.raises(ValueError, match=match):
    jax_magi.flex_flash_attn_func(q, k, k, *arguments)


@pytest.mark.parametrize(
  ("make", "match"),
  [
    (lambda: AttentionMask.causal(-1), "q_len must lie in"),
    (lambda: AttentionMask.causal(2**30), "q_len must lie in"),
    (lambda: AttentionMask.causal(1.5), "q_len must be a static integer"),
    (lambda: AttentionMask.sliding_window(8, left=-1), "left must be"),
    (lambda: AttentionMask.prefix_lm(9, 8), "prefix_len must be at most"),
    (lambda: AttentionMask.block_causal(0, 8), "block_size must be positive"),
    (lambda: AttentionMask.from_segment_ids(np.array([1, 3]), 1), "ids must have at most"),
    (lambda: AttentionMask.from_segment_ids(np.array([1, 2, 1]), 2), "1 is not"),
    (lambda: AttentionMask.from_segment_ids(np.array([1.0]), 2), "ids must hold integers"),
    (lambda: AttentionMask.from_cu_seqlens([0, 3, 2]), "cu_seqlens_q must not decrease"),
    (lambda: AttentionMask.from_cu_seqlens([]), "begin with 0"),
    (lambda: AttentionMask.from_cu_seqlens([3, 4, 5]), "begin with 0 .sums of lengths"),
    (lambda: AttentionMask.from_segment_ids(np.array([1]), 2, window=3), "window must be"),
    (lambda: AttentionMask.causal(8).pad(2.0), "num_slices must be a static integer"),
    (lambda: AttentionMask.causal(8).pad(0), "more than 0"),
    (lambda: AttentionMask(np.zeros((2, 5), np.int32), 8, 8), r"slices must be \[num_slices, 6\]"),
    (lambda: AttentionMask.shared_question(3, [5, -2]), "negative, but one is -2"),
  ],
)
def test_bad_mask_is_named(make, match):
  with pytest.raises(ValueError, match=match):
    make()


def test_traced_ranges_need_lengths():
  with pytest.raises(ValueError, match="q_len must be given"):
    jax.jit(lambda r: AttentionMask.from_ranges(r, r))(jnp.zeros((1, 2), jnp.int32))


def test_traced_answer_lengths_are_named():
  with pytest.raises(ValueError, match="answer_lens must be known"):
    jax.jit(lambda x: AttentionMask.shared_question(3, x))(jnp.ones(2, jnp.int32))


def test_documents_of_other_keys_must_be_given():
  q, k = jnp.zeros((2, 8, 4, 16)), jnp.zeros((2, 9, 2, 16))
  ids = np.ones((2, 8), np.int32)
  with pytest.raises(ValueError, match="kv_segment_ids must be given: query and key have 8 and 9"):
    jax_magi.dot_product_attention(q, k, k, segment_ids=ids, max_segments=1)


def test_batched_mask_points_to_vmap():
  slices = np.stack([AttentionMask.causal(8).slices] * 3)
  batched = jax.tree.map(lambda _: slices, AttentionMask.causal(8))
  with pytest.raises(ValueError, match=r"jax\.vmap"):
    _call(mask=batched)


_EDGE = 2**31 - 1


@pytest.mark.parametrize(
  ("wild", "tame"),
  [
    ([-_EDGE, _EDGE, -_EDGE, _EDGE, -_EDGE, 0], [0, 70, 0, 70, -(2**30), 0]),
    ([0, 70, 0, -_EDGE - 1, -(2**30), 2**30], [0, 0, 0, 0, 0, 0]),
    ([0, 70, 0, 70, _EDGE, _EDGE], [0, 0, 0, 0, 0, 0]),
    ([0, 70, 0, 70, -_EDGE - 1, -_EDGE - 1], [0, 0, 0, 0, 0, 0]),
    ([_EDGE, _EDGE, 0, 70, -5, 5], [0, 0, 0, 0, 0, 0]),
    ([60, 10, 50, 20, -5, 5], [0, 0, 0, 0, 0, 0]),
  ],
)
def test_wild_traced_slices_are_clipped(wild, tame):
  """Nothing can check them: they must not read or write outside the arrays."""
  q = np.random.default_rng(0).standard_normal((70, 2, 16)).astype(np.float32)

  @jax.jit
  def run(q, slices):
    def loss(q):
      return jnp.sum(jax_magi.attention(q, q, q, AttentionMask(slices, 70, 70))[0] ** 2)

    return jax.value_and_grad(loss)(q)

  got, expected = (run(q, np.array([s], np.int32)) for s in (wild, tame))
  jax.tree.map(np.testing.assert_array_equal, got, expected)
