"""AttentionMask.from_dense: slices that make the same pairs visible as booleans."""

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from jax_magi import AttentionMask
from jax_magi._src.masks.cover import cover
from tests.cases import CASES


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
  shape=st.tuples(st.integers(0, 9), st.integers(0, 9)),
  seed=st.integers(0, 2**31),
  share=st.sampled_from([0.1, 0.5, 0.9]),
)
def test_dense_masks_without_any_order(shape, seed, share):
  dense = np.random.default_rng(seed).random(shape) < share
  mask = AttentionMask.from_dense(dense)
  checked = AttentionMask(mask.slices, *shape)  # Checks that no two slices share a pair.
  np.testing.assert_array_equal(checked.to_dense(), dense)
  assert checked.area() == dense.sum()


def test_stairs():
  """Rows that see a range of keys whose ends move by steps of any width."""
  rng = np.random.default_rng(0)
  for _ in range(300):
    q_len, k_len = rng.integers(1, 12, 2)
    ends = np.sort(rng.integers(0, k_len + 1, (2, q_len)), axis=1)
    begin, end = np.minimum(*ends), np.maximum(*ends)
    token = np.arange(k_len)
    dense = (begin[:, None] <= token) & (token < end[:, None])
    np.testing.assert_array_equal(AttentionMask.from_dense(dense).to_dense(), dense)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dense_masks_have_few_slices(case):
  dense = np.asarray(case.mask.to_dense())
  mask = AttentionMask.from_dense(dense)
  np.testing.assert_array_equal(mask.to_dense(), dense)
  assert len(mask.slices) <= len(case.mask.slices)


def test_large_dense_masks():
  """A cover that would need too many slices is abandoned early. This one would need millions."""
  assert len(AttentionMask.from_dense(np.tri(4096, dtype=bool)).slices) == 1
  scattered = np.random.default_rng(0).random((4096, 4096)) < 0.5
  assert cover(scattered, max_slices=512) is None


@pytest.mark.parametrize("dense", [np.ones((2, 3)), np.ones(3, bool), np.ones((1, 2, 3), bool)])
def test_dense_masks_that_are_none(dense):
  with pytest.raises(ValueError, match=r"dense must be boolean \[q_len, k_len\]"):
    AttentionMask.from_dense(dense)


def test_traced_dense_masks_are_refused():
  with pytest.raises(ValueError, match="dense must not be traced"):
    jax.jit(AttentionMask.from_dense)(np.ones((3, 4), bool))
