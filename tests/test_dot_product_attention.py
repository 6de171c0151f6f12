"""The drop-in for jax.nn.dot_product_attention, against the original."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi._src.attention import ops
from tests.arrays import normal


def _inputs(q_len=40, k_len=40, batch=3, num_q_heads=4, num_kv_heads=2):
  rng = np.random.default_rng(0)
  shapes = [(batch, q_len, num_q_heads, 16), *[(batch, k_len, num_kv_heads, 16)] * 2]
  return [rng.standard_normal(s).astype(np.float32) for s in shapes]


_LENGTHS = {
  "query_seq_lengths": np.array([40, 13, 7], np.int32),
  "key_value_seq_lengths": np.array([33, 40, 12], np.int32),
}


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"is_causal": True},
    {"scale": 0.3},
    {"local_window_size": (7, 3)},
    {"local_window_size": 5},
    {"is_causal": True, "local_window_size": (7, 3)},
    {"key_value_seq_lengths": _LENGTHS["key_value_seq_lengths"]},
    {"is_causal": True, **_LENGTHS},
  ],
  ids=str,
)
def test_same_result_and_gradient(options):
  q, k, v = _inputs()
  # Rows after the length and fully masked rows are zero in ours. In the original, fully masked rows
  # are undefined. Compare the rows that both define.
  valid = np.ones((3, 40), bool)
  if "query_seq_lengths" in options:
    valid = np.arange(40)[None] < options["query_seq_lengths"][:, None]
  weight = (valid[..., None, None] * np.cos(np.arange(16))).astype(np.float32)

  def loss(attention, residual):
    def fun(q, k, v):
      out, lse = attention(q, k, v, return_residual=True, **options)
      aux = jnp.where(valid[..., None], lse, 0) if residual else 0.0
      return jnp.sum(weight * out), (jnp.where(valid[..., None, None], out, 0), aux)

    return jax.value_and_grad(fun, (0, 1, 2), has_aux=True)

  got = jax.jit(loss(jax_magi.dot_product_attention, True))(q, k, v)
  expected = jax.jit(loss(jax.nn.dot_product_attention, True))(q, k, v)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


@pytest.mark.parametrize(("q_len", "k_len"), [(20, 50), (50, 20)])
def test_causal_is_aligned_to_the_top_left(q_len, k_len):
  q, k, v = _inputs(q_len, k_len)
  got = jax_magi.dot_product_attention(q, k, v, is_causal=True)
  expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
  np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_without_batch():
  q, k, v = (x[0] for x in _inputs())
  got, lse = jax_magi.dot_product_attention(q, k, v, return_residual=True)
  np.testing.assert_allclose(got, jax.nn.dot_product_attention(q, k, v), rtol=1e-4, atol=1e-5)
  assert lse.shape == (40, 4) and lse.dtype == np.float32


@pytest.mark.parametrize("causal", [False, True])
def test_segment_ids(causal):
  q, k, v = _inputs()
  ids = np.stack([np.repeat([1, 2, 0], c) for c in ([10, 20, 10], [40, 0, 0], [1, 39, 0])])

  def ours(q, k, v, ids):
    return jax_magi.dot_product_attention(
      q, k, v, is_causal=causal, segment_ids=ids, max_segments=3
    )

  mask = (ids[:, :, None] == ids[:, None, :]) & (ids > 0)[:, :, None]
  expected = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], is_causal=causal)
  expected = np.where((ids > 0)[..., None, None], expected, 0)
  np.testing.assert_allclose(jax.jit(ours)(q, k, v, ids), expected, rtol=1e-4, atol=1e-5)


def test_segment_ids_of_an_empty_batch():
  q, k = jnp.zeros((0, 5, 4, 8)), jnp.zeros((0, 5, 2, 8))
  ids = np.zeros((0, 5), np.int32)
  out = jax_magi.dot_product_attention(q, k, k, segment_ids=ids, max_segments=3)
  assert out.shape == q.shape


def test_attention_mask_and_meta():
  q, k, v = _inputs()
  mask = jax_magi.AttentionMask.prefix_lm(9, 40)
  out, meta = jax_magi.dot_product_attention(
    q, k, v, mask=mask, softcap=5.0, sink=np.ones(4, np.float32), return_meta=True,
    return_max_logits=True,
  )  # fmt: skip
  for i in range(3):
    expected, expected_meta = jax_magi.attention(
      q[i], k[i], v[i], mask, softcap=5.0, sink=np.ones(4, np.float32), return_max_logits=True
    )
    np.testing.assert_array_equal(out[i], expected)
    np.testing.assert_array_equal(meta.lse[i], expected_meta.lse)
    np.testing.assert_array_equal(meta.max_logits[i], expected_meta.max_logits)


_MASKS = [
  jax_magi.AttentionMask.prefix_lm(9, 40),
  jax_magi.AttentionMask.causal(40).pad(2),
  jax_magi.AttentionMask.from_cu_seqlens([0, 30, 40]),
]


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "jit"])
def test_one_mask_for_each_row_of_the_batch(xp, is_traced):
  q, k, v = _inputs()
  masks = jax.tree.map(lambda *slices: xp.stack(slices), *_MASKS)

  def loss(q, k, v, mask):
    out = jax_magi.dot_product_attention(q, k, v, mask=mask)
    return jnp.sum(out * np.cos(np.arange(16, dtype=np.float32))[None, None, None]), out

  run = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
  step = jax.jit(run)
  (_, out), grads = (step if is_traced else run)(q, k, v, masks)
  for i, mask in enumerate(_MASKS):
    (_, expected), expected_grads = step(*(x[i : i + 1] for x in (q, k, v)), mask)
    np.testing.assert_allclose(out[i], expected[0], rtol=1e-5, atol=1e-6)
    for a, b in zip(grads, expected_grads, strict=True):
      np.testing.assert_allclose(a[i], b[0], rtol=1e-4, atol=1e-5)


def test_masks_from_vmap_are_those_of_segment_ids():
  q, k, v = _inputs()
  ids = np.stack([np.repeat([1, 2, 0], c) for c in ([10, 20, 10], [40, 0, 0], [1, 39, 0])])
  masks = jax.vmap(lambda i: jax_magi.AttentionMask.from_segment_ids(i, 3))(ids)
  got = jax_magi.dot_product_attention(q, k, v, mask=masks)
  expected = jax_magi.dot_product_attention(q, k, v, segment_ids=ids, max_segments=3)
  np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
  ("change", "match"),
  [
    (lambda s: np.stack([s] * 2), r"or \[3, num_slices, 6\] .* got \[2, 2, 6\]"),
    (lambda s: np.stack([s] * 3)[None], r"got \[1, 3, 2, 6\]"),
    (lambda s: np.stack([s] * 3)[..., :5], r"got \[3, 2, 5\]"),
    (lambda s: np.stack([s] * 3) + np.eye(6, dtype=int)[1], "is not inside"),
    (lambda s: np.stack([s, s, s[::-1] * 0 + s[0]]), "slices 0 and 1 overlap"),
  ],
)
def test_bad_batch_of_masks_is_named(change, match):
  with pytest.raises(ValueError, match=match):
    jax_magi.dot_product_attention(*_inputs(), mask=jax.tree.map(change, _MASKS[0]))


@pytest.mark.parametrize(
  ("options", "error", "match"),
  [
    (
      {"bias": np.zeros((1, 1, 40, 41), np.float32)},
      ValueError,
      r"bias must be .*\[3, 4, 40, 40\]",
    ),
    ({"bias": np.zeros((2, 1, 40, 40), np.float32)}, ValueError, "bias must be broadcastable"),
    ({"bias": np.zeros((1, 1, 40, 40), np.int32)}, ValueError, "bias must be float32"),
    ({"mask": np.ones((1, 2, 40, 40), bool)}, ValueError, "mask must be broadcastable"),
    ({"mask": np.ones((1, 1, 1, 40, 40), bool)}, ValueError, "mask must be broadcastable"),
    ({"mask": np.ones((1, 1, 40, 40), np.float32)}, ValueError, "mask must be boolean"),
    ({"mask": "causal"}, ValueError, "mask must be a boolean array or an AttentionMask"),
    ({"mask": [jax_magi.AttentionMask.causal(40)] * 2}, ValueError, "or 3 of them, got 2"),
    ({"mask": [jax_magi.AttentionMask.causal(41)] * 3}, ValueError, "mask is for 41 queries"),
    ({"alibi_slopes": np.ones((2, 4), np.float32)}, ValueError, r"alibi_slopes must be \[4\] or"),
    ({"dropout_rate": 0.1}, NotImplementedError, "dropout_rate must be 0, .* random bits"),
    ({"implementation": "cudnn"}, ValueError, "implementation must be one of"),
    ({"return_meta": True, "return_residual": True}, ValueError, "cannot be combined"),
    ({"return_max_logits": True}, ValueError, "needs return_meta"),
    ({"segment_ids": np.ones((3, 40), np.int32)}, ValueError, "needs max_segments"),
    ({"segment_ids": np.ones((2, 40), np.int32)}, ValueError, "segment_ids must be"),
    ({"kv_segment_ids": np.ones((3, 40), np.int32)}, ValueError, "needs segment_ids"),
    ({"query_seq_lengths": np.ones(3)}, ValueError, "query_seq_lengths must hold integers"),
    ({"query_seq_lengths": np.ones(2, np.int32)}, ValueError, "query_seq_lengths must be"),
    ({"local_window_size": (-1, 2)}, ValueError, "local_window_size"),
    ({"local_window_size": 2.0}, ValueError, "local_window_size"),
    (
      {"segment_ids": np.repeat([[4, 5, 9]] * 3, [20, 10, 10], axis=1), "max_segments": 2},
      ValueError,
      "segment_ids must have at most max_segments = 2, got 3",
    ),
    (
      {"segment_ids": np.tile([1, 2], (3, 20)).astype(np.int32), "max_segments": 2},
      ValueError,
      "contiguous",
    ),
    (
      {"segment_ids": np.ones((3, 40), np.int32), "max_segments": 2, "padding_id": 0.5},
      ValueError,
      "padding_id must be a static integer or None, got 0.5",
    ),
    ({"scale": np.inf}, ValueError, "^scale must be finite"),
  ],
)
def test_bad_argument_is_named(options, error, match):
  with pytest.raises(error, match=match):
    jax_magi.dot_product_attention(*_inputs(), **options)


def test_bad_shapes_are_named():
  q, k, v = _inputs()
  with pytest.raises(ValueError, match="key must be"):
    jax_magi.dot_product_attention(q, k[0], v)
  with pytest.raises(ValueError, match="value must have query's batch of 3, got 2"):
    jax_magi.dot_product_attention(q, k, v[:2])


@pytest.mark.parametrize("kind", ["ids", "ids_without_batch", "lengths"])
def test_known_documents_and_lengths_stay_known_under_jit(kind):
  q = normal(1, 16, 2, 8)
  split = np.array([1, 2, 1, 2] * 4, np.int32)
  options = {
    "ids": {"segment_ids": split[None], "max_segments": 2},
    "ids_without_batch": {"segment_ids": split, "max_segments": 2},
    "lengths": {"key_value_seq_lengths": np.array([5], np.int32)},
  }[kind]
  if kind == "ids_without_batch":
    q = q[0]
  fun = jax.jit(lambda q: jax_magi.dot_product_attention(q, q, q, **options))
  if kind != "lengths":
    with pytest.raises(ValueError, match="ids must keep each segment contiguous; 1 is not"):
      fun(q)
    options["segment_ids"] = np.sort(split, axis=-1).reshape(options["segment_ids"].shape)
  seen = []
  attend = ops._attention
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(ops, "_attention", lambda config, *x: seen.append(x[3]) or attend(config, *x))
    fun(q)
  assert seen[0].known is not None


_ROW = np.repeat([1, 2], 8).astype(np.int32)
_BROKEN_ROWS = {
  "too_many": np.append(_ROW[:-1], 3),
  "negative": np.append(_ROW[:-1], -1),
  "all_negative": np.full(16, -1, np.int32),
  "split": np.concatenate([_ROW[:-1], [1]]),
  "split_by_padding": np.where(np.arange(16) == 3, 0, _ROW),
}


@pytest.mark.parametrize("implementation", ["cpu", "blockwise"])
def test_traced_documents_that_are_broken_are_nan(implementation):
  q = normal(3, 16, 2, 8)

  @jax.jit
  def fun(q, ids):
    return jax_magi.dot_product_attention(
      q, q, q, segment_ids=ids, max_segments=2, return_residual=True, implementation=implementation
    )

  expected, _ = fun(q, np.tile(_ROW, (3, 1)))
  assert np.isfinite(expected).all()
  for row in _BROKEN_ROWS.values():
    out, lse = fun(q, np.stack([row, _ROW, row]).astype(np.int32))
    assert np.isnan(out[::2]).all() and np.isnan(lse[::2]).all()
    np.testing.assert_allclose(out[1], expected[1], rtol=1e-5, atol=1e-6)


_DOCUMENTS = np.repeat([[7, 3, 0], [0, 2**31 - 1, 9]], [6, 5, 5], axis=1)


@pytest.mark.parametrize("padding_id", [-1, 0, None])
@pytest.mark.parametrize("is_traced", [False, True])
def test_numbers_of_documents_as_pipelines_have_them(padding_id, is_traced):
  """From 0, or numbers of a corpus in any order; padding is -1, 0 or absent."""
  q = normal(2, 16, 2, 8)
  ids = _DOCUMENTS.copy()
  if padding_id == -1:
    ids[0, -5:] = -1

  def fun(q, ids):
    return jax_magi.dot_product_attention(
      q, q, q, segment_ids=ids, max_segments=3, padding_id=padding_id, is_causal=True
    )

  ours = jax.jit(fun)(q, ids.astype(np.int32)) if is_traced else fun(q, ids)
  same = (ids[:, None, :, None] == ids[:, None, None, :]) & np.tri(16, dtype=bool)
  if padding_id is not None:
    same &= (ids != padding_id)[:, None, None]
  expected = jax.nn.dot_product_attention(q, q, q, mask=jnp.asarray(same))
  is_seen = same.any(-1)[:, 0, :, None, None]
  np.testing.assert_allclose(ours, np.where(is_seen, expected, 0), rtol=1e-5, atol=1e-6)


def test_new_numbers_compile_nothing():
  q = normal(1, 16, 2, 8)
  fun = jax.jit(
    lambda ids: jax_magi.dot_product_attention(q, q, q, segment_ids=ids, max_segments=3)
  )
  for ids in (_DOCUMENTS[:1], _DOCUMENTS[1:], np.ones((1, 16))):
    fun(ids.astype(np.int32))
  assert fun._cache_size() == 1


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_numbers_that_32_bits_cannot_hold(dtype):
  """Different numbers must not become equal."""
  ids = np.repeat(np.array([2**31 + 1, 2**31 + 2], dtype), 8)[None]
  q = normal(1, 16, 2, 8)

  def fun(ids):
    return jax_magi.dot_product_attention(q, q, q, segment_ids=ids, max_segments=2)

  with pytest.raises(ValueError, match="segment_ids must fit in 32 bits"):
    fun(ids)
  if dtype == np.uint32:
    assert np.isnan(jax.jit(fun)(ids)).all()
