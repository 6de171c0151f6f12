"""Heavy key tiles whose query heads several CTAs share, on a GPU.

The backward kernel cuts them where the mask is traced, and gradients of keys and values are
float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_magi import AttentionMask
from jax_magi._src.attention import ops
from jax_magi._src.attention.dq_sum import empty_dq_sum, finished_dq
from jax_magi._src.native.attention import list_tiles
from tests.accuracy import DTYPES, make_inputs
from tests.arrays import assert_same_bits, normals
from tests.needs import HEADER_WORDS, WEIGHTS, hopper_needs
from tests.stages import check_stages, mask_of_weights

pytestmark = pytest.mark.gpu

# The number of queries of a block, by head dim, without and with a cap.
_COLUMNS = {64: 128, 128: 80, 256: 64}
_CAPPED_COLUMNS = {64: 64, 128: 48, 256: 64}
_THRESHOLDS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


def _inputs(mask, heads, head_dim, dtype="bf16"):
  shape = (mask.q_len, mask.k_len, *heads, head_dim, head_dim)
  return make_inputs(np.random.default_rng(0), DTYPES[dtype], *shape, 0)


@pytest.mark.parametrize("sm_margin", [0, 100, 131])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_of_all_weights(head_dim, group, sm_margin):
  """One call. With the last margin, one CTA processes all parts in turn."""
  mask = mask_of_weights(_COLUMNS[head_dim])
  inputs = _inputs(mask, (2 * group, 2), head_dim)
  check_stages(inputs, mask, ((0, mask.k_len),), "cuda", sm_margin=sm_margin)


@pytest.mark.parametrize("num_kv_heads", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_stages(num_kv_heads, dtype):
  mask = mask_of_weights(80)
  inputs = _inputs(mask, (6 * num_kv_heads, num_kv_heads), 128, dtype)
  check_stages(inputs, mask, ((300, mask.k_len), (0, 100), (100, 300)), "cuda")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_softcap(head_dim):
  mask = mask_of_weights(_CAPPED_COLUMNS[head_dim])
  inputs = _inputs(mask, (6, 1), head_dim)
  check_stages(inputs, mask, ((0, mask.k_len),), "cuda", softcap=2.0)


@pytest.mark.parametrize("dims", [(40, 24), (33, 65), (192, 128)], ids=str)
def test_dims_of_no_kernel(dims):
  mask = mask_of_weights(128)
  shape = (mask.q_len, mask.k_len, 6, 2, *dims)
  inputs = make_inputs(np.random.default_rng(0), DTYPES["bf16"], *shape, 0)
  check_stages(inputs, mask, ((0, mask.k_len),), "cuda")


@pytest.mark.parametrize(
  "mask",
  [
    AttentionMask.full(1500, 520),
    AttentionMask.causal(1700),
    AttentionMask.sliding_window(2000, left=700),
    AttentionMask.from_cu_seqlens([0, 131, 1400, 1900], causal=True),
    AttentionMask.from_cu_seqlens(range(0, 1001, 100)),  # No tile is cut.
    AttentionMask.full(1300, 400).crop(0, 1300, 500, 900),  # No pair is visible.
    # Many slices touch a tile, so heads are processed one after another.
    AttentionMask.from_ranges([[i, i + 30] for i in range(0, 1500, 40)], [[0, 200]] * 38),
  ],
  ids=["full", "causal", "window", "documents", "light", "nothing", "many_slices"],
)
def test_mask(mask):
  check_stages(_inputs(mask, (12, 2), 128), mask, ((0, mask.k_len),), "cuda")


def _operands(mask, heads, head_dim, batch=1):
  """q, k, v, dout, lse and delta. Those of a real forward pass are not needed for zeros."""
  num_q_heads, num_kv_heads = heads
  q_shape = (batch, mask.q_len, num_q_heads, head_dim)
  k_shape = (batch, mask.k_len, num_kv_heads, head_dim)
  arrays = normals(q_shape, k_shape, k_shape, q_shape, dtype=jnp.bfloat16)
  statistics = normals(q_shape[:3], q_shape[:3])
  statistics[0] += 9.0
  return [jnp.asarray(x) for x in (*arrays, *statistics)]


@pytest.mark.parametrize("group", [1, 2, 6])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_of_keys_that_nobody_sees_are_zero(head_dim, group):
  """Regardless of their previous memory: padding after the keys, and rows of tiles that are cut."""
  mask = mask_of_weights(_COLUMNS[head_dim], padding=700)
  operands = _operands(mask, (2 * group, 2), head_dim)
  config = ops.AttentionConfig(0.1, implementation="cuda")

  # XLA reuses the memory of donated arguments for the results.
  @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
  def run(poison, operands, slices):
    del poison
    dq = empty_dq_sum(operands[0], operands[2])
    _, *gradients = ops.backward(config, *operands, slices, grad_dtype=np.float32, running_dq=dq)
    return gradients

  k_shape = operands[1].shape
  slices = jnp.asarray(mask.slices)[None]
  is_seen = mask.to_dense().any(axis=0)
  assert not is_seen[: mask.k_len - 700].all()
  first = None
  for value in (np.nan, 1e30, 0.0):
    poison = [jnp.full(k_shape, value, np.float32) for _ in range(2)]
    got = [np.asarray(x)[0] for x in run(poison, operands, slices)]
    assert all(x.is_deleted() for x in poison), "the memory of results is not the donated one"
    for x in got:
      assert np.isfinite(x).all()
      assert (x[~is_seen] == 0).all() and (x[is_seen] != 0).any(axis=(1, 2)).all()
    first = first or got
    for x, y in zip(got, first, strict=True):  # Parts are added in any order.
      np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4 * np.abs(y).max())


@functools.partial(jax.jit, static_argnums=0)
def _gradients(implementation, operands, tables):
  """dq, dk and dv in float32."""
  config = ops.AttentionConfig(0.1, implementation=implementation)
  dq = empty_dq_sum(operands[0], operands[2])
  dq, *gradients = ops.backward(config, *operands, tables, grad_dtype=np.float32, running_dq=dq)
  return finished_dq(config, dq, operands[0], operands[2], np.float32), *gradients


def _check_with_plain_path(operands, tables):
  wide = [x.astype(np.float32) for x in operands]
  got, expected = (_gradients("cuda", operands, tables), _gradients("blockwise", wide, tables))
  for x, y in zip(got, expected, strict=True):
    for row in range(len(x)):
      assert np.linalg.norm(x[row] - y[row]) < 1e-2 * np.linalg.norm(y[row])


@pytest.mark.parametrize("is_shared", [False, True], ids=["own_masks", "one_mask"])
@pytest.mark.parametrize("heads", [(8, 1), (12, 2)], ids=str)
def test_batch(heads, is_shared):
  """A list names the batch row of a tile, or serves them all."""
  whole = AttentionMask.causal(1500)
  operands = _operands(whole, heads, 64, batch=3)
  lengths = (1500,) if is_shared else (1500, 7, 801)
  _check_with_plain_path(operands, jnp.stack([AttentionMask.causal(n).slices for n in lengths]))


@pytest.mark.parametrize("group", [2, 3, 5, 6, 8, 16, 48])
def test_parts_of_several_sizes(group):
  """With this much work, heavy tiles are cut into parts of one, two and four heads."""
  mask = mask_of_weights(80, num_turns=3)
  num_kv_heads = 48 // group
  operands = _operands(mask, (num_kv_heads * group, num_kv_heads), 128)
  _check_with_plain_path(operands, jnp.asarray(mask.slices)[None])


def test_deterministic_runs_are_equal_bit_for_bit():
  """Deterministic calls cut no tile."""
  mask = mask_of_weights(80)
  operands = _operands(mask, (12, 2), 128)
  config = ops.AttentionConfig(0.1, deterministic=True, implementation="cuda")
  run = jax.jit(functools.partial(ops.backward, config, grad_dtype=np.float32))
  first = run(*operands, jnp.asarray(mask.slices)[None])
  for _ in range(10):
    assert_same_bits(run(*operands, jnp.asarray(mask.slices)[None]), first)


@pytest.mark.parametrize("num_tiles", [9, 200, 2000])
def test_the_list_counts_tiles_of_each_weight(num_tiles):
  """With few threads and with many, and with so many tiles that a thread has several."""
  rng = np.random.default_rng(num_tiles)
  num_blocks = rng.integers(0, 100, num_tiles)
  ends = 128 * np.arange(1, num_tiles + 1)
  slices = np.array(
    [(0, 80 * n, end - 128, end, -(2**30), 2**30) for n, end in zip(num_blocks, ends, strict=True)],
    np.int32,
  )
  mask = AttentionMask(slices, 80 * 100, int(ends[-1]))
  needs = hopper_needs(mask, is_backward=True, static_slices=None)

  @jax.jit
  def make(slices):
    return list_tiles(slices, [needs], mask.q_len, [(slices.shape[1], mask.k_len)])[0]

  header = np.asarray(make(slices[None])).reshape(-1)[:HEADER_WORDS]
  assert header[0] == num_tiles
  tiles_of_weights = [(num_blocks >= n).sum() for n in _THRESHOLDS]
  np.testing.assert_array_equal(header[WEIGHTS], [num_blocks.sum(), *tiles_of_weights])
