"""The fused softmax on a GPU: the cases of the CPU tests, and cases that need a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_magi import fused_scale_mask_softmax
from tests.softmax_cases import BROADCASTS, CASES, ROWS, SoftmaxCase, check_softmax, row_cases

pytestmark = pytest.mark.gpu

# Lengths near those at which more threads share a row.
_MORE_ROWS = row_cases(
  *(9, 64, 65, 256, 257, 512, 1024, 1025, 2048, 2049, 8192, 8193, 16384, 32769, 131072, 300001)
)
_cuda = functools.partial(fused_scale_mask_softmax, implementation="cuda")


def _normal(*shape, dtype=jnp.bfloat16, seed=0):
  return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("case", ROWS + _MORE_ROWS, ids=lambda case: case.name)
def test_row(case, dtype):
  check_softmax(case, dtype, "cuda", num_draws=8 if case.shape[-1] < 100 else 1)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("case", BROADCASTS + CASES, ids=lambda case: case.name)
def test_case(case, dtype):
  check_softmax(case, dtype, "cuda")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("k_len", [17, 128, 1000, 4097])
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_many_blocks_of_threads(k_len, dtype, kind):
  shape = (3, 5, 67, k_len)
  options = {kind: (3, 1, 67, k_len), "is_causal": True, "has_offset": True}
  check_softmax(SoftmaxCase(f"large-{kind}-{k_len}", shape, **options), dtype, "cuda")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("kind", ["mask", "bias"])
@pytest.mark.parametrize(
  ("shape", "shared"),
  [
    ((3, 5, 72, 1000), (3, 1, 72, 1000)),
    ((3, 5, 72, 1000), (1, 1, 72, 1000)),
    ((3, 5, 72, 1000), (1, 5, 72, 1000)),
    ((3, 5, 72, 1000), (3, 1, 1, 1000)),
    ((1, 3, 512, 33000), (1, 1, 512, 33000)),
  ],
)
def test_matrices_share_chunks_of_a_mask(shape, shared, kind, dtype):
  """Of eight rows, as 72 has no larger power of two; of the last one, as many as L2 keeps."""
  case = SoftmaxCase(f"shared-{shape}-{shared}", shape, **{kind: shared})
  check_softmax(case, dtype, "cuda")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("k_len", [512, 1000, 1111, 4096])
@pytest.mark.parametrize("width", [1, 63, 128, 505])
def test_windows_begin_anywhere_in_a_line_of_memory(width, k_len, dtype):
  case = SoftmaxCase(f"window-{width}-{k_len}", (1, 2, 170, k_len), window=(width - 1, 0))
  check_softmax(case, dtype, "cuda")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("k_len", [1000, 1999, 2048])
@pytest.mark.parametrize("q_len", [1, 3, 2051])
def test_rows_that_do_not_fill_their_block_of_threads(q_len, k_len, dtype):
  # Under a causal mask, some rows are fully masked, and others are not.
  case = SoftmaxCase(f"rows-{q_len}-{k_len}", (1, 1, q_len, k_len), is_causal=q_len > k_len)
  check_softmax(case, dtype, "cuda")


@pytest.mark.parametrize("k_len", [7, 100, 2048, 5001, 50001])
def test_donation_works_in_place(k_len):
  x = _normal(7, 33, k_len)

  @functools.partial(jax.jit, static_argnums=1)
  def fun(x, donate):
    y = _cuda(x + 1, is_causal=True, donate=donate)
    return y, jax.vjp(lambda x: _cuda(x, donate=donate), 5 * y)[1](jnp.cos(y))

  jax.tree.map(np.testing.assert_array_equal, fun(x, True), fun(x, False))


def test_hidden_columns_are_not_read():
  causal = np.tril(np.ones((300, 1000), bool), 700)
  x, dy = _normal(2, 300, 1000), _normal(2, 300, 1000, seed=1)
  y, vjp = jax.vjp(lambda x: _cuda(x, is_causal=True), x)
  poisoned, poisoned_vjp = jax.vjp(
    lambda x: _cuda(x, is_causal=True), jnp.where(causal, x, jnp.nan)
  )
  np.testing.assert_array_equal(poisoned, y)
  np.testing.assert_array_equal(poisoned_vjp(jnp.where(causal, dy, jnp.nan))[0], vjp(dy)[0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("k_len", [21, 3000, 50001])
def test_special_scores_are_as_in_jax(value, k_len):
  x = _normal(4, k_len, dtype=jnp.float32).at[1, 7].set(value).at[2].set(-np.inf)
  expected = jax.nn.softmax(x, axis=-1).at[2].set(0.0)
  np.testing.assert_allclose(_cuda(x), expected, rtol=1e-4, atol=1e-9)


def test_runs_are_equal_bit_for_bit():
  x, dy = _normal(4, 8, 500, 777), _normal(4, 8, 500, 777, seed=1)
  offset = _normal(8, dtype=jnp.float32)

  @jax.jit
  def fun(x, offset, dy):
    y, vjp = jax.vjp(lambda x, offset: _cuda(x, is_causal=True, offset=offset), x, offset)
    return y, vjp(dy)

  first = fun(x, offset, dy)
  for _ in range(5):
    jax.tree.map(np.testing.assert_array_equal, fun(x, offset, dy), first)


@pytest.mark.parametrize("k_len", [2048, 2047])
def test_more_elements_than_32_bits_count(k_len):
  x = _normal(34, 16, 2048, k_len)
  assert x.size > 2**31
  mask = _normal(1, 1, 2048, k_len) > 0
  y = jax.jit(_cuda)(x, mask)
  dx = jax.jit(lambda x, mask: jax.vjp(lambda x: _cuda(x, mask), x)[1](x)[0])(x, mask)
  for i in (0, 17, 33):
    part = x[i : i + 1]
    np.testing.assert_array_equal(y[i : i + 1], _cuda(part, mask))
    expected = jax.vjp(lambda x: _cuda(x, mask), part)[1](part)[0]
    np.testing.assert_array_equal(dx[i : i + 1], expected)


def test_runs_inside_a_command_buffer():
  x, offset = _normal(2, 4, 100, 100), _normal(4, dtype=jnp.float32)

  def fun(x):
    for _ in range(3):
      x = 5 * _cuda(x, x[:1] > 0, is_causal=True, offset=offset)
    return x

  options = {
    "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
    "xla_gpu_graph_min_graph_size": 1,
  }
  captured = jax.jit(fun, compiler_options=options)
  for _ in range(5):  # The first calls are made before the capture.
    got = captured(x)
  np.testing.assert_array_equal(got, fun(x))
