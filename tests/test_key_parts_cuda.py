"""Tiles of the last round, cut along their keys, on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask
from tests.accuracy import DTYPES, check_results, make_inputs, run_attention
from tests.arrays import normals

pytestmark = pytest.mark.gpu

_ALL = (-(2**30), 2**30)
_TWO_RANGES = AttentionMask(
  np.array([(0, 300, 0, 1500, *_ALL), (0, 300, 1600, 3001, -(2**30), 2690)], np.int32), 300, 3001
)
_MASKS = {
  "full": AttentionMask.full(300, 3000),
  "causal": AttentionMask.causal(300, 3000),
  "few_queries": AttentionMask.causal(5, 4100),
  "one_query": AttentionMask.full(1, 3000),
  "two_ranges": _TWO_RANGES,
}
_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]


def _check(mask, shape, dtype="bf16", num_sinks=None, sm_margin=0, is_known=False, **options):
  """Checks results by the rule, and that they are summed differently from whole tiles."""
  terms = {name: options.pop(name) for name in ("bias", "has_alibi") if name in options}
  rng = np.random.default_rng(0)
  inputs = make_inputs(rng, DTYPES[dtype], mask.q_len, mask.k_len, *shape, num_sinks, **terms)
  if inputs.alibi_slopes is not None:  # So flat that all parts count.
    inputs = dataclasses.replace(inputs, alibi_slopes=inputs.alibi_slopes / 256)
  how = {"is_mask_known": is_known, "implementation": "cuda", **options}
  ours, whole = (run_attention(inputs, mask, sm_margin=n, **how) for n in (sm_margin, 131))
  check_results(ours, inputs, mask, **options)
  assert any((ours[name] != whole[name]).any() for name in ("out", "lse"))


def _arrays(q_shape, k_shape):
  return [jnp.asarray(x) for x in normals(q_shape, k_shape, k_shape, dtype=jnp.bfloat16)]


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("dims", _DIMS, ids=str)
@pytest.mark.parametrize("name", _MASKS)
def test_mask(dims, name, is_known):
  _check(_MASKS[name], (6, 2, *dims), is_known=is_known)


@pytest.mark.parametrize("dims", _DIMS, ids=str)
@pytest.mark.parametrize("options", [{"num_sinks": 0}, {"num_sinks": 2}, {"softcap": 3.0}], ids=str)
def test_sinks_and_cap(dims, options):
  _check(_MASKS["two_ranges"], (6, 2, *dims), dtype="f16", **options)


@pytest.mark.parametrize("sm_margin", [115, 124, 128])
def test_whole_tiles_come_first(sm_margin):
  """18 tiles for 17, 8 and 4 multiprocessors with one CTA each (sm90) or two (sm80)."""
  _check(_MASKS["full"], (6, 2, 128, 128), sm_margin=sm_margin)


@pytest.mark.parametrize("num_q_heads", [2, 6, 12])
@pytest.mark.parametrize("sm_margin", [0, 124])
def test_clusters(num_q_heads, sm_margin):
  _check(
    AttentionMask.causal(320, 8001), (num_q_heads, 1, 128, 128), sm_margin=sm_margin, is_known=True
  )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("terms", [{"bias": "hqk"}, {"has_alibi": True}], ids=str)
@pytest.mark.parametrize("is_known", [False, True])
def test_terms(head_dim, terms, is_known):
  _check(AttentionMask.causal(320, 4000), (6, 1, head_dim, head_dim), is_known=is_known, **terms)


def test_a_batch_of_masks():
  """Rows whose keys differ in number, in one call."""
  q, k, v = _arrays((3, 40, 4, 64), (3, 3000, 2, 64))
  lengths = jnp.array([3000, 2100, 1234], jnp.int32)
  fun = functools.partial(jax_magi.dot_product_attention, implementation="cuda")
  got = jax.jit(fun)(q, k, v, key_value_seq_lengths=lengths)
  for i, n in enumerate([3000, 2100, 1234]):
    expected = fun(q[i : i + 1], k[i : i + 1, :n], v[i : i + 1, :n], sm_margin=131)[0]
    np.testing.assert_allclose(
      got[i].astype(np.float32), expected.astype(np.float32), atol=2e-3, rtol=2e-2
    )


def test_runs_are_equal_bit_for_bit():
  """Regardless of which part finishes last."""
  q, k, v = _arrays((300, 12, 128), (4000, 2, 128))
  fun = functools.partial(
    jax_magi.attention, mask=AttentionMask.full(300, 4000), implementation="cuda"
  )
  run = jax.jit(fun)
  first = run(q, k, v)
  assert (first[1].lse != jax.jit(functools.partial(fun, sm_margin=131))(q, k, v)[1].lse).any()
  for _ in range(50):
    jax.tree.map(np.testing.assert_array_equal, run(q, k, v), first)


def test_a_mask_that_a_batch_shares():
  """Results equal those of whole tiles, except for the last bits."""
  q, k, v = _arrays((3, 40, 4, 64), (3, 3000, 2, 64))
  mask = AttentionMask.causal(40, 3000)

  def run(sm_margin):
    fun = functools.partial(jax_magi.attention, sm_margin=sm_margin, implementation="cuda")
    return jax.jit(jax.vmap(lambda *x: fun(*x, mask)))(q, k, v)

  (out, meta), (whole, whole_meta) = run(0), run(131)
  assert (meta.lse != whole_meta.lse).any()
  np.testing.assert_allclose(meta.lse, whole_meta.lse, rtol=1e-6)
  out, whole = (np.asarray(x, np.float32) for x in (out, whole))
  np.testing.assert_allclose(out, whole, atol=1e-3, rtol=2**-7)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_key_that_is_not_finite(value):
  """All queries see it, in whichever part it is."""
  q, k, v = (jnp.abs(x) for x in _arrays((100, 2, 64), (3000, 2, 64)))
  k = k.at[1700, 0].set(value)
  mask = AttentionMask.full(100, 3000)
  fun = functools.partial(jax_magi.attention, implementation="cuda", return_max_logits=True)
  out, meta = fun(q, k, v, mask)
  whole_meta = fun(q, k, v, mask, sm_margin=131)[1]
  assert np.isnan(np.asarray(out[:, 0], np.float32)).all()
  assert np.isfinite(np.asarray(out[:, 1], np.float32)).all()
  np.testing.assert_array_equal(np.isnan(meta.lse), np.isnan(whole_meta.lse))
  np.testing.assert_array_equal(meta.max_logits, whole_meta.max_logits)
