"""Random slice masks, compared with the float64 reference."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jax_magi import AttentionMask
from tests.accuracy import DTYPES, check_attention, make_inputs

# Few shapes, so that few programs are compiled; lengths on both sides of tile edges.
_LENGTHS = [(65, 130), (129, 129), (200, 96)]
_NUM_SLICES = 16


@st.composite
def masks(draw):
  """Disjoint slices: some cells of a grid of cuts, each with a random band."""
  q_len, k_len = draw(st.sampled_from(_LENGTHS))
  cuts = [
    sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=3))})
    for length in (q_len, k_len)
  ]
  slices = []
  for q_begin, q_end in zip(cuts[0], cuts[0][1:], strict=False):
    for k_begin, k_end in zip(cuts[1], cuts[1][1:], strict=False):
      kind = draw(st.sampled_from(["absent", "full", "causal", "inv_causal", "bi_causal", "band"]))
      if kind == "absent":
        continue
      lo, hi = -(2**30), 2**30
      if kind in ("causal", "bi_causal"):
        hi = k_end - q_end
      if kind in ("inv_causal", "bi_causal"):
        lo = k_begin - q_begin
      if kind == "band":
        lo = draw(st.integers(-q_len, k_len))
        hi = draw(st.integers(-q_len, k_len))
      slices.append((q_begin, q_end, k_begin, k_end, lo, hi))
  draw(st.randoms()).shuffle(slices)
  table = np.array(slices, np.int32).reshape(-1, 6)
  return AttentionMask(table, q_len, k_len).pad(_NUM_SLICES)


@pytest.mark.parametrize("dtype", DTYPES)
@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(mask=masks(), seed=st.integers(0, 2**31), sink=st.booleans())
def test_random_mask_on_cpu(dtype, mask, seed, sink):
  rng = np.random.default_rng(seed)
  num_sinks = 0 if sink else None
  inputs = make_inputs(rng, DTYPES[dtype], mask.q_len, mask.k_len, 4, 2, 32, 24, num_sinks)
  check_attention(inputs, mask, "cpu")


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(mask=masks(), seed=st.integers(0, 2**31))
def test_random_mask_blockwise(mask, seed):
  inputs = make_inputs(
    np.random.default_rng(seed), np.float32, mask.q_len, mask.k_len, 4, 2, 32, 24
  )
  check_attention(inputs, mask, "blockwise")
