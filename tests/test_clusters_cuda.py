"""The forward kernel in clusters of two CTAs, for any mask, on a GPU."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jax_magi import AttentionMask
from tests.accuracy import DTYPES, check_attention, make_inputs
from tests.needs import forward_in_clusters
from tests.test_random_masks import masks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("in_clusters")]


@pytest.fixture(scope="module")
def in_clusters():
  with forward_in_clusters():
    yield


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("group", [2, 6])
@pytest.mark.parametrize("sm_margin", [0, 130])
@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(mask=masks(), seed=st.integers(0, 2**31), sink=st.booleans())
def test_random_mask(dtype, group, sm_margin, mask, seed, sink):
  """With the margin, one cluster processes all tiles."""
  shape = (mask.q_len, mask.k_len, 2 * group, 2, 128, 128)
  inputs = make_inputs(np.random.default_rng(seed), DTYPES[dtype], *shape, 0 if sink else None)
  check_attention(inputs, mask, "cuda", forward_only=True, sm_margin=sm_margin)


@pytest.mark.parametrize(
  "terms",
  [{"has_alibi": True}, {"bias": "hqk"}, {"bias": "h1k"}, {"bias": "1qk", "has_alibi": True}],
  ids=["slopes", "bias", "bias_of_keys", "both"],
)
@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(mask=masks(), seed=st.integers(0, 2**31))
def test_random_mask_with_terms(terms, mask, seed):
  shape = (mask.q_len, mask.k_len, 4, 2, 128, 128)
  inputs = make_inputs(np.random.default_rng(seed), DTYPES["bf16"], *shape, **terms)
  check_attention(inputs, mask, "cuda", forward_only=True)


@pytest.mark.parametrize("group", [2, 3, 4, 6, 10])
@pytest.mark.parametrize("sm_margin", [0, 130])
def test_long_tiles(group, sm_margin):
  """There is a tile without keys, and one of few rows, which packs heads: more than are left."""
  slices = [(0, 128, 0, 8001, -(2**30), 2**30), (288, 320, 100, 7900, -(2**30), 7500)]
  mask = AttentionMask(np.array(slices, np.int32), 320, 8001)
  shape = (mask.q_len, mask.k_len, group, 1, 128, 128)
  inputs = make_inputs(np.random.default_rng(group), DTYPES["bf16"], *shape, 0)
  check_attention(inputs, mask, "cuda", is_mask_known=True, sm_margin=sm_margin)


@pytest.mark.parametrize(
  "mask",
  [
    AttentionMask.sliding_window(4100, left=1023),
    AttentionMask.from_cu_seqlens(np.cumsum([0, 700, 129, 1, 1500, 127, 255, 64]), causal=True),
    AttentionMask.block_causal(192, 3000),
  ],
  ids=["window", "documents", "block_causal"],
)
@pytest.mark.parametrize("sm_margin", [0, 130])
def test_many_short_tiles(mask, sm_margin):
  shape = (mask.q_len, mask.k_len, 6, 1, 128, 128)
  inputs = make_inputs(np.random.default_rng(0), DTYPES["bf16"], *shape, 0)
  check_attention(inputs, mask, "cuda", is_mask_known=True, sm_margin=sm_margin)


@pytest.mark.parametrize(
  ("heads", "terms"),
  [
    ((2, 1), {"bias": "hqk"}),
    ((3, 1), {"bias": "hqk"}),  # Not in pairs.
    ((12, 6), {"bias": "hqk"}),
    ((2, 1), {"bias": "hqk", "has_alibi": True}),
    ((2, 1), {"bias": "h1k", "has_alibi": True}),
    ((2, 1), {"has_alibi": True}),
  ],
  ids=str,
)
def test_long_tiles_with_terms(heads, terms):
  length = 2688
  shape = (length, length, *heads, 128, 128)
  inputs = make_inputs(np.random.default_rng(0), DTYPES["bf16"], *shape, **terms)
  check_attention(inputs, AttentionMask.full(length), "cuda", is_mask_known=True)
