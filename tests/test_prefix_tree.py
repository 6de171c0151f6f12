"""Sequences that share prefixes, as one mask."""

import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask

_TREES = {  # Parents and lengths.
  "question": ([-1, 0, 0, 0], [5, 3, 0, 4]),
  "levels": ([-1, 0, 1, 1, 0, 4, -1, 6], [3, 2, 4, 1, 2, 3, 2, 2]),
  "out_of_order": ([-1, 0, 0, 1, 2, 1], [4, 2, 3, 1, 2, 2]),
}


@pytest.mark.parametrize("tree", _TREES)
def test_prefix_tree_is_its_sequences(tree):
  """Attention over the tree equals that over each root-to-leaf sequence on its own."""
  parents, lengths = map(np.array, _TREES[tree])
  mask = AttentionMask.prefix_tree(parents, lengths)
  if tree != "out_of_order":
    assert len(mask.slices) == len(parents)
  ends = np.cumsum(lengths)
  rng = np.random.default_rng(0)
  q, k, v = rng.standard_normal((3, int(ends[-1]), 2, 8)).astype(np.float32)
  out, _ = jax_magi.attention(q, k, v, mask)
  for leaf in set(range(len(parents))) - set(parents.tolist()):
    path = [leaf]
    while parents[path[0]] >= 0:
      path.insert(0, int(parents[path[0]]))
    rows = np.concatenate([np.arange(ends[n] - lengths[n], ends[n]) for n in path])
    bias = np.where(np.tri(len(rows), dtype=bool), 0, -np.inf)[None]
    logits = np.einsum("qhd,khd->hqk", q[rows], k[rows]) / np.sqrt(8) + bias
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(out[rows], np.einsum("hqk,khd->qhd", weights, v[rows]), atol=1e-5)


@pytest.mark.parametrize(
  ("parents", "lengths", "match"),
  [
    ([-1, 1], [2, 2], r"parents\[1\] must be -1 or a node before it, got 1"),
    ([-2], [2], r"parents\[0\] must be -1"),
    ([-1], [-2], "lengths must not be negative, but one is -2"),
    ([-1, 0], [2], r"lengths must be \[2\]"),
  ],
)
def test_trees_that_are_none_are_named(parents, lengths, match):
  with pytest.raises(ValueError, match=match):
    AttentionMask.prefix_tree(parents, lengths)
