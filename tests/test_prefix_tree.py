"""Sequences that share prefixes, as one mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask

_TREES = {  # Parents and lengths.
  "question": ([-1, 0, 0, 0], [5, 3, 0, 4]),
  "levels": ([-1, 0, 1, 1, 0, 4, -1, 6], [3, 2, 4, 1, 2, 3, 2, 2]),
  "out_of_order": ([-1, 0, 0, 1, 2, 1], [4, 2, 3, 1, 2, 2]),
}


def _paths(parents, lengths):
  """The rows of each sequence from a root to a leaf."""
  ends = np.cumsum(lengths)
  for leaf in set(range(len(parents))) - set(parents.tolist()):
    path = [leaf]
    while parents[path[0]] >= 0:
      path.insert(0, int(parents[path[0]]))
    yield np.concatenate([np.arange(ends[n] - lengths[n], ends[n]) for n in path])


@pytest.mark.parametrize("tree", _TREES)
def test_prefix_tree_is_its_sequences(tree):
  """Results and gradients over the tree are those of each root-to-leaf sequence on its own."""
  parents, lengths = map(np.array, _TREES[tree])
  mask = AttentionMask.prefix_tree(parents, lengths)
  if tree != "out_of_order":
    assert len(mask.slices) == len(parents)
  paths = list(_paths(parents, lengths))
  rng = np.random.default_rng(0)
  q, k, v, dout = rng.standard_normal((4, mask.q_len, 2, 8)).astype(np.float32)
  # A prefix that several sequences share counts once.
  share = (1 / np.bincount(np.concatenate(paths))).astype(np.float32)

  def of_tree(q, k, v):
    out, _ = jax_magi.attention(q, k, v, mask)
    return (out * dout).sum(), [out[rows] for rows in paths]

  def of_sequences(q, k, v):
    outs = []
    for rows in paths:
      is_seen = np.tri(len(rows), dtype=bool)
      logits = jnp.einsum("qhd,khd->hqk", q[rows], k[rows]) * np.float32(8**-0.5)
      weights = jax.nn.softmax(jnp.where(is_seen, logits, -jnp.inf))
      outs.append(jnp.einsum("hqk,khd->qhd", weights, v[rows]))
    pairs = zip(outs, paths, strict=True)
    return sum((out * dout[r] * share[r, None, None]).sum() for out, r in pairs), outs

  found, expected = (
    jax.jit(jax.value_and_grad(fun, (0, 1, 2), has_aux=True))(q, k, v)
    for fun in (of_tree, of_sequences)
  )
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


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
