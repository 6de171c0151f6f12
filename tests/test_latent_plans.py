"""Plans for latents: a row is priced by its bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_magi import AttentionMask, Links, magi_attn_flex_key


def _rows(*shapes, dtype=jnp.bfloat16):
  return [jax.ShapeDtypeStruct((1, *shape), dtype) for shape in shapes]


# The rows of a token: 512 and 64 numbers, or 64 heads with 192 and 128 dims.
LATENTS, EXPANDED = _rows((512,), (64,)), _rows((64, 192), (64, 128))
MODEL = Links().for_heads(64, 192, 128)


def _expand(rows):
  """MLA with parameters of zeros."""
  both = jnp.einsum("tr,rhd->thd", rows[0], jnp.zeros((512, 64, 256), jnp.bfloat16))
  rope = jnp.broadcast_to(rows[1][:, None], (*both.shape[:2], 64))
  return jnp.concatenate([both[..., :128], rope], axis=-1), both[..., 128:]


def _documents(cp_size):
  rng = np.random.default_rng(0)
  total = 8192 * cp_size
  lengths = np.clip(rng.lognormal(np.log(3000), 1.3, 8 * cp_size), 64, total // 4).astype(int)
  ends = np.minimum(np.cumsum([0, *lengths]), total)
  return AttentionMask.from_cu_seqlens(np.unique([*ends, total]).tolist(), causal=True)


@pytest.mark.parametrize("cp_size", [8, 16])
def test_plans_for_latents_move_more_rows_and_balance_better(cp_size):
  mask = _documents(cp_size)

  def plan(rows):
    links = MODEL.for_rows(rows)
    key = magi_attn_flex_key(mask, cp_size=cp_size, ranks_per_node=8, overlap_degree=1, links=links)
    return key.stats(), key.predict(links)

  (latents, seconds), (expanded, expanded_seconds) = plan(LATENTS), plan(EXPANDED)
  assert latents.balance < expanded.balance
  assert latents.share > expanded.share
  assert seconds.total < expanded_seconds.total


@pytest.mark.parametrize("cp_size", [8, 16])
def test_plans_that_price_expansion_expand_fewer_rows(cp_size):
  """By a prediction that knows the cost of expansion, they also finish earlier."""
  free = MODEL.for_rows(LATENTS)
  links = free.for_expand(_expand, LATENTS)
  keys = [
    magi_attn_flex_key(
      _documents(cp_size), cp_size=cp_size, ranks_per_node=8, overlap_degree="auto", links=links
    )
    for links in (free, links)
  ]
  unpriced, priced = (key.stats().rows_needed for key in keys)
  assert priced.max() < unpriced.max()
  unpriced, priced = (key.predict(links).total for key in keys)
  assert priced < unpriced


def test_expansion_is_a_part_of_kernels():
  """What is predicted of a plan grows by its rows, its own and those of each stage."""
  mask = _documents(8)
  links = MODEL.for_rows(LATENTS)
  priced = dataclasses.replace(links, expand_seconds=(1e-8, 3e-8))
  for degree in (0, 1, 2):
    key = magi_attn_flex_key(mask, cp_size=8, overlap_degree=degree, links=links)
    num_rows = sum(key.capacities.rows) + (8192 if degree else 0)
    more = key.predict(priced).kernels - key.predict(links).kernels
    np.testing.assert_allclose(more, num_rows * 4e-8, rtol=1e-9)


def test_expansion_is_priced_by_products_and_bytes():
  """The same on any platform, and however `expand` is written."""
  w = jnp.zeros((3, 512, 512), jnp.bfloat16)
  rows = _rows((512,))[0]

  def price(expand):
    return np.array(Links().for_expand(expand, rows).expand_seconds)

  def plain(x):
    y = x @ w[0] @ w[1] @ w[2]
    return y, y

  def scanned(x):
    y = jax.lax.scan(lambda x, w: (jax.checkpoint(jax.jit(jnp.matmul))(x, w), None), x, w)[0]
    return y, y

  def with_norm_of_parameters(x):
    return plain(x * (w[0] @ w[1]).sum())

  none, one = price(lambda x: (x, x)), price(lambda x: (x @ w[0], x))
  np.testing.assert_allclose(price(plain) - none, 3 * (one - none))
  np.testing.assert_allclose(price(scanned), price(plain))
  np.testing.assert_allclose(price(with_norm_of_parameters), price(plain))
  forward, backward = one - none
  np.testing.assert_allclose(backward, 3 * forward)
  np.testing.assert_allclose(price(lambda x: (jnp.tile(x, 2),) * 2), 2 * none)


def test_bytes_of_rows():
  links = Links().for_rows({"k": LATENTS, "position": _rows((), dtype=np.int32)[0]})
  assert links.row_bytes == 576 * 2 + 4
  assert links.grad_row_bytes == 576 * 4
  assert Links().for_rows(LATENTS, remote_grad_dtype=jnp.bfloat16).grad_row_bytes == 576 * 2
  # The defaults are of 8 kv heads and 48 query heads of 128.
  assert Links().for_rows(_rows((8, 128), (8, 128))).for_heads(48, 128) == Links()


def test_bad_rows_and_heads_are_named():
  with pytest.raises(ValueError, match="rows must be arrays with at least one axis"):
    Links().for_rows([])
  with pytest.raises(ValueError, match="rows must be arrays with at least one axis"):
    Links().for_rows(576)
  with pytest.raises(ValueError, match="head_dim must be positive"):
    Links().for_heads(8, 0)
  with pytest.raises(ValueError, match="rows must be arrays with at least one axis"):
    Links().for_expand(_expand, [])
  with pytest.raises(ValueError, match="expand must be a function of rows"):
    Links().for_expand(None, LATENTS)
  with pytest.raises(ValueError, match=r"expand_seconds must be \(forward, backward\)"):
    Links(expand_seconds=1e-8)
  with pytest.raises(ValueError, match="expand_seconds must not be negative"):
    Links(expand_seconds=(1e-8, -1e-8))
