"""QK-Clip with mixed or unusual dtypes, and ambiguous names."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_magi.optim import Projection, QkProjections, apply_qk_clip, qk_clip, qk_clip_gamma
from tests.arrays import assert_same_bits, normal
from tests.qk_kernels import make_kernels, make_projections

pytestmark = pytest.mark.usefixtures("with_promotion")  # Optax needs it.

# Head 0 is cold, head 1 a little and head 3 very much above the threshold.
_STATISTICS = np.array([30.0, 120.0, -5.0, 1e4], np.float32)
_IS_COLD = _STATISTICS <= 100.0


def _cast(tree, dtype):
  return jax.tree.map(lambda x: jnp.asarray(x).astype(dtype), tree)


def _updates(dtype):
  return _cast(jax.tree.map(lambda x: 0.03 * normal(*x.shape, seed=7), make_kernels()), dtype)


def _clipped_updates(params, updates):
  transform = qk_clip(make_projections())

  @jax.jit
  def update(updates, state, params):
    return transform.update(updates, state, params, max_logits=_STATISTICS)[0]

  return update(updates, transform.init(params), params)


_DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("param_dtype", _DTYPES)
@pytest.mark.parametrize("update_dtype", _DTYPES)
def test_chain_equals_apply_qk_clip_whatever_the_dtypes(param_dtype, update_dtype):
  params, updates = _cast(make_kernels(), param_dtype), _updates(update_dtype)
  plain = optax.apply_updates(params, updates)
  expected = apply_qk_clip(plain, _STATISTICS, make_projections())
  got = optax.apply_updates(params, _clipped_updates(params, updates))
  # Of the weight before the clip: the update is rounded once in the wider dtype, the weight in its
  # own.
  eps = max(float(jnp.finfo(jnp.promote_types(param_dtype, update_dtype)).eps), 2.0**-23)
  for name in ("q", "k"):
    ours, theirs, before = (x[name]["kernel"] for x in (got, expected, plain))
    assert ours.dtype == before.dtype == jnp.dtype(param_dtype)
    ours, theirs, size = (np.asarray(x, np.float64) for x in (ours, theirs, jnp.abs(before)))
    own_eps = float(jnp.finfo(param_dtype).eps)
    assert (np.abs(ours - theirs) <= eps * (size + 0.1) + own_eps * np.abs(theirs)).all()
    cold = before[:, _IS_COLD]
    assert_same_bits(got[name]["kernel"][:, _IS_COLD], cold)


def test_bfloat16_updates_of_float32_parameters_are_clipped_in_float32():
  params, updates = make_kernels(), _updates("bfloat16")
  got = optax.apply_updates(params, _clipped_updates(params, updates))
  expected = apply_qk_clip(optax.apply_updates(params, updates), _STATISTICS, make_projections())
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=5e-7), got, expected)


def test_updates_of_other_parameters_keep_their_dtype():
  params = {**make_kernels(), "norm": np.ones(3, np.float32)}
  updates = {**_updates("bfloat16"), "norm": jnp.ones(3, jnp.bfloat16)}
  clipped = _clipped_updates(params, updates)
  assert clipped["norm"].dtype == jnp.bfloat16
  assert clipped["q"]["kernel"].dtype == np.float32


@pytest.mark.parametrize("param_dtype", _DTYPES)
def test_clip_needs_no_promotion(param_dtype):
  params, updates = _cast(make_kernels(), param_dtype), _updates("bfloat16")
  expected = (
    apply_qk_clip(params, _STATISTICS, make_projections()),
    _clipped_updates(params, updates),
  )
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    transform = qk_clip(make_projections(), np.int32(100), accumulate=True)
    clipped, state = transform.update(
      updates, transform.init(params), params, max_logits=jnp.asarray(_STATISTICS)
    )
    got = apply_qk_clip(params, _STATISTICS, make_projections(), np.float64(100.0)), clipped
    np.testing.assert_array_equal(state.num_broken, [0] * 4)
    qk_clip_gamma(jnp.ones(3, jnp.bfloat16), jnp.int32(2))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
    np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=1e-6), got, expected
  )  # fmt: skip


def test_gamma_of_low_precision_statistics_is_not_rounded_to_them():
  x = jnp.asarray([130.0], jnp.bfloat16)
  np.testing.assert_allclose(qk_clip_gamma(x), [100.0 / 130.0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_eight_bit_weights_are_scaled_in_float32_and_rounded_once(dtype):
  params = _cast(make_kernels(), dtype)
  got = apply_qk_clip(params, _STATISTICS, make_projections())
  factor = np.sqrt(np.asarray(qk_clip_gamma(_STATISTICS)))[:, None]
  for name in ("q", "k"):
    exact = jnp.asarray(params[name]["kernel"].astype(np.float32) * factor)
    assert_same_bits(got[name]["kernel"], exact.astype(dtype))
  zero = jax.tree.map(jnp.zeros_like, params)
  clipped = _clipped_updates(params, zero)
  assert clipped["q"]["kernel"].dtype == dtype
  wide = _clipped_updates(params, _cast(zero, np.float32))["q"]["kernel"]
  np.testing.assert_array_equal(
    params["q"]["kernel"].astype(np.float32) + wide, got["q"]["kernel"].astype(np.float32)
  )


@pytest.mark.parametrize("dtype", [np.int8, np.int32, bool, np.complex64])
def test_parameters_without_floating_point_are_named(dtype):
  params = make_kernels()
  params["k"]["kernel"] = params["k"]["kernel"].astype(dtype)
  name = np.dtype(dtype).name
  with pytest.raises(ValueError, match=f"k/kernel must hold floating point numbers .* got {name}"):
    apply_qk_clip(params, _STATISTICS, make_projections())
  with pytest.raises(ValueError, match="k/kernel must hold floating point numbers"):
    qk_clip(make_projections()).init(params)


def test_integers_elsewhere_are_left_alone():
  params = {**make_kernels(), "step": np.int32(3)}
  assert apply_qk_clip(params, _STATISTICS, make_projections())["step"] == 3


def _counted():
  return QkProjections(
    q=Projection("b_{layer}/q/kernel", "embed -> heads dim"),
    k=Projection("b_{layer}/k/kernel", "embed -> heads dim"),
  )


def test_a_layer_that_is_there_twice_is_named():
  params = {"b_0": make_kernels(), "b_00": make_kernels()}
  message = "b_0/q/kernel and b_00/q/kernel are both layer 0 of b_{layer}/q/kernel"
  with pytest.raises(ValueError, match=message):
    apply_qk_clip(params, _STATISTICS[None], _counted())


def test_layers_may_have_leading_zeros():
  params = {f"b_{i:02}": make_kernels() for i in range(11)}
  statistics = np.full((11, 4), 1.0, np.float32)
  statistics[10, 2] = 400.0
  got = apply_qk_clip(params, statistics, _counted())
  expected = params["b_10"]["q"]["kernel"][:, 2] * np.float32(0.5)
  np.testing.assert_allclose(got["b_10"]["q"]["kernel"][:, 2], expected, rtol=1e-6)
  assert_same_bits(jax.tree.map(np.asarray, got["b_01"]), params["b_01"])


@pytest.mark.parametrize(
  "threshold", [None, "100", math.nan, 0, -1.0, [100.0], np.ones(2), lambda step: 100.0]
)
def test_bad_threshold_is_named(threshold):
  for call in (
    lambda: apply_qk_clip(make_kernels(), _STATISTICS, make_projections(), threshold),
    lambda: qk_clip(make_projections(), threshold),
    lambda: qk_clip_gamma(_STATISTICS, threshold),
  ):
    with pytest.raises(ValueError, match="threshold must be a positive number"):
      call()


def test_traced_threshold_must_be_one_number():
  with pytest.raises(ValueError, match="threshold must be a positive number"):
    jax.jit(lambda t: qk_clip_gamma(_STATISTICS, t))(jnp.ones(4))


def test_parameters_that_are_one_array_are_named():
  kernel = make_kernels()["q"]["kernel"]
  with pytest.raises(ValueError, match=r"params must be a tree .* got a single ndarray"):
    apply_qk_clip(kernel, _STATISTICS, make_projections())
  with pytest.raises(ValueError, match="params must be a tree"):
    qk_clip(make_projections()).init(kernel)
