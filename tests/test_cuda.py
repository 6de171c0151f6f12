"""The Hopper kernels: named cases and random masks, on a GPU."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jax_magi
from jax_magi import AttentionMask
from tests.accuracy import DTYPES, check_attention, make_inputs
from tests.cases import CASES
from tests.test_random_masks import masks

pytestmark = pytest.mark.gpu

_DTYPES = ["bf16", "f16"]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward(case, dtype):
  inputs = case.make_inputs(dtype)
  check_attention(inputs, case.mask, "cuda", forward_only=True, **case.options)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(mask=masks(), seed=st.integers(0, 2**31), sink=st.booleans())
def test_random_mask(dtype, head_dim, mask, seed, sink):
  shape = (mask.q_len, mask.k_len, 4, 2, head_dim, head_dim)
  inputs = make_inputs(np.random.default_rng(seed), DTYPES[dtype], *shape, 0 if sink else None)
  check_attention(inputs, mask, "cuda", forward_only=True)


def _arrays(*shapes):
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in shapes]


def test_gradients():
  case = next(case for case in CASES if case.name == "packed_documents")
  check_attention(case.make_inputs("bf16"), case.mask, None, **case.options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_known_mask_gives_what_a_traced_one_does(case):
  inputs = case.make_inputs("bf16")

  def fun(q, k, v, sink, mask):
    options = {"return_max_logits": True, "implementation": "cuda", **case.options}
    return jax_magi.attention(q, k, v, mask, sink=sink, **options)

  traced = jax.jit(fun)(*inputs.operands, case.mask)
  known = jax.jit(functools.partial(fun, mask=case.mask))(*inputs.operands)
  jax.tree.map(np.testing.assert_array_equal, known, traced)


@pytest.mark.parametrize("q_len", [1, 2, 7, 16, 33, 64])
@pytest.mark.parametrize("group", [2, 3, 6, 8])
def test_short_queries_with_packed_heads(q_len, group):
  rng = np.random.default_rng(q_len + group)
  shape = (q_len, 300, 2 * group, 2, 128, 128)
  inputs = make_inputs(rng, DTYPES["bf16"], *shape, 0)
  mask = AttentionMask.causal(q_len, 300)
  check_attention(inputs, mask, "cuda", forward_only=True)


def test_short_queries_in_a_batch():
  q, k, v = _arrays((3, 5, 8, 128), (3, 300, 2, 128), (3, 300, 2, 128))
  mask = AttentionMask.causal(5, 300)
  fun = functools.partial(jax_magi.attention, mask=mask, implementation="cuda")
  got = jax.jit(jax.vmap(lambda q, k, v: fun(q, k, v)[0]))(q, k, v)
  for i in range(3):
    np.testing.assert_array_equal(got[i], fun(q[i], k[i], v[i])[0])


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
  got = jax.vmap(fun, (0, 0, 0, None if is_mask_shared else 0))(q, k, v, mapped)
  for i in range(5):
    expected = fun(q[i], k[i], v[i], slices[i])
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=i: x[i], got), expected)


def test_runs_are_equal_bit_for_bit():
  q, k, v = _arrays((3000, 8, 128), (3000, 2, 128), (3000, 2, 128))
  mask = AttentionMask.from_cu_seqlens([0, 700, 1700, 1900, 3000], causal=True)
  fun = jax.jit(functools.partial(jax_magi.attention, implementation="cuda"))
  first = fun(q, k, v, mask)
  for _ in range(10):
    jax.tree.map(np.testing.assert_array_equal, fun(q, k, v, mask), first)


def test_sm_margin_changes_nothing_but_the_grid():
  q, k, v = _arrays((2000, 8, 128), (2000, 2, 128), (2000, 2, 128))
  mask = AttentionMask.causal(2000)
  for margin in (1, 100, 1000):
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


def test_runs_inside_a_command_buffer():
  q, k, v = _arrays((500, 4, 64), (500, 2, 64), (500, 2, 64))
  mask = AttentionMask.causal(500)

  @functools.partial(
    jax.jit,
    compiler_options={
      "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
      "xla_gpu_graph_min_graph_size": 1,
    },
  )
  def captured(q, k, v, mask):
    for _ in range(3):
      q = jax_magi.attention(2 * q, k, v, mask, implementation="cuda")[0]
    return q

  for _ in range(5):  # The first calls are made before the capture.
    got = captured(q, k, v, mask)
  expected = q
  for _ in range(3):
    expected = jax_magi.attention(2 * expected, k, v, mask, implementation="cuda")[0]
  np.testing.assert_array_equal(got, expected)
