"""The cases with bias and boolean masks in which JAX tests `jax.nn.dot_product_attention`."""

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

BATCH, Q_LEN, K_LEN, DIM = 3, 36, 40, 16
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
SHAPES = ("bhqk", "1hqk", "b1qk", "11qk", "bh1k", "1h1k", "b11k", "hqk", "qk")
# Each row before the query length sees a key, because JAX averages over all keys for other rows.
_LENGTHS = {
  "query_seq_lengths": np.array([36, 13, 7], np.int32),
  "key_value_seq_lengths": np.array([40, 20, 12], np.int32),
}
COMBINATIONS = {
  "bias-causal": {"bias": "1hqk", "is_causal": True},
  "bias-window": {"bias": "b1qk", "local_window_size": (3, 2)},
  "bias-causal-window": {"bias": "11qk", "is_causal": True, "local_window_size": (3, 2)},
  "bias-both_lengths": {"bias": "bh1k", **_LENGTHS},
  "mask-causal": {"mask": "b1qk", "is_causal": True},
  "mask-window-both_lengths": {"mask": "b11k", "local_window_size": (3, 2), **_LENGTHS},
  "bias-mask": {"bias": "1hqk", "mask": "b11k"},
  "bias-mask_of_heads": {"bias": "11qk", "mask": "1hqk"},
  "bias-mask-causal-both_lengths": {"bias": "bhqk", "mask": "11qk", "is_causal": True, **_LENGTHS},
  "bias-mask-scale": {"bias": "qk", "mask": "hqk", "scale": 0.7},
}


@pytest.fixture(autouse=True, params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def platform(request):
  """The platform that a test runs on."""
  with jax.default_device(jax.devices(request.param)[0]):
    yield


def _shape(letters):
  sizes = {"b": BATCH, "h": 4, "q": Q_LEN, "k": K_LEN, "1": 1}
  return tuple(sizes[letter] for letter in letters)


def _bool_mask(letters, seed=0):
  """A mask in which every row of each window sees a key."""
  mask = np.random.default_rng(seed).random(_shape(letters)) < 0.6
  mask[..., ::3] = True
  return mask


def _arrays(heads, dtype, lead=(BATCH,)):
  """q, k, v and dout."""
  num_q_heads, num_kv_heads = HEADS[heads]
  q_shape, k_shape = (*lead, Q_LEN, num_q_heads, DIM), (*lead, K_LEN, num_kv_heads, DIM)
  return [x.astype(DTYPES[dtype]) for x in normals(q_shape, k_shape, k_shape, q_shape)]


def _call(fun, options):
  """(out, lse) of q, k, v, bias and mask. lse is 0 after the query length, unlike JAX's."""

  def attention(q, k, v, bias, mask):
    out, lse = fun(q, k, v, bias, mask, return_residual=True, **options)
    lengths = options.get("query_seq_lengths")
    if lengths is not None:
      is_row = np.arange(Q_LEN)[None, :, None] < np.reshape(lengths, (-1, 1, 1))
      lse = jnp.where(is_row, lse, jnp.zeros_like(lse))
    return out, lse

  return attention


def _run(attention, q, k, v, dout, bias, mask):
  """Results and gradients."""
  out, vjp, lse = jax.vjp(
    lambda q, k, v, bias: attention(q, k, v, bias, mask), q, k, v, bias, has_aux=True
  )
  grads = dict(zip(("dq", "dk", "dv", "dbias"), vjp(dout), strict=True))
  return {"out": out, "lse": lse, **{n: g for n, g in grads.items() if g is not None}}


def _expected(attention, arrays, bias, mask, dtype):
  """JAX's results in a dtype, from a CPU."""
  on_cpu = jax.default_device(jax.devices("cpu")[0])
  with promotion(), jax.enable_x64(dtype == np.float64), on_cpu:
    return _compiled(attention, arrays, bias, mask, dtype)


def _compiled(attention, arrays, bias, mask, dtype):
  run = jit_as_written(lambda *operands: _run(attention, *operands, mask))
  operands = jax.tree.map(lambda x: jnp.asarray(x, dtype), (*arrays, bias))
  return jax.tree.map(np.asarray, run(*operands))


def _plain(attention, arrays, bias, mask, dtype):
  """JAX's results in a 16-bit dtype, where the test runs: they are not the same on CPUs and GPUs.

  On a GPU, JAX rounds the gradients of logits before their products with q and k, as our kernels
  do. Without it, dq and dk would be held to as little as two thirds of the tolerance.
  """
  operands = (attention, arrays, bias, mask)
  if jax.config.jax_default_device.platform == "cpu":
    if dtype == np.float16:  # On a CPU, we compute in float32 and round results; so does this.
      return {name: x.astype(dtype) for name, x in _expected(*operands, np.float32).items()}
    return _expected(*operands, dtype)
  with promotion():
    return _compiled(*operands, dtype)


def _check(options, arrays, bias=None, mask=None, *, is_mask_known=False, wrap=lambda f: f):
  """Ours, held to the accuracy rule by JAX's in float64 and in the arrays' dtype.

  The mask is an argument of our program, or a constant of it.
  """
  attend = functools.partial(jax_magi.dot_product_attention, implementation=NATIVE)
  attention = wrap(_call(attend, options))
  ours = quick_jit(
    lambda *operands, mask=mask: _run(attention, *operands, mask),
  )(*arrays, bias, **({} if is_mask_known else {"mask": mask}))
  dtype = arrays[0].dtype
  operands = wrap(_call(jax.nn.dot_product_attention, options)), arrays, bias, mask
  truth = plain = _expected(*operands, np.float64)
  if dtype != np.float32:  # Which is not compared with the plain computation.
    plain = _plain(*operands, dtype)
  assert ours["out"].dtype == dtype
  assert bias is None or ours["dbias"].dtype == bias.dtype
  assert ours.keys() == truth.keys()
  for name, value in ours.items():
    check_close(name, value, truth[name], plain[name], dtype)


@pytest.mark.parametrize(("shape", "dtype"), in_turns(SHAPES, DTYPES, every=2))
def test_bias(shape, dtype):
  """With its gradient, which is summed over what it was broadcast to."""
  _check({}, _arrays("gqa", dtype), normals(_shape(shape))[0].astype(DTYPES[dtype]))


@pytest.mark.parametrize("shape", ["1hqk", "b11k"])
def test_float32_bias_of_16_bit_arrays(shape):
  _check({"is_causal": True}, _arrays("gqa", "bf16"), normals(_shape(shape))[0])


@pytest.mark.parametrize("shape", [(3, 4, 36, 1), (40,), (4, 1, 40)], ids=str)
def test_bias_that_is_broadcast_over_keys_or_has_fewer_dimensions(shape):
  _check({}, _arrays("gqa", "f32"), normals(shape)[0])


def test_bias_of_one_number_has_no_gradient():
  *arrays, dout = _arrays("gqa", "f32")
  (bias,) = normals((1, 1, 1, 1))
  _, vjp = jax.vjp(lambda bias: jax_magi.dot_product_attention(*arrays, bias), bias)
  zero = np.zeros_like(bias)
  check_close("dbias", vjp(dout)[0], zero, zero, np.float32)


@pytest.mark.parametrize(("shape", "is_known"), in_turns(SHAPES, [False, True], every=2))
def test_boolean_mask(shape, is_known):
  dtype = list(DTYPES)[(SHAPES.index(shape) + is_known) % len(DTYPES)]
  _check({}, _arrays("gqa", dtype), mask=_bool_mask(shape), is_mask_known=is_known)


@pytest.mark.parametrize("is_known", [False, True])
def test_boolean_mask_of_few_slices(is_known):
  mask = np.tri(Q_LEN, K_LEN, 3, dtype=bool) & ~np.tri(Q_LEN, K_LEN, -9, dtype=bool)
  _check({"is_causal": True}, _arrays("gqa", "f32"), mask=mask, is_mask_known=is_known)


@pytest.mark.parametrize(("name", "dtype"), in_turns(COMBINATIONS, DTYPES, every=2))
def test_combination(name, dtype):
  options = dict(COMBINATIONS[name])
  bias, mask = options.pop("bias", None), options.pop("mask", None)
  _check(
    options,
    _arrays("gqa", dtype),
    None if bias is None else normals(_shape(bias))[0].astype(DTYPES[dtype]),
    None if mask is None else _bool_mask(mask),
    is_mask_known=len(name) % 2 == 0,
  )


@pytest.mark.parametrize(
  ("heads", "dtype", "shape"),
  in_turns(["mqa", "mha"], ["f16", "bf16", "f32"], ["bhqk", "11qk"], every=3),
)
def test_heads(heads, dtype, shape):
  bias = normals(_shape(shape))[0].astype(DTYPES[dtype])
  _check({"is_causal": True}, _arrays(heads, dtype), bias, _bool_mask("b11k"))


@pytest.mark.parametrize(
  ("axes", "dtype"), in_turns([(0, None), (0, 0), (None, 0)], DTYPES, every=3), ids=str
)
def test_vmap(axes, dtype):
  """Over one more batch; bias and mask are mapped, or one for all."""
  bias_axis, mask_axis = axes
  bias = normals((2, *_shape("1hqk")))[0].astype(DTYPES[dtype])
  masks = np.stack([_bool_mask("b11k", seed) for seed in range(2)])

  def wrap(attention):
    return jax.vmap(attention, (0, 0, 0, bias_axis, mask_axis))

  arrays = _arrays("gqa", dtype, lead=(2, BATCH))
  bias, mask = (x if a == 0 else x[0] for x, a in ((bias, bias_axis), (masks, mask_axis)))
  _check({"is_causal": True}, arrays, bias, mask, wrap=wrap)


@pytest.mark.parametrize("dtype", in_turns(DTYPES, every=3))
def test_vmap_without_a_batch(dtype):
  bias = normals((BATCH, *_shape("hqk")))[0].astype(DTYPES[dtype])
  mask = np.stack([_bool_mask("11k", seed) for seed in range(BATCH)])
  _check({"is_causal": True}, _arrays("gqa", dtype), bias, mask, wrap=jax.vmap)


def test_without_a_batch():
  arrays = [x[0] for x in _arrays("gqa", "f32")]
  _check({}, arrays, normals(_shape("hqk"))[0], _bool_mask("1hqk"))
