"""The cases in which JAX tests `jax.nn.dot_product_attention`, of the drop-in for it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from tests.accuracy import DTYPES, check_close
from tests.arrays import normals
from tests.compilation import jit_as_written, promotion, quick_jit
from tests.cp_runs import NATIVE
from tests.sizes import in_turns

BATCH, LENGTH, DIM = 3, 40, 16
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
# Each row before the query length sees a key, because JAX averages over all keys for other rows.
_LENGTHS = {
  "query_seq_lengths": np.array([40, 13, 7], np.int32),
  "key_value_seq_lengths": np.array([40, 20, 12], np.int32),
}
CASES = {
  "full": {},
  "scale": {"scale": 0.7},
  "causal": {"is_causal": True},
  "query_lengths": {"query_seq_lengths": _LENGTHS["query_seq_lengths"]},
  "key_lengths": {"key_value_seq_lengths": _LENGTHS["key_value_seq_lengths"]},
  "both_lengths": _LENGTHS,
  "causal-both_lengths": {"is_causal": True, **_LENGTHS},
  "window": {"local_window_size": 5},
  "window_pair": {"local_window_size": (3, 2)},
  "window_of_one_side": {"local_window_size": (0, 6)},
  "causal-window_pair": {"is_causal": True, "local_window_size": (3, 2)},
  "window_pair-both_lengths": {"local_window_size": (3, 2), **_LENGTHS},
}


def _arrays(heads, dtype, lead=(BATCH,), q_len=LENGTH, k_len=LENGTH):
  num_q_heads, num_kv_heads = HEADS[heads]
  q_shape, k_shape = (*lead, q_len, num_q_heads, DIM), (*lead, k_len, num_kv_heads, DIM)
  arrays = normals(q_shape, k_shape, k_shape, q_shape)
  return [x.astype(DTYPES[dtype]) for x in arrays]


def _run(attention, q, k, v, dout):
  """out, dq, dk and dv. An attention may return its lse as well, to be compared as it is."""
  out, vjp, lse = jax.vjp(attention, q, k, v, has_aux=True)
  return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), vjp(dout), strict=True))}


def _attention(implementation, options):
  """(out, lse). lse is zero in rows after the query length, where JAX's has no meaning."""
  is_ours = implementation == "ours"
  fun = jax_magi.dot_product_attention if is_ours else jax.nn.dot_product_attention
  options = {**options, "implementation": NATIVE if is_ours else "xla"}

  def attention(q, k, v):
    out, lse = fun(q, k, v, return_residual=True, **options)
    lengths = options.get("query_seq_lengths")
    if lengths is not None:
      is_row = np.arange(q.shape[1])[None, :, None] < np.reshape(lengths, (-1, 1, 1))
      lse = jnp.where(is_row, lse, jnp.zeros_like(lse))
    return out, lse

  return attention


def _expected(make, arrays):
  """JAX's results for `make(implementation)`, in float64 and in the arrays' dtype."""
  run = functools.partial(_run, make("xla"))
  with promotion(), jax.enable_x64(True):
    truth = jit_as_written(run)(*(jnp.asarray(x, np.float64) for x in arrays))
  if arrays[0].dtype == np.float32:  # It is not compared with the plain computation.
    return truth, truth
  with promotion():
    return truth, jit_as_written(run)(*arrays)


def _check(make, arrays, expected=None):
  ours = quick_jit(functools.partial(_run, make("ours")))(*arrays)
  truth, plain = expected or _expected(make, arrays)
  assert ours["out"].dtype == ours["dq"].dtype == arrays[0].dtype
  for name, value in ours.items():
    check_close(name, value, truth[name], plain[name], arrays[0].dtype)


@functools.cache
def _expected_of_case(case, heads, dtype):
  make = functools.partial(_attention, options=CASES[case])
  return _expected(make, _arrays(heads, dtype))


@pytest.mark.parametrize(("case", "dtype"), in_turns(CASES, ["f32", "bf16"], every=2))
def test_masks(case, dtype):
  make = functools.partial(_attention, options=CASES[case])
  expected = _expected_of_case(case, "gqa", dtype)
  _check(make, _arrays("gqa", dtype), expected)


@pytest.mark.parametrize(
  ("heads", "case", "dtype"),
  in_turns(["mha", "mqa"], ["full", "causal-both_lengths"], ["bf16", "f32"], every=2),
)
def test_heads(heads, case, dtype):
  make = functools.partial(_attention, options=CASES[case])
  _check(make, _arrays(heads, dtype), _expected_of_case(case, heads, dtype))


@pytest.mark.parametrize(
  ("lengths", "case"),
  in_turns([(20, 50), (1, 40)], ["causal", "window_pair", "full"], every=2),
  ids=str,
)
def test_lengths_that_differ(lengths, case):
  q_len, k_len = lengths
  make = functools.partial(_attention, options=CASES[case])
  _check(make, _arrays("gqa", "f32", q_len=q_len, k_len=k_len))


@pytest.mark.parametrize(("axis", "dtype"), in_turns([2, 0], ["f32", "bf16"], every=2))
def test_vmap(axis, dtype):
  """Over one more batch axis in front, or over groups of heads in the middle."""
  arrays = [np.moveaxis(x, 0, axis) for x in _arrays("gqa", dtype, lead=(2, BATCH))]

  def make(implementation):
    inner = _attention(implementation, CASES["causal-both_lengths"])
    return jax.vmap(inner, in_axes=axis, out_axes=(axis, axis))

  _check(make, arrays)


def test_vmap_without_a_batch():
  def make(implementation):
    return jax.vmap(_attention(implementation, CASES["causal"]))

  _check(make, _arrays("gqa", "f32"))


def test_vmap_over_queries_that_share_keys():
  q, k, v, dout = _arrays("gqa", "f32", lead=(2, BATCH))

  def make(implementation):
    return jax.vmap(_attention(implementation, CASES["window"]), in_axes=(0, None, None))

  _check(make, [q, k[0], v[0], dout])


def test_vmap_over_lengths():
  """Lengths that are mapped as well: each of the outer rows has its own."""
  arrays = _arrays("gqa", "f32", lead=(2, BATCH))
  lengths = np.array([[40, 20, 12], [1, 33, 40]], np.int32)

  def make(implementation):
    def one(q, k, v, lengths):
      return _attention(implementation, {"key_value_seq_lengths": lengths})(q, k, v)

    return lambda q, k, v: jax.vmap(one)(q, k, v, lengths)

  _check(make, arrays)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_one_batch_and_no_batch_agree(dtype):
  q, k, v, _ = (jnp.asarray(x) for x in _arrays("gqa", dtype, lead=(1,)))
  with_batch = jax_magi.dot_product_attention(q, k, v, is_causal=True)
  without = jax_magi.dot_product_attention(q[0], k[0], v[0], is_causal=True)
  np.testing.assert_array_equal(with_batch[0], without)
