"""Plans for latents: a row is priced by its bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_magi import AttentionMask, Links, magi_attn_flex_key


def _rows(*shapes, dtype=jnp.bfloat16):
  return [jax.ShapeDtypeStruct((1, *shape), dtype) for shape in shapes]


# Of a token: 512 and 64 numbers, or 64 heads with 192 and 128 dims.
LATENTS, EXPANDED = _rows((512,), (64,)), _rows((64, 192), (64, 128))
MODEL = Links().for_heads(64, 192, 128)


@pytest.mark.parametrize("cp_size", [8, 16])
def test_plans_for_latents_move_more_rows_and_balance_better(cp_size):
  rng = np.random.default_rng(0)
  total = 8192 * cp_size
  lengths = np.clip(rng.lognormal(np.log(3000), 1.3, 8 * cp_size), 64, total // 4).astype(int)
  ends = np.minimum(np.cumsum([0, *lengths]), total)
  mask = AttentionMask.from_cu_seqlens(np.unique([*ends, total]).tolist(), causal=True)

  def plan(rows):
    links = MODEL.for_rows(rows)
    key = magi_attn_flex_key(mask, cp_size=cp_size, ranks_per_node=8, overlap_degree=1, links=links)
    return key.stats(), key.predict(links)

  (latents, seconds), (expanded, expanded_seconds) = plan(LATENTS), plan(EXPANDED)
  assert latents.balance < expanded.balance
  assert latents.share > expanded.share
  assert seconds.total < expanded_seconds.total


def test_bytes_of_rows():
  links = Links().for_rows({"k": LATENTS, "position": _rows((), dtype=np.int32)[0]})
  assert links.row_bytes == 576 * 2 + 4
  assert links.grad_row_bytes == 576 * 4
  assert Links().for_rows(LATENTS, remote_grad_dtype=jnp.bfloat16).grad_row_bytes == 576 * 2
  # The defaults are of 8 kv heads and 48 query heads of 128.
  assert Links().for_rows(_rows((8, 128), (8, 128))).for_heads(48, 128) == Links()


def test_bad_rows_and_heads_are_named():
  with pytest.raises(ValueError, match="rows must be arrays with an axis of rows"):
    Links().for_rows([])
  with pytest.raises(ValueError, match="rows must be arrays with an axis of rows"):
    Links().for_rows(576)
  with pytest.raises(ValueError, match="head_dim must be positive"):
    Links().for_heads(8, 0)
