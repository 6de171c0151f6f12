"""AttentionMask: constructors, crops, areas, and the overlap check."""

import hypothesis
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from hypothesis import strategies as st

import jax_magi
from jax_magi import AttentionMask, MaskType
from jax_magi._src.masks.slices import grouped_by_keys
from tests.test_random_masks import masks


def _grid(q_len, k_len):
  return np.arange(q_len)[:, None], np.arange(k_len)[None, :]


def test_classic_types_follow_their_local_rules():
  for sq, sk in ((5, 3), (4, 4), (3, 6)):
    i, j = _grid(sq, sk)
    rules = {
      MaskType.FULL: np.ones((sq, sk), bool),
      MaskType.CAUSAL: j <= i + (sk - sq),
      MaskType.INV_CAUSAL: j >= i,
      MaskType.BI_CAUSAL: (j <= i + (sk - sq)) & (j >= i),
    }
    for mask_type, expected in rules.items():
      mask = AttentionMask.from_ranges([[2, 2 + sq]], [[3, 3 + sk]], [mask_type])
      np.testing.assert_array_equal(mask.to_dense()[2:, 3:], expected, err_msg=mask_type.name)
      assert mask.to_dense()[:2].sum() == mask.to_dense()[:, :3].sum() == 0


def test_full_causal_and_window():
  i, j = _grid(6, 9)
  np.testing.assert_array_equal(AttentionMask.full(6, 9).to_dense(), True)
  np.testing.assert_array_equal(AttentionMask.causal(6, 9).to_dense(), j <= i + 3)
  window = AttentionMask.sliding_window(6, 9, left=2, right=1)
  np.testing.assert_array_equal(window.to_dense(), (j >= i + 3 - 2) & (j <= i + 3 + 1))
  assert window.slices.shape == (1, 6)
  right_only = AttentionMask.sliding_window(6, left=None, right=2)
  i, j = _grid(6, 6)
  np.testing.assert_array_equal(right_only.to_dense(), j <= i + 2)


def test_prefix_lm():
  i, j = _grid(9, 9)
  np.testing.assert_array_equal(AttentionMask.prefix_lm(4, 9).to_dense(), (j <= i) | (j < 4))
  for prefix_len in (0, 9):
    assert AttentionMask.prefix_lm(prefix_len, 9).area() == (45, 81)[prefix_len > 0]


def test_block_causal():
  i, j = _grid(10, 10)
  np.testing.assert_array_equal(AttentionMask.block_causal(4, 10).to_dense(), j // 4 <= i // 4)


@pytest.mark.parametrize("is_traced", [False, True])
def test_documents_whose_queries_and_keys_are_not_as_many(is_traced):
  """Causal, aligned to the first tokens of each document, or to the last."""
  cu_q, cu_k = np.array([0, 3, 9, 9, 14]), np.array([0, 6, 8, 11, 16])
  ids, kv_ids = (np.repeat(np.arange(1, 5), np.diff(cu)) for cu in (cu_q, cu_k))
  i, j = np.arange(14)[:, None], np.arange(16)[None, :]
  is_same = ids[:, None] == kv_ids[None, :]
  own = i - cu_q[ids - 1][:, None] + cu_k[ids - 1][:, None]
  shown = {
    "top_left": j <= own,
    "bottom_right": j <= own + (np.diff(cu_k) - np.diff(cu_q))[ids - 1][:, None],
  }

  def make(align, cu_q, cu_k, ids, kv_ids):
    by_sums = AttentionMask.from_cu_seqlens(
      cu_q, cu_k, causal=True, align=align, q_len=14, k_len=16
    )
    by_ids = AttentionMask.from_segment_ids(ids, 4, kv_ids=kv_ids, causal=True, align=align)
    return by_sums, by_ids

  make = jax.jit(make, static_argnums=0) if is_traced else make
  for align, expected in shown.items():
    for mask in make(align, cu_q, cu_k, ids, kv_ids):
      np.testing.assert_array_equal(mask.to_dense(), is_same & expected)


def test_alignment():
  i, j = np.arange(5)[:, None], np.arange(8)[None, :]
  np.testing.assert_array_equal(AttentionMask.causal(5, 8, align="top_left").to_dense(), j <= i)
  window = AttentionMask.sliding_window(5, 8, left=1, right=2, align="top_left")
  np.testing.assert_array_equal(window.to_dense(), (i - 1 <= j) & (j <= i + 2))
  with pytest.raises(ValueError, match="align must be one of"):
    AttentionMask.causal(5, 8, align="left")


@hypothesis.given(mask=masks())
def test_grouped_by_keys_is_the_same_mask(mask):
  grouped = AttentionMask(grouped_by_keys(np.asarray(mask.slices)), mask.q_len, mask.k_len)
  assert len(grouped.slices) <= len(mask.slices)
  np.testing.assert_array_equal(grouped.to_dense(), mask.to_dense())


def test_grouped_by_keys_block_causal():
  mask = AttentionMask.block_causal(4, 10)
  grouped = grouped_by_keys(np.asarray(mask.slices))
  np.testing.assert_array_equal(grouped[:, :4], [[0, 10, 0, 4], [4, 10, 4, 8], [8, 10, 8, 10]])
  documents = np.asarray(AttentionMask.from_cu_seqlens([0, 3, 7]).slices)
  assert grouped_by_keys(documents) is documents


def test_grouped_by_keys_joins_neighbours_and_never_makes_more_slices():
  ranges = [[0, 4], [4, 8], [4, 8]], [[0, 8], [0, 4], [4, 8]]
  square = AttentionMask.from_ranges(*ranges)
  np.testing.assert_array_equal(grouped_by_keys(np.asarray(square.slices))[:, :4], [[0, 8, 0, 8]])
  stairs = np.asarray(AttentionMask.from_ranges([[0, 4], [4, 8]], [[0, 4], [2, 6]]).slices)
  assert grouped_by_keys(stairs) is stairs  # Three key ranges would need a slice each.


@pytest.mark.parametrize(
  "question,answers",
  [(3, [2, 4]), (3, [2, 0, 4, 1]), (5, [0, 3]), (0, [2, 2]), (4, [3]), (4, []), (0, [])],
)
def test_shared_question(question, answers):
  lengths = [question, *answers]
  owner = np.repeat(np.arange(len(lengths)), lengths)
  i, j = _grid(len(owner), len(owner))
  sees = (j <= i) & ((owner[None, :] == 0) | (owner[None, :] == owner[:, None]))
  mask = AttentionMask.shared_question(question, answers)
  np.testing.assert_array_equal(mask.to_dense(), sees)
  assert mask.area() == sees.sum()  # No pair is in two slices.
  assert len(mask.slices) == len(answers) + 1


def _segment_mask(ids, kv_ids, causal):
  same = (ids[:, None] == kv_ids[None, :]) & (ids[:, None] > 0)
  if causal:
    # The distance to the end of the token's document.
    def to_end(x):
      return np.array([len(x) - 1 - i - np.argmax(x[::-1] == v) for i, v in enumerate(x)])

    same &= to_end(kv_ids)[None, :] >= to_end(ids)[:, None]
  return same


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("is_traced", [False, True])
def test_segment_ids(causal, is_traced):
  ids = np.array([1, 1, 2, 2, 2, 4, 0, 0], np.int32)
  kv_ids = np.array([1, 1, 1, 2, 4, 4], np.int32)

  def dense(ids, kv_ids):
    return AttentionMask.from_segment_ids(ids, 5, kv_ids=kv_ids, causal=causal).to_dense()

  dense = jax.jit(dense) if is_traced else dense
  np.testing.assert_array_equal(dense(ids, ids), _segment_mask(ids, ids, causal))
  np.testing.assert_array_equal(dense(ids, kv_ids), _segment_mask(ids, kv_ids, causal))


def test_segment_ids_with_window():
  ids = np.repeat([1, 2], [5, 6])
  i, j = _grid(11, 11)
  expected = (ids[:, None] == ids[None, :]) & (j >= i - 2) & (j <= i + 1)
  mask = AttentionMask.from_segment_ids(ids, 2, window=(2, 1))
  np.testing.assert_array_equal(mask.to_dense(), expected)
  causal = AttentionMask.from_segment_ids(ids, 2, window=(2, 1), causal=True)
  np.testing.assert_array_equal(causal.to_dense(), expected & (j <= i))


def test_traced_documents_after_the_last_that_fits_see_nothing():
  ids = jnp.array([1, 1, 7, 7])
  dense = jax.jit(lambda ids: AttentionMask.from_segment_ids(ids, 1).to_dense())(ids)
  np.testing.assert_array_equal(
    dense, _segment_mask(np.array([1, 1, 0, 0]), np.array([1, 1, 9, 9]), False)
  )


def test_cu_seqlens():
  ids = np.repeat([1, 2, 3], [2, 0, 4])
  mask = AttentionMask.from_cu_seqlens([0, 2, 2, 6], causal=True)
  np.testing.assert_array_equal(mask.to_dense(), _segment_mask(ids, ids, causal=True))
  padded = AttentionMask.from_cu_seqlens([0, 2, 2, 6], q_len=8)
  assert padded.q_len == padded.k_len == 8 and padded.area() == 4 + 16


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(mask=masks(), data=st.data())
def test_crop_and_area_agree_with_the_dense_mask(mask, data):
  dense = mask.to_dense()
  assert mask.area() == dense.sum()
  window = [
    data.draw(st.integers(-5, n + 5)) for n in (mask.q_len, mask.q_len, mask.k_len, mask.k_len)
  ]
  (q_begin, q_end), (k_begin, k_end) = sorted(window[:2]), sorted(window[2:])
  margin = 300
  padded = np.pad(dense, margin)
  expected = padded[q_begin + margin : q_end + margin, k_begin + margin : k_end + margin]
  np.testing.assert_array_equal(mask.crop(q_begin, q_end, k_begin, k_end).to_dense(), expected)


def test_crop_at_traced_bounds():
  mask = AttentionMask.from_segment_ids(np.repeat([1, 2, 0], [9, 7, 2]), 3, window=(4, 1))
  crop = jax.jit(lambda window: mask.crop(*window, q_len=6, k_len=10).to_dense())
  padded = np.pad(mask.to_dense(), 30)
  rng = np.random.default_rng(0)
  for _ in range(30):
    q_begin, k_begin = rng.integers(-8, 20, 2)
    q_end, k_end = q_begin + rng.integers(0, 9), k_begin + rng.integers(0, 13)
    expected = padded[30 + q_begin :, 30 + k_begin :][:6, :10].copy()
    expected[max(q_end - q_begin, 0) :] = expected[:, max(k_end - k_begin, 0) :] = False
    window = tuple(int(x) for x in (q_begin, q_end, k_begin, k_end))
    np.testing.assert_array_equal(crop(window), expected)
    np.testing.assert_array_equal(mask.crop(*window, q_len=6, k_len=10).to_dense(), expected)
  assert crop._cache_size() == 1


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
  slices=st.lists(
    st.tuples(*[st.integers(0, 12)] * 4, st.integers(-12, 12), st.integers(-12, 12)),
    min_size=2,
    max_size=4,
  )
)
# Two bands that share a diagonal, and two rectangles that share a pair: rare among random slices.
@hypothesis.example([(0, 8, 0, 8, -8, -1), (0, 8, 0, 8, -1, 8)])
@hypothesis.example([(0, 5, 0, 5, -12, 12), (4, 9, 4, 9, -12, 12)])
def test_overlap_check_agrees_with_counting(slices):
  table = np.array(slices, np.int32)
  table[:, :4] = np.sort(table[:, :4].reshape(-1, 2, 2), axis=2).reshape(-1, 4)
  covered = sum(
    AttentionMask(table[i : i + 1], 12, 12).to_dense().astype(int) for i in range(len(table))
  )
  if covered.max() > 1:
    with pytest.raises(ValueError, match="overlap"):
      AttentionMask(table, 12, 12)
  else:
    assert AttentionMask(table, 12, 12).area() == covered.sum()


def test_bands_that_meet_share_a_diagonal_or_none():
  lower, upper = [0, 8, 0, 8, -8, -1], [0, 8, 0, 8, -1, 8]
  with pytest.raises(ValueError, match="slices 0 and 1 overlap"):
    AttentionMask(np.array([lower, upper], np.int32), 8, 8)
  upper[4] = 0
  assert AttentionMask(np.array([lower, upper], np.int32), 8, 8).area() == 64


def test_overlap_error_names_the_two_slices():
  ranges = [[0, 4], [4, 8], [8, 12], [6, 9]]
  with pytest.raises(ValueError, match="slices 1 and 3 overlap"):
    AttentionMask.from_ranges(ranges, [[0, 4]] * 4)


def test_overlap_check_is_quick_for_many_slices():
  cu_seqlens = np.arange(0, 50_001, dtype=np.int32)
  assert AttentionMask.from_cu_seqlens(cu_seqlens).area() == 50_000


def test_union():
  left = AttentionMask.from_ranges([[0, 4]], [[0, 4]], q_len=8, k_len=8)
  right = AttentionMask.from_ranges([[4, 8]], [[2, 8]], [1], q_len=8, k_len=8)
  np.testing.assert_array_equal((left + right).to_dense(), left.to_dense() | right.to_dense())
  with pytest.raises(ValueError, match="overlap"):
    left + AttentionMask.causal(8)
  with pytest.raises(ValueError, match="same lengths"):
    left + AttentionMask.causal(9)
  with pytest.raises(TypeError):
    left + 1


def test_mask_is_a_pytree_of_its_slices():
  mask = AttentionMask.causal(8)
  (leaf,) = jax.tree.leaves(mask)
  assert leaf is mask.slices
  doubled = jax.tree.map(lambda s: s, mask)
  assert (doubled.q_len, doubled.k_len) == (8, 8)
  assert "slices" in str(jax.tree_util.tree_flatten_with_path(mask)[0][0][0][0])


def test_huge_masks_cost_nothing_to_describe():
  length = 2**29
  mask = AttentionMask.causal(length)
  assert mask.area() == length * (length + 1) // 2
  assert "1 slice" in repr(mask)


@pytest.mark.parametrize(
  "mask",
  [
    AttentionMask.shared_question(20, [10, 30]),
    AttentionMask.from_ranges([[0, 0], [3, 5]], [[0, 0], [2, 2]], q_len=10, k_len=10),
    AttentionMask(np.zeros((0, 6), np.int32), 0, 0),
    AttentionMask.causal(1_000_000),
  ],
)
def test_plot(mask, tmp_path):
  matplotlib.use("Agg")
  ax = mask.plot(title="a mask")
  ax.figure.savefig(tmp_path / "mask.png")
  assert ax.get_xlabel() == "key" and ax.get_ylabel() == "query"


def test_plot_needs_known_slices():
  with pytest.raises(ValueError, match="known"):
    jax.jit(lambda mask: mask.plot())(AttentionMask.causal(4))


def test_merge_of_two_halves_is_the_whole():
  rng = np.random.default_rng(0)
  q, k, v = (rng.standard_normal((40, 2, 16)).astype(np.float32) for _ in range(3))
  whole = AttentionMask.causal(40)

  def halves(q, k, v):
    parts = [
      jax_magi.attention(q, k[b:e], v[b:e], whole.crop(0, 40, b, e)) for b, e in ((0, 25), (25, 40))
    ]
    out, lse = jax_magi.merge_attention([o for o, _ in parts], [m.lse for _, m in parts])
    return out, lse

  def direct(q, k, v):
    out, meta = jax_magi.attention(q, k, v, whole)
    return out, meta.lse

  def results_and_gradients(fun):
    def loss(*x):
      results = fun(*x)
      return sum(jnp.sum(jnp.sin(y)) for y in results), results

    grads, results = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return results, grads

  (results, grads), (wanted, wanted_grads) = map(results_and_gradients, (halves, direct))
  for a, b in zip(results, wanted, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  for a, b in zip(grads, wanted_grads, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_repr_of_any_leaf():
  mask = AttentionMask.causal(8)
  assert "36 visible pairs" in repr(mask)
  for leaf in (None, np.zeros(3, bool), np.zeros((2, 1, 6), np.int32)):
    assert "8 x 8" in repr(jax.tree.map(lambda _, leaf=leaf: leaf, mask))


@pytest.mark.parametrize(
  ("mask", "text"),
  [
    (
      AttentionMask.from_ranges(
        [[0, 4], [4, 8]], [[0, 4], [0, 8]], [MaskType.FULL, MaskType.CAUSAL]
      ),
      "8 x 8, 42 visible pairs in 2 slices: [0, 4) x [0, 4) full, [4, 8) x [0, 8) causal",
    ),
    (
      AttentionMask.from_ranges([[0, 3]] * 2, [[0, 4], [4, 8]], [2, 3]),
      "3 x 8, 15 visible pairs in 2 slices: [0, 3) x [0, 4) inv_causal, [0, 3) x [4, 8) bi_causal",
    ),
    (
      AttentionMask.sliding_window(8, left=2),
      "8 x 8, 21 visible pairs in 1 slice: [0, 8) x [0, 8) -2 <= k - q <= 0",
    ),
    (
      AttentionMask.sliding_window(8, left=None, right=3),
      "8 x 8, 54 visible pairs in 1 slice: [0, 8) x [0, 8) k - q <= 3",
    ),
    (
      AttentionMask.sliding_window(8, left=1, right=None),
      "8 x 8, 43 visible pairs in 1 slice: [0, 8) x [0, 8) -1 <= k - q",
    ),
    (
      AttentionMask.causal(1).pad(3),
      "1 x 1, 1 visible pairs in 3 slices (2 empty): [0, 1) x [0, 1) full",
    ),
    (AttentionMask.full(0), "0 x 0, 0 visible pairs in 1 slice (1 empty)"),
  ],
  ids=lambda x: x[:20] if isinstance(x, str) else "",
)
def test_repr_is_in_words(mask, text):
  assert repr(mask) == f"AttentionMask({text})"


def test_repr_is_short():
  text = repr(AttentionMask.block_causal(1, 1000))
  assert "1000 slices" in text and text.endswith(", ...)") and len(text) < 250


def test_masks_are_equal_by_value():
  mask = AttentionMask.causal(8)
  assert mask == AttentionMask.sliding_window(8, left=None)
  assert hash(mask) == hash(AttentionMask.sliding_window(8, left=None))
  on_device = jax.tree.map(jnp.asarray, mask)
  assert mask == on_device and hash(mask) == hash(on_device)
  different = [
    AttentionMask.full(8),
    AttentionMask.causal(8, 9),
    mask.pad(2),
    AttentionMask(mask.slices, 9, 8),
    jax.tree.map(lambda s: s[None], mask),
    jax.tree.map(lambda _: None, mask),
    "causal",
  ]
  assert all(mask != other for other in different)
  assert len({mask, AttentionMask.causal(8), *different}) == len(different) + 1


def test_traced_masks_are_equal_by_identity():
  @jax.jit
  def check(slices, other):
    mask = AttentionMask(slices, 8, 8)
    assert mask == jax.tree.map(lambda x: x, mask) and hash(mask) == hash(mask)
    assert mask != AttentionMask(other, 8, 8)
    assert mask != AttentionMask.causal(8)

  check(AttentionMask.causal(8).slices, AttentionMask.causal(8).slices)


def test_equal_static_masks_share_a_program():
  num_traces = 0

  def count(mask):
    nonlocal num_traces
    num_traces += 1
    return mask.area()

  run = jax.jit(count, static_argnums=0)
  assert run(AttentionMask.causal(8)) == run(AttentionMask.causal(8)) == 36
  assert num_traces == 1


def test_slices_of_a_mask_cannot_be_changed():
  with pytest.raises(ValueError, match="read-only"):
    AttentionMask.causal(8).slices[0, 0] = 1


def test_merge_names_wrong_shapes():
  with pytest.raises(ValueError, match="outs must have one shape"):
    jax_magi.merge_attention([jnp.zeros((3, 2, 4))], [jnp.zeros((3, 1))])
  with pytest.raises(ValueError, match="same length of at least 1, got 1 and 0"):
    jax_magi.merge_attention([jnp.zeros((3, 2, 4))], [])


def test_merge_of_rows_that_see_nothing():
  out, lse = jax_magi.merge_attention([jnp.zeros((3, 1, 4))] * 2, [jnp.full((3, 1), -jnp.inf)] * 2)
  np.testing.assert_array_equal(out, 0.0)
  np.testing.assert_array_equal(lse, -np.inf)
