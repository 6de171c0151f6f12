"""`flax_attention_fn` in Flax's own modules, against Flax's own attention in them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_magi
from jax_magi import AttentionMask, flax_attention_fn
from tests.sizes import in_turns

BATCH, LENGTH, HEADS, FEATURES = 3, 24, 4, 32
LENGTHS = np.array([24, 17, 1])
# [batch, length]: True for tokens that are not padding.
TOKENS = np.arange(LENGTH) < LENGTHS[:, None]


def _inputs(shape=(BATCH, LENGTH, FEATURES), seed=0):
  return jax.random.normal(jax.random.key(seed), shape)


def _dense(*, is_causal, is_padded):
  """The boolean mask for Flax, `[batch, 1, length, length]`."""
  mask = np.ones((BATCH, 1, LENGTH, LENGTH), bool)
  if is_causal:
    mask &= np.tril(np.ones((LENGTH, LENGTH), bool))
  if is_padded:
    mask &= TOKENS[:, None, None, :]
  return mask


def _slices(*, is_causal, is_padded):
  """The same mask as an `AttentionMask` with slices for each row, traced, as in a data pipeline."""
  ids = TOKENS if is_padded else np.ones_like(TOKENS)

  def of_row(ids):
    return AttentionMask.from_segment_ids(ids, 1, causal=is_causal)

  return jax.jit(jax.vmap(of_row))(jnp.asarray(ids, np.int32))


def _linen(attention_fn, **options):
  module = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn, **options)
  return lambda params, x, **call: module.apply(params, x, **call), _linen_params()


@functools.cache
def _linen_params():
  return jax.jit(nn.MultiHeadDotProductAttention(HEADS).init)(jax.random.key(1), _inputs())


def _nnx(attention_fn, **options):
  module = nnx.MultiHeadAttention(
    HEADS, FEATURES, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(1), **options
  )
  graph, params = nnx.split(module)
  return lambda params, x, **call: nnx.merge(graph, params)(x, **call), params


MODULES = {"linen": _linen, "nnx": _nnx}
DEFAULTS = {"linen": nn.dot_product_attention, "nnx": nnx.dot_product_attention}


def _value_and_gradients(make, attention_fn, x, call, rows):
  apply, params = make(attention_fn)
  target = _inputs(seed=2)

  def loss(params, x):
    out = apply(params, x, **call)
    return jnp.sum(jnp.where(rows[..., None], out * target, 0.0)), out

  (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True))(
    params, x
  )
  return jnp.where(rows[..., None], out, 0.0), [
    g for g in jax.tree.leaves(grads) if jnp.issubdtype(g.dtype, jnp.floating)
  ]


def _assert_close(ours, theirs):
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize(
  ("name", "is_causal", "is_padded"), in_turns(MODULES, [False, True], [True, False])
)
def test_masks_made_of_slices(name, is_causal, is_padded):
  kind = {"is_causal": is_causal, "is_padded": is_padded}
  # The results of padding differ, and are not used.
  rows = TOKENS if is_padded else np.ones_like(TOKENS)
  ours, theirs = (
    _value_and_gradients(MODULES[name], fn, _inputs(), {"mask": mask}, rows)
    for fn, mask in (
      (flax_attention_fn, _slices(**kind)),
      (DEFAULTS[name], jnp.asarray(_dense(**kind))),
    )
  )
  _assert_close(ours, theirs)


@pytest.mark.parametrize(
  ("name", "is_causal", "is_padded"), in_turns(MODULES, [True, False], [True, False])
)
def test_boolean_masks(name, is_causal, is_padded):
  mask = jnp.asarray(_dense(is_causal=is_causal, is_padded=is_padded))
  ours, theirs = (
    _value_and_gradients(MODULES[name], fn, _inputs(), {"mask": mask}, np.ones_like(TOKENS))
    for fn in (flax_attention_fn, DEFAULTS[name])
  )
  _assert_close(ours, theirs)


def test_nnx_is_causal():
  rows = np.ones_like(TOKENS)
  ours, theirs = (
    _value_and_gradients(_nnx, fn, _inputs(), {"is_causal": True}, rows)
    for fn in (flax_attention_fn, nnx.dot_product_attention)
  )
  _assert_close(ours, theirs)


def test_linen_passes_on_what_partial_fixes():
  fn = functools.partial(flax_attention_fn, is_causal=True, local_window_size=(3, 0))
  band = np.tril(np.ones((LENGTH, LENGTH), bool)) & ~np.tril(np.ones((LENGTH, LENGTH), bool), -4)
  rows = np.ones_like(TOKENS)
  ours = _value_and_gradients(_linen, fn, _inputs(), {}, rows)
  theirs = _value_and_gradients(
    _linen, nn.dot_product_attention, _inputs(), {"mask": jnp.asarray(band[None, None])}, rows
  )
  _assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(LENGTH, FEATURES), (2, 3, LENGTH, FEATURES)], ids=str)
def test_any_number_of_batch_axes(shape):
  x = _inputs(shape)
  ours, theirs = (
    jax.jit(_linen(fn)[0])(_linen_params(), x)
    for fn in (flax_attention_fn, nn.dot_product_attention)
  )
  _assert_close(ours, theirs)


@pytest.mark.usefixtures("with_promotion")
@pytest.mark.parametrize("lead", [(2, 3), (3,), (1, 1), (2, 1)], ids=str)
def test_bias_and_mask_with_several_batch_axes(lead):
  """Those of all axes, of the last one, one for all, and one for each row of the first."""
  x = _inputs((2, 3, LENGTH, HEADS, 8))
  bias = _inputs((*lead, 1, LENGTH, LENGTH), seed=1)
  mask = bias < 1.0
  ours, theirs = (fn(x, x, x, bias, mask) for fn in (flax_attention_fn, nn.dot_product_attention))
  _assert_close(ours, theirs)


@pytest.mark.usefixtures("with_promotion")
def test_cross_attention_in_bfloat16():
  x, y = _inputs(), _inputs((BATCH, 7, FEATURES), seed=3)

  def run(fn, dtype):
    apply, params = _linen(fn, dtype=dtype)
    return jax.jit(apply)(params, x, inputs_k=y)

  ours = run(flax_attention_fn, jnp.bfloat16)
  assert ours.dtype == jnp.bfloat16
  truth = run(nn.dot_product_attention, jnp.float32)
  theirs = run(nn.dot_product_attention, jnp.bfloat16)
  ulp = float(jnp.finfo(jnp.bfloat16).eps) * np.abs(truth).max()
  assert np.abs(ours - truth).max() <= 2 * np.abs(theirs - truth).max() + ulp


def test_what_is_not_supported_says_so():
  x = _inputs()
  apply, params = _linen(flax_attention_fn, dropout_rate=0.1)
  assert apply(params, x, deterministic=True).shape == x.shape
  with pytest.raises(NotImplementedError, match=r"random bits.* dropout_rate=0, or call it with"):
    apply(params, x, deterministic=False, dropout_rng=jax.random.key(0))
  apply, params = _linen(flax_attention_fn)
  with pytest.raises(NotImplementedError, match="sow_weights must be False"):
    apply(params, x, sow_weights=True)
  with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum must be None"):
    _linen(flax_attention_fn, qk_attn_weights_einsum_cls=lambda: jnp.einsum)[0](params, x)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_masks_of_numbers_are_those_of_flax(dtype):
  """`nn.make_causal_mask` makes float32 ones and zeros."""
  x = np.random.default_rng(0).standard_normal((2, 8, 4, 8)).astype(np.float32)
  mask = nn.make_causal_mask(np.ones((2, 8)), dtype=dtype)
  out = flax_attention_fn(x, x, x, mask=mask)
  np.testing.assert_allclose(out, flax_attention_fn(x, x, x, is_causal=True), atol=1e-6)


class _Sowing(nn.Module):
  """A module around Flax's that keeps max_logits for the optimizer."""

  @nn.compact
  def __call__(self, x, mask):
    attend = functools.partial(
      flax_attention_fn, on_max_logits=lambda m: self.sow("intermediates", "max_logits", m)
    )
    return nn.MultiHeadDotProductAttention(HEADS, attention_fn=attend, name="attention")(
      x, mask=mask
    )


class _Layers(nn.Module):
  @nn.compact
  def __call__(self, x, mask):
    def body(layer, x):
      return layer(x, mask), None

    scanned = nn.scan(
      body, variable_axes={"params": 0, "intermediates": 0}, split_rngs={"params": True}, length=2
    )
    return scanned(_Sowing(name="layers"), x)[0]


def test_max_logits_of_linen_are_sown_under_scan_and_grad():
  x, mask = _inputs(), _slices(is_causal=True, is_padded=True)
  params = _Layers().init(jax.random.key(1), x, mask)["params"]

  @jax.jit
  def run(params, x):
    def loss(params):
      out, state = _Layers().apply({"params": params}, x, mask, mutable=["intermediates"])
      return out.sum(), state["intermediates"]["layers"]["max_logits"][0]

    return jax.value_and_grad(loss, has_aux=True)(params)

  (_, max_logits), grads = run(params, x)
  assert max_logits.shape == (2, BATCH, HEADS)
  attention = jax.tree.map(lambda x: np.asarray(x[0]), params["layers"]["attention"])
  x = np.asarray(x)
  q, k = (
    np.einsum("bte,ehd->bthd", x, attention[name]["kernel"]) + attention[name]["bias"]
    for name in ("query", "key")
  )
  logits = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
  is_seen = _dense(is_causal=True, is_padded=True) & TOKENS[:, None, :, None]
  expected = np.where(is_seen, logits, -np.inf).max((2, 3))
  np.testing.assert_allclose(max_logits[0], expected, rtol=1e-5)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_max_logits_of_nnx_with_several_batch_axes():
  seen = []
  attend = functools.partial(flax_attention_fn, on_max_logits=seen.append)
  apply, params = _nnx(attend)
  x = _inputs((2, 3, LENGTH, FEATURES))
  out = apply(params, x, is_causal=True)
  plain, _ = _nnx(flax_attention_fn)
  np.testing.assert_array_equal(out, plain(params, x, is_causal=True))
  assert [m.shape for m in seen] == [(2, 3, HEADS)]
  with pytest.raises(ValueError, match="on_max_logits and return_meta cannot be combined"):
    flax_attention_fn(x, x, x, on_max_logits=seen.append, return_meta=True)


def test_decode_mode_of_linen():
  x = np.random.default_rng(0).standard_normal((2, 4, 16)).astype(np.float32)
  outs = []
  for attention_fn in (flax_attention_fn, nn.dot_product_attention):
    module = nn.MultiHeadDotProductAttention(2, decode=True, attention_fn=attention_fn)
    variables = module.init(jax.random.key(0), x)
    params, cache = variables["params"], variables["cache"]
    for i in range(x.shape[1]):
      out, new = module.apply(
        {"params": params, "cache": cache}, x[:, i : i + 1], mutable=["cache"]
      )
      cache = new["cache"]
    outs.append(out)
  np.testing.assert_allclose(*outs, atol=1e-5)


def test_everything_of_a_batch_with_several_axes():
  rng = np.random.default_rng(0)
  q = rng.standard_normal((2, 3, 8, 4, 8)).astype(np.float32)
  ids = np.sort(rng.integers(1, 3, (2, 3, 8)), axis=-1).astype(np.int32)
  masks = [[AttentionMask.sliding_window(8, left=i + 3 * j) for i in range(3)] for j in range(2)]
  slices = np.stack([[mask.slices for mask in row] for row in masks])
  stacked = AttentionMask.tree_unflatten((8, 8), (slices,))
  options = {"segment_ids": ids, "max_segments": 2, "key_value_seq_lengths": np.full((2, 3), 6)}
  for mask in (masks, stacked):
    out, lse = flax_attention_fn(q, q, q, mask=mask, return_residual=True, **options)
    for i, j in np.ndindex(2, 3):
      own = {**options, "segment_ids": ids[i, j], "key_value_seq_lengths": np.array([6])}
      expected = jax_magi.dot_product_attention(
        *(q[i, j],) * 3, mask=masks[i][j], return_residual=True, **own
      )
      np.testing.assert_allclose(out[i, j], expected[0], atol=1e-6)
      np.testing.assert_allclose(lse[i, j], expected[1], atol=1e-6)
