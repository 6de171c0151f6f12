"""FusedScaleMaskSoftmax against the formulas that it stands in for."""

import enum

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_magi import FusedScaleMaskSoftmax


class AttnMaskType(enum.Enum):
  padding = 1
  causal = 2


def _fill(scores, mask):
  return jnp.where(mask, -10000.0, scores)


def _plain(x, mask, scale, offset=None):
  """Scale, fill, softmax with the offset as one more column, in float32."""
  scores = x.astype(np.float32) * (1.0 if scale is None else scale)
  if mask is not None:
    scores = jnp.where(mask, -jnp.inf, scores)
  if offset is not None:
    column = jnp.broadcast_to(offset.reshape(1, -1, 1, 1), (*x.shape[:-1], 1))
    scores = jnp.concatenate([scores, column], axis=-1)
  return jax.nn.softmax(scores, axis=-1)[..., : x.shape[-1]].astype(x.dtype)


def _make(dtype=jnp.bfloat16, mask_type=AttnMaskType.padding, **options):
  defaults = {
    "scaled_masked_softmax_fusion": True,
    "mask_func": None,
    "softmax_in_fp32": True,
    "scale": 0.5,
  }
  return FusedScaleMaskSoftmax(
    dtype == jnp.float16, dtype == jnp.bfloat16, mask_type, **(defaults | options)
  )


def _inputs(shape=(2, 3, 6, 6), dtype=jnp.bfloat16):
  rng = np.random.default_rng(0)
  x = jnp.asarray(3 * rng.standard_normal(shape), dtype)
  mask = rng.random((shape[0], 1, *shape[2:])) < 0.3
  mask[..., 0] = False  # Every row sees something.
  return x, mask, rng.standard_normal(shape[1]).astype(np.float32)


def _close(a, b):
  assert a.dtype == b.dtype
  np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("has_offset", [True, False])
def test_padding_mask_is_true_where_masked_out(dtype, fusion, scale, has_offset):
  x, mask, offset = _inputs(dtype=dtype)
  offset = offset if has_offset else None
  fused = _make(dtype, scale=scale, scaled_masked_softmax_fusion=fusion)
  _close(fused(x, mask, offset), _plain(x, mask, scale, offset))


@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, "causal"])
@pytest.mark.parametrize("shape", [(2, 3, 6, 6), (2, 3, 1, 6), (2, 3, 4, 7)])
def test_causal_mask_is_made_here(mask_type, shape):
  x, *_ = _inputs(shape)
  hidden = np.triu(np.ones(shape[-2:], bool), shape[-1] - shape[-2] + 1)
  _close(_make(mask_type=mask_type)(x, None), _plain(x, hidden, 0.5))


def test_window():
  x, *_ = _inputs()
  distance = np.arange(6)[None] - np.arange(6)[:, None]
  two_sided = (distance < -2) | (distance > 1)
  _close(_make(window_size=(2, 1))(x, None), _plain(x, two_sided, 0.5))
  causal = (distance < -2) | (distance > 0)
  _close(_make(mask_type="causal", window_size=(2, 1))(x, None), _plain(x, causal, 0.5))


def test_mask_func_is_applied_to_scaled_scores():
  x, mask, offset = _inputs()
  mask[0, :, 2] = True  # The fill value changes such a row only a little.
  filled = _plain(_fill(x.astype(np.float32) * 0.5, mask), None, None, offset)
  _close(_make(mask_func=_fill)(x, mask, offset), filled.astype(x.dtype))
  assert not (np.asarray(_make(mask_func=_fill)(x, mask))[0, :, 2] == 0).any()
  assert (np.asarray(_make()(x, mask))[0, :, 2] == 0).all()


def test_gradients_flow():
  x, mask, offset = _inputs(dtype=jnp.float32)
  fused = _make(jnp.float32)

  def loss(fun, x, offset):
    return jnp.sum(jnp.sin(3 * fun(x, offset)))

  got = jax.grad(lambda *a: loss(lambda x, o: fused(x, mask, o), *a), (0, 1))(x, offset)
  expected = jax.grad(lambda *a: loss(lambda x, o: _plain(x, mask, 0.5, o), *a), (0, 1))(x, offset)
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_mistakes_are_named():
  x, mask, _ = _inputs()
  with pytest.raises(ValueError, match="cannot both be set"):
    FusedScaleMaskSoftmax(True, True, "causal", True, None, True, None)
  with pytest.raises(ValueError, match=r"attn_mask_type must be one of .* got 'triangle'"):
    _make(mask_type="triangle")
  with pytest.raises(ValueError, match="mask_func must be None or a function"):
    _make(mask_func=3)
  with pytest.raises(ValueError, match="input_in_fp16 is set, so input must be float16"):
    _make(jnp.float16)(x, mask)
  with pytest.raises(ValueError, match="boolean, True is masked out; got float32"):
    _make()(x, np.zeros((6, 6), np.float32))
  with pytest.raises(ValueError, match=r"input must be \[batch, heads, q_len, k_len\]"):
    _make()(x[0], mask)
