"""Arguments of `dot_product_attention` that determine the visible pairs, all at once."""

import functools
import itertools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jax_magi
from jax_magi import AttentionMask
from jax_magi._src.masks.slices import intersected
from tests import dense
from tests.arrays import assert_trees_close, normals
from tests.cp_runs import NATIVE
from tests.sizes import in_turns
from tests.test_random_masks import masks

BATCH, LENGTH = 3, 40
_I, _J = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]
_IDS = np.stack([np.repeat([1, 2, 0], c) for c in ([10, 20, 10], [40, 0, 0], [1, 39, 0])])
_ROWS = [
  AttentionMask.prefix_lm(9, LENGTH),
  AttentionMask.full(LENGTH),
  AttentionMask.from_cu_seqlens([0, 30, 40]),
]
_DENSE = np.random.default_rng(0).random((BATCH, 1, LENGTH, LENGTH)) < 0.7
_STAIRS = _J // 8 <= _I // 8
# By name: arguments, and the pairs of each batch row that they make visible.
ARGUMENTS = {
  "causal": ({"is_causal": True}, _J <= _I),
  "window": ({"local_window_size": (12, 5)}, (_I - 12 <= _J) & (_J <= _I + 5)),
  "left_window": ({"local_window_size": (12, None)}, _I - 12 <= _J),
  "right_window": ({"local_window_size": (None, 5)}, _J <= _I + 5),
  "query_lengths": (
    {"query_seq_lengths": np.array([40, 13, 0], np.int32)},
    _I[None] < np.array([40, 13, 0])[:, None, None],
  ),
  "key_lengths": (
    {"key_value_seq_lengths": np.array([33, 40, 12], np.int32)},
    _J[None] < np.array([33, 40, 12])[:, None, None],
  ),
  "documents": (
    {"segment_ids": _IDS, "max_segments": 3},
    (_IDS[:, :, None] == _IDS[:, None, :]) & (_IDS > 0)[:, :, None],
  ),
  "mask": ({"mask": _ROWS[0]}, np.asarray(_ROWS[0].to_dense())),
  "mask_of_each_row": ({"mask": _ROWS}, np.stack([m.to_dense() for m in _ROWS])),
  "boolean_mask": ({"mask": _DENSE}, _DENSE[:, 0]),
  "boolean_mask_of_few_slices": ({"mask": _STAIRS}, _STAIRS),
  "key_padding": ({"mask": _DENSE[:, :, :1]}, _DENSE[:, 0, :1]),
}


def _arrays():
  return normals((BATCH, LENGTH, 4, 16), *[(BATCH, LENGTH, 2, 16)] * 2)


def _expected(q, k, v, shown):
  """out, lse and max_logits, in float64."""
  rows = [dense.attention(*row, dtype=np.float64) for row in zip(q, k, v, shown, strict=True)]
  return tuple(np.stack([row[name] for row in rows]) for name in ("out", "lse", "max_logits"))


def _pairs():
  for a, b in itertools.combinations(ARGUMENTS, 2):
    if not ARGUMENTS[a][0].keys() & ARGUMENTS[b][0].keys():
      yield a, b


_TRIPLES = [
  ("causal", "documents", "mask_of_each_row"),
  ("left_window", "documents", "boolean_mask"),
  ("causal", "key_lengths", "query_lengths", "documents", "mask"),
  ("window", "query_lengths", "boolean_mask_of_few_slices"),
]


def _name(value):
  return "-".join(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
  ("names", "masks_are"), in_turns([*_pairs(), *_TRIPLES], ["known", "traced"]), ids=_name
)
def test_arguments_intersect(names, masks_are):
  """Every fully masked row is zero, and nothing is NaN."""
  q, k, v = _arrays()
  options = {key: x for name in names for key, x in ARGUMENTS[name][0].items()}
  arrays = {n: x for n, x in options.items() if isinstance(x, (np.ndarray, AttentionMask, list))}
  static = {n: x for n, x in options.items() if n not in arrays}
  shown = np.ones((BATCH, LENGTH, LENGTH), bool)
  for name in names:
    shown = shown & ARGUMENTS[name][1]

  def run(q, k, v, arrays):
    out, meta = jax_magi.dot_product_attention(
      *(q, k, v),
      **arrays,
      **static,
      return_meta=True,
      return_max_logits=True,
      implementation=NATIVE,
    )
    return out, meta.lse, meta.max_logits

  got = jax.jit(run)(q, k, v, arrays) if masks_are == "traced" else run(q, k, v, arrays)
  assert_trees_close(got, _expected(q, k, v, shown), rtol=1e-4, atol=1e-5)


def _bias_of_kernel(lengths, dtype, fun, *arguments):
  """The type of the bias that a call passes to its kernel, as in "f32[3,1,40,40]"; or None."""
  text = str(jax.make_jaxpr(fun)(*arguments))
  letters = {np.dtype(np.float32): "f32", np.dtype(jnp.bfloat16): "bf16"}[np.dtype(dtype)]
  q_len, k_len = lengths
  found = re.findall(rf"\b{letters}\[\d+,1,(?:1|{q_len}),{k_len}\]", text)
  return found[0] if found else None


def test_boolean_masks_become_slices_where_these_are_few():
  q, k, v = _arrays()

  def bias_of(mask, dtype=np.float32):
    def attend(mask):
      operands = (x.astype(dtype) for x in (q, k, v))
      return jax_magi.dot_product_attention(*operands, mask=mask, implementation="cpu")

    if dtype == np.float32:  # Known: a constant of the program.
      return _bias_of_kernel((LENGTH, LENGTH), dtype, lambda: attend(mask))
    return _bias_of_kernel((LENGTH, LENGTH), dtype, attend, mask)

  for mask in (_STAIRS, _DENSE[:, :, :1], np.stack([_STAIRS] * 4), np.ones((1, 1, 1, 1), bool)):
    assert bias_of(mask) is None
  assert bias_of(_DENSE) == f"f32[{BATCH},1,{LENGTH},{LENGTH}]"
  assert bias_of(_DENSE[:, :, :1], jnp.bfloat16) == f"bf16[{BATCH},1,1,{LENGTH}]"


def test_a_boolean_for_each_query_is_for_all_keys():
  q, k, v = normals((1, 6, 2, 8), *[(1, 20, 2, 8)] * 2)
  is_shown = np.array([True, True, False, True, False, True])[:, None]
  got = jax_magi.dot_product_attention(q, k, v, mask=is_shown)
  (expected,) = _expected(q, k, v, np.broadcast_to(is_shown, (1, 6, 20)))[:1]
  assert_trees_close(got, expected, rtol=1e-4, atol=1e-5)


def test_limit_of_slices():
  """A checkerboard of more and more blocks."""
  for blocks, is_few in ((8, True), (16, False)):
    block = np.kron(np.indices((blocks, blocks)).sum(axis=0) % 2, np.ones((8, 8))).astype(bool)
    length = 8 * blocks
    slices = AttentionMask.from_dense(block).slices
    assert (len(slices) <= max(64, length // 8)) == is_few
    (q,) = normals((1, length, 2, 8))
    attend = functools.partial(
      jax_magi.dot_product_attention, q, q, q, mask=block, implementation="cpu"
    )
    assert (_bias_of_kernel((length, length), np.float32, attend) is None) == is_few


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(a=masks(), data=st.data())
def test_intersection_of_slices(a, data):
  """Known slices without the empty ones, and traced ones."""
  b = data.draw(masks())
  q_len, k_len = min(a.q_len, b.q_len), min(a.k_len, b.k_len)
  a, b = (m.crop(0, q_len, 0, k_len) for m in (a, b))
  expected = np.asarray(a.to_dense()) & np.asarray(b.to_dense())
  known = intersected(np.asarray(a.slices)[None], np.asarray(b.slices)[None])
  traced = intersected(jnp.asarray(a.slices)[None], jnp.asarray(b.slices)[None])
  for slices in (known, traced):
    got = AttentionMask(np.asarray(slices)[0], q_len, k_len)
    np.testing.assert_array_equal(got.to_dense(), expected)


def test_xla_is_the_plain_path():
  q, k, v = _arrays()
  got = jax_magi.dot_product_attention(q, k, v, implementation="xla")
  expected = jax_magi.dot_product_attention(q, k, v, implementation="blockwise")
  np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shape", [(4,), (BATCH, 4)], ids=str)
def test_alibi_slopes(shape):
  q, k, v = _arrays()
  slopes = normals(shape)[0] / 4
  bias = np.broadcast_to(slopes, (BATCH, 4))[..., None, None] * (_J - _I).astype(np.float32)

  def loss(slopes, bias):
    out = jax_magi.dot_product_attention(q, k, v, bias, alibi_slopes=slopes, is_causal=True)
    return jnp.sum(jnp.sin(out)), out

  got, out = jax.jit(jax.grad(loss, has_aux=True))(slopes, None)
  dbias, expected = jax.jit(jax.grad(loss, 1, has_aux=True))(None, bias)
  assert_trees_close(out, expected, rtol=1e-4, atol=1e-5)
  expected = (np.asarray(dbias, np.float64) * (_J - _I)).sum(axis=(2, 3))
  expected = expected if len(shape) == 2 else expected.sum(axis=0)
  assert_trees_close(got, expected, rtol=1e-3, atol=1e-4)
