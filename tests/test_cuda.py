"""The Hopper kernels: named cases and random masks, forward and backward, on a GPU."""

import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jax_magi
from jax_magi import AttentionMask
from tests.accuracy import DTYPES, Inputs, check_attention, check_results, make_inputs
from tests.arrays import normals
from tests.cases import CASES
from tests.needs import hopper_needs, most_tile_rows, takes_hopper_kernels
from tests.test_random_masks import masks

pytestmark = pytest.mark.gpu

_DTYPES = ["bf16", "f16"]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case, dtype):
  check_attention(case.make_inputs(dtype), case.mask, "cuda", **case.options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_deterministic(case):
  inputs = case.make_inputs("bf16")
  check_attention(inputs, case.mask, "cuda", deterministic=True, **case.options)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(mask=masks(), seed=st.integers(0, 2**31), sink=st.booleans())
def test_random_mask(dtype, head_dim, deterministic, mask, seed, sink):
  shape = (mask.q_len, mask.k_len, 4, 2, head_dim, head_dim)
  inputs = make_inputs(np.random.default_rng(seed), DTYPES[dtype], *shape, 0 if sink else None)
  check_attention(inputs, mask, "cuda", deterministic=deterministic)


def _arrays(*shapes):
  return [jnp.asarray(x) for x in normals(*shapes, dtype=jnp.bfloat16)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_with_a_known_mask(case):
  """Its tiles differ from those of a traced mask, so results differ in the last bits."""
  check_attention(case.make_inputs("bf16"), case.mask, "cuda", is_mask_known=True, **case.options)


@pytest.mark.parametrize("block_size", [48, 256])
def test_known_mask_that_is_cut_by_keys(block_size):
  inputs = make_inputs(np.random.default_rng(0), DTYPES["bf16"], 1100, 1100, 4, 2, 64, 64)
  mask = AttentionMask.block_causal(block_size, 1100)
  check_attention(inputs, mask, "cuda", is_mask_known=True)


@pytest.mark.parametrize("q_len", [1, 2, 7, 16, 33, 64])
@pytest.mark.parametrize("group", [2, 3, 6, 8, 71, 130])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_short_queries_with_packed_heads(q_len, group, head_dim):
  rng = np.random.default_rng(q_len + group)
  shape = (q_len, 300, 2 * group, 2, head_dim, head_dim)
  inputs = make_inputs(rng, DTYPES["bf16"], *shape, 0)
  mask = AttentionMask.causal(q_len, 300)
  check_attention(inputs, mask, "cuda")


@pytest.mark.parametrize("group", [2, 3, 6])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_short_tiles_with_packed_heads(group, head_dim):
  """Documents end in tiles of few rows. With head_dim 64, long documents have large tiles."""
  lengths = [193, 160, 225, 97, 65, 328, 32]
  bounds = np.cumsum([0, *lengths])
  shape = (bounds[-1], bounds[-1], 24, 24 // group, head_dim, head_dim)
  inputs = make_inputs(np.random.default_rng(group), DTYPES["bf16"], *shape, 0)
  check_attention(inputs, AttentionMask.from_cu_seqlens(bounds, causal=True), "cuda")


@pytest.mark.parametrize(
  ("dtype", "head_dim", "group", "sm_margin"),
  [
    ("bf16", 64, 1, 0),
    ("bf16", 64, 2, 130),
    ("bf16", 128, 3, 0),
    ("bf16", 128, 1, 130),
    ("f16", 128, 2, 0),
    ("f16", 40, 1, 0),
  ],
)
def test_long_tiles_of_keys(dtype, head_dim, group, sm_margin):
  """Known masks with many queries a key, for which the backward kernel runs in clusters.

  One of two CTAs has fewer keys than the other, and none in a tile without queries.
  """
  slices = [(0, 12001, 0, 768, -(2**30), 0), (100, 150, 768, 968, -(2**30), 700)]
  mask = AttentionMask(np.array(slices, np.int32), 12001, 1060)
  assert _is_for_clusters(mask, head_dim)
  shape = (mask.q_len, mask.k_len, group, 1, head_dim, head_dim)
  inputs = make_inputs(np.random.default_rng(group), DTYPES[dtype], *shape, 0)
  check_attention(inputs, mask, "cuda", is_mask_known=True, sm_margin=sm_margin)


@pytest.mark.parametrize(
  ("mask", "heads", "batch", "cluster_size"),
  [
    (AttentionMask.full(2048), (48, 8), 1, 2),
    (AttentionMask.sliding_window(4096, left=1023), (48, 8), 1, 2),
    (AttentionMask.full(1024), (48, 8), 8, 2),
    (AttentionMask.full(1024), (48, 8), 1, 1),
    (AttentionMask.causal(2048), (48, 8), 1, 1),
    (AttentionMask.full(2048), (8, 2), 1, 1),
    (AttentionMask.from_cu_seqlens(np.arange(0, 32769, 128)), (48, 8), 1, 1),
    (AttentionMask.full(4096), (24, 8), 1, 1),  # Its heads do not come in pairs.
  ],
  ids=["full", "window", "batch", "short", "causal", "few_heads", "one_block_a_tile", "odd_group"],
)
def test_much_work_is_done_in_clusters(mask, heads, batch, cluster_size, tmp_path):
  """The name of the forward kernel that ran tells."""
  q_shape, k_shape = ((batch, mask.q_len, num_heads, 128) for num_heads in heads)
  arrays = _arrays(q_shape, k_shape, k_shape)
  if not takes_hopper_kernels(arrays[0], arrays[2]):
    pytest.skip("only the kernels for Hopper have clusters")
  fun = functools.partial(jax_magi.attention, mask=mask, implementation="cuda")
  with jax.profiler.trace(tmp_path):
    jax.block_until_ready(jax.jit(jax.vmap(lambda *x: fun(*x)[0]))(*arrays))
  (path,) = tmp_path.rglob("*.xplane.pb")
  profile = jax.profiler.ProfileData.from_file(str(path))
  names = {e.name for plane in profile.planes for line in plane.lines for e in line.events}
  # The last argument of its configuration.
  sizes = {found[1] for name in names if (found := re.search(r"ForwardConfig<.*?(\d) ?>", name))}
  assert sizes == {str(cluster_size)}


_TWO_RANGES = AttentionMask.from_ranges([[0, 3000], [3500, 7000]], [[0, 512], [0, 512]], [0, 0])


@pytest.mark.parametrize(
  ("mask", "batch", "num_kv_heads", "num_parts"),
  [
    (AttentionMask.full(3900, 512), 3, 2, 3),
    (AttentionMask.full(3900, 512), 1, 66, 1),
    (_TWO_RANGES, 1, 66, 1),
  ],
  ids=["parts_of_dk_and_dv", "heads_in_turn", "two_slices"],
)
def test_clusters_compute_what_others_do(mask, batch, num_kv_heads, num_parts):
  """A traced mask has no clusters. One tile list serves all rows of a batch."""
  group = 3
  shape = {"batch": batch, "num_kv_heads": num_kv_heads, "group": group}
  assert _is_for_clusters(mask, 128)
  assert hopper_needs(mask, is_backward=True, **shape).num_dkv_parts == num_parts
  q_shape = (batch, mask.q_len, group * num_kv_heads, 128)
  k_shape = (batch, mask.k_len, num_kv_heads, 128)
  arrays = _arrays(q_shape, k_shape, k_shape, q_shape)

  def gradients(mask, q, k, v, dout):
    fun = functools.partial(jax_magi.attention, mask=mask, implementation="cuda")
    return jax.vjp(lambda *x: fun(*x)[0], q, k, v)[1](dout)

  found = jax.jit(jax.vmap(functools.partial(gradients, mask)))(*arrays)
  traced = jax.jit(jax.vmap(gradients, (None, 0, 0, 0, 0)))
  for one, other in zip(found, traced(mask, *arrays), strict=True):
    one, other = (np.asarray(x, np.float32) for x in (one, other))
    assert np.linalg.norm(one - other) < 1e-3 * np.linalg.norm(other)


def _is_for_clusters(mask, head_dim):
  return most_tile_rows(hopper_needs(mask, is_backward=True, head_dim=head_dim)) == 256


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("has_alibi", [False, True])
def test_one_block_of_threads_for_all_tiles(head_dim, has_alibi):
  """A CTA prepares a tile while it finishes one. Some tiles are fully masked, even two in a row."""
  slices = [(0, 300, 0, 700, -40, 90), (300, 310, 1000, 1001, -(2**30), 2**30)]
  mask = AttentionMask(np.array(slices, np.int32), 320, 1200)
  shape = (mask.q_len, mask.k_len, 6, 3, head_dim, head_dim)
  inputs = make_inputs(np.random.default_rng(0), DTYPES["bf16"], *shape, 0, has_alibi=has_alibi)
  for is_mask_known in (False, True):
    check_attention(inputs, mask, "cuda", is_mask_known=is_mask_known, sm_margin=131)


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_empty_sequences(q_len, k_len, deterministic):
  q, k, v = _arrays((q_len, 4, 64), (k_len, 2, 64), (k_len, 2, 64))
  mask = AttentionMask.full(q_len, k_len)
  options = {"return_max_logits": True, "implementation": "cuda", "deterministic": deterministic}

  def fun(q, k, v):
    out, meta = jax_magi.attention(q, k, v, mask, **options)
    return out.sum(), meta

  (_, meta), gradients = jax.value_and_grad(fun, (0, 1, 2), has_aux=True)(q, k, v)
  assert (meta.lse == -jnp.inf).all() and (meta.max_logits == -jnp.inf).all()
  assert all((g == 0).all() for g in gradients)


def test_lse_of_rows_that_see_nothing_has_no_gradient():
  q, k, v = _arrays((200, 4, 128), (200, 2, 128), (200, 2, 128))
  mask = AttentionMask(np.array([[0, 40, 0, 40, -(2**30), 2**30]], np.int32), 200, 200)
  is_valid = np.arange(200)[:, None] < 40

  def fun(q, k, v):
    lse = jax_magi.attention(q, k, v, mask, implementation="cuda")[1].lse
    return jnp.where(is_valid, lse**2, 0.0).sum()  # Its gradient is 0 * inf for other rows.

  for gradient in jax.grad(fun, (0, 1, 2))(q, k, v):
    assert jnp.isfinite(gradient).all()
    assert (gradient[40:] == 0).all()


def test_max_logits_of_minus_zero():
  q, k = jnp.zeros((3, 2, 64), jnp.bfloat16), -jnp.ones((5, 2, 64), jnp.bfloat16)
  options = {"return_max_logits": True, "implementation": "cuda"}
  _, meta = jax_magi.attention(q, k, k, AttentionMask.full(3, 5), **options)
  np.testing.assert_array_equal(meta.max_logits, [0.0, 0.0])


def test_short_queries_in_a_batch():
  q, k, v = _arrays((3, 5, 8, 128), (3, 300, 2, 128), (3, 300, 2, 128))
  mask = AttentionMask.causal(5, 300)
  fun = functools.partial(jax_magi.attention, mask=mask, implementation="cuda")
  got = jax.jit(jax.vmap(lambda q, k, v: fun(q, k, v)[0]))(q, k, v)
  for i in range(3):
    np.testing.assert_array_equal(got[i], fun(q[i], k[i], v[i])[0])


def _check_gradients_of_sum(gradients, operands, mask):
  """Checks dq, dk and dv of out.sum() by the accuracy rule."""
  q, k, v = (np.asarray(x) for x in operands)
  dout, dlse = np.ones((*q.shape[:2], v.shape[2]), q.dtype), np.zeros(q.shape[:2], np.float32)
  inputs = Inputs(q, k, v, None, dout, dlse)
  check_results(dict(zip(("dq", "dk", "dv"), gradients, strict=True)), inputs, mask)


@pytest.mark.parametrize("is_mask_shared", [True, False])
def test_batch(is_mask_shared):
  q, k, v = _arrays((5, 300, 4, 64), (5, 300, 2, 64), (5, 300, 2, 64))
  cuts = [100] * 5 if is_mask_shared else [0, 1, 100, 200, 300]
  slices = np.stack([AttentionMask.from_cu_seqlens([0, c, 300], causal=True).slices for c in cuts])

  def fun(q, k, v, slices):
    mask = AttentionMask(slices, 300, 300)
    out, meta = jax_magi.attention(q, k, v, mask, return_max_logits=True, implementation="cuda")
    return out, meta.lse, meta.max_logits

  mapped = slices[0] if is_mask_shared else slices

  def gradients(q, k, v, slices):
    return jax.grad(lambda *x: fun(*x, slices)[0].astype(np.float32).sum(), (0, 1, 2))(q, k, v)

  got = jax.vmap(fun, (0, 0, 0, None if is_mask_shared else 0))(q, k, v, mapped)
  for i in range(5):
    expected = fun(q[i], k[i], v[i], slices[i])
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=i: x[i], got), expected)
  got = jax.vmap(gradients, (0, 0, 0, None if is_mask_shared else 0))(q, k, v, mapped)
  for i in range(5):
    mask = AttentionMask(slices[i], 300, 300)
    _check_gradients_of_sum([x[i] for x in got], (q[i], k[i], v[i]), mask)


def test_runs_are_equal_bit_for_bit():
  q, k, v = _arrays((3000, 8, 128), (3000, 2, 128), (3000, 2, 128))
  mask = AttentionMask.from_cu_seqlens([0, 700, 1700, 1900, 3000], causal=True)
  fun = jax.jit(functools.partial(jax_magi.attention, implementation="cuda"))
  first = fun(q, k, v, mask)
  for _ in range(10):
    jax.tree.map(np.testing.assert_array_equal, fun(q, k, v, mask), first)


def test_sm_margin_changes_nothing_of_whole_tiles():
  q, k, v = _arrays((2000, 8, 128), (2000, 2, 128), (2000, 2, 128))
  mask = AttentionMask.causal(2000)
  for margin in (1, 100, 131):
    got = jax_magi.attention(q, k, v, mask, sm_margin=margin, implementation="cuda")[0]
    expected = jax_magi.attention(q, k, v, mask, implementation="cuda")[0]
    np.testing.assert_array_equal(got, expected)


def test_many_work_tiles_and_large_offsets():
  """A million tokens in documents: more than 2**16 tiles, more than 2**31 elements."""
  length, heads = 1 << 20, 16
  bounds = np.arange(0, length + 1, 512)
  mask = AttentionMask.from_cu_seqlens(bounds, causal=True)
  keys = jax.random.split(jax.random.key(0), 3)
  q, k, v = (jax.random.normal(key, (length, heads, 128), jnp.bfloat16) for key in keys)
  assert q.size >= 2**31
  fun = jax.jit(functools.partial(jax_magi.attention, implementation="cuda"))
  out, meta = fun(q, k, v, mask)
  for i in (0, len(bounds) // 2, len(bounds) - 2):
    part = slice(bounds[i], bounds[i + 1])
    expected, expected_meta = fun(q[part], k[part], v[part], AttentionMask.causal(512))
    np.testing.assert_array_equal(out[part], expected)
    np.testing.assert_array_equal(meta.lse[part], expected_meta.lse)
  del out, meta
  _check_large_gradients(q, k, v, mask, bounds)


def _check_large_gradients(q, k, v, mask, bounds):
  @jax.jit
  def gradients(q, k, v, mask):
    def fun(*x):
      return jax_magi.attention(*x, mask, implementation="cuda")[0].astype(np.float32).sum()

    return jax.grad(fun, (0, 1, 2))(q, k, v)

  got = gradients(q, k, v, mask)
  for i in (0, len(bounds) // 2, len(bounds) - 2):
    part = slice(bounds[i], bounds[i + 1])
    operands = (q[part], k[part], v[part])
    _check_gradients_of_sum([x[part] for x in got], operands, AttentionMask.causal(512))


@pytest.mark.parametrize("is_scan", [False, True])
def test_layers_share_the_list_of_a_traced_mask(is_scan):
  """XLA merges the operations of all layers, one for each pass. In a loop, it is in the body."""
  mask = AttentionMask.from_cu_seqlens([0, 100, 350, 400], causal=True)
  q, k, v = _arrays((400, 4, 64), (400, 2, 64), (400, 2, 64))

  def layer(q, mask):
    return jax_magi.attention(2 * q, k, v, mask, implementation="cuda")[0]

  def loss(q, mask):
    if is_scan:
      q, _ = jax.lax.scan(lambda q, _: (layer(q, mask), None), q, None, length=4)
    else:
      for _ in range(4):
        q = layer(q, mask)
    return q.astype(jnp.float32).sum(), q

  mask = jax.device_put(mask)
  program = jax.jit(jax.grad(loss, has_aux=True)).lower(q, mask).compile()
  assert program.as_text().count('custom_call_target="jax_magi_attention_tile_list"') == 2
  gradient, out = program(q, mask)
  alone = jax.jit(layer)
  pulls, expected = [], q
  for _ in range(4):
    expected, pull = jax.vjp(lambda q: alone(q, mask), expected)
    pulls.append(pull)
  np.testing.assert_array_equal(out, expected)
  expected = jnp.ones_like(q)
  for pull in reversed(pulls):
    (expected,) = pull(expected)
  np.testing.assert_allclose(
    np.asarray(gradient, np.float32), np.asarray(expected, np.float32), rtol=0.05, atol=0.05
  )
