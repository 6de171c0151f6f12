"""Named cases of the fused softmax, and the accuracy rule applied to them."""

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_magi
from tests import dense
from tests.accuracy import DTYPES, check_close, jit_once


@dataclasses.dataclass(frozen=True)
class SoftmaxCase:
  """A shape, and the operations on it."""

  name: str
  shape: tuple[int, ...]
  scale: float = 1.0
  mask: tuple[int, ...] | None = None  # Shape of a boolean mask.
  bias: tuple[int, ...] | None = None  # Shape of an additive one.
  bias_dtype: str | None = None  # None is x's.
  is_causal: bool = False
  window: Any = None
  has_offset: bool = False
  logit_scale: float = 3.0

  @property
  def options(self):
    return {"scale": self.scale, "is_causal": self.is_causal, "window": self.window}

  def in_band(self):
    """bool `[q_len, k_len]`: the pairs that is_causal and window make visible."""
    q_len, k_len = self.shape[-2:]
    # Bottom right: the last row's own column is the last.
    distance = np.arange(k_len)[None] - (np.arange(q_len)[:, None] + k_len - q_len)
    left, right = (
      (self.window, self.window) if isinstance(self.window, int) else self.window or (None, None)
    )
    visible = np.ones((q_len, k_len), bool)
    if left is not None:
      visible &= distance >= -left
    if right is not None:
      visible &= distance <= right
    return visible & (distance <= 0) if self.is_causal else visible

  def make_inputs(self, dtype: str, draw: int = 0) -> tuple[dict[str, Any], np.ndarray]:
    """Operands by name, and a cotangent; the same each time."""
    rng = np.random.default_rng([zlib.crc32(self.name.encode()), draw])

    def normal(shape, dtype, factor=1.0):
      return (factor * rng.standard_normal(shape)).astype(DTYPES[dtype])

    operands: dict[str, Any] = {"x": normal(self.shape, dtype, self.logit_scale)}
    if self.mask is not None:
      operands["mask"] = rng.random(self.mask) < 0.7
    if self.bias is not None:
      operands["bias"] = normal(self.bias, self.bias_dtype or dtype)
    if self.has_offset:
      operands["offset"] = normal(self.shape[-3] if len(self.shape) > 2 else 1, "f32")
    return operands, normal(self.shape, dtype)


def row_cases(*lengths: int) -> list[SoftmaxCase]:
  """Rows of these lengths, with every option."""
  cases = []
  for k_len in lengths:
    q_len = 3 if k_len < 5000 else 2
    shape, name = (1, 2, q_len, k_len), f"{k_len}_columns"
    cases += [
      SoftmaxCase(f"scaled-{name}", shape, scale=0.3),
      SoftmaxCase(f"mask-offset-{name}", shape, mask=(q_len, k_len), has_offset=True),
      SoftmaxCase(f"bias-causal-{name}", shape, bias=(1, k_len), is_causal=True),
      SoftmaxCase(f"window-{name}", shape, window=(k_len // 3, k_len // 5)),
    ]
  return cases


ROWS = row_cases(1, 2, 15, 16, 17, 4095, 4096, 4097, 16385, 100003)


def _broadcasts():
  shape = (3, 4, 5, 24)
  for i in range(16):
    operand = tuple(1 if i >> axis & 1 else size for axis, size in enumerate(shape))
    kind = ("mask", "bias")[i.bit_count() % 2]
    yield SoftmaxCase(f"{kind}_{'x'.join(map(str, operand))}", shape, **{kind: operand})


BROADCASTS = list(_broadcasts())

CASES = [
  SoftmaxCase("mask_of_fewer_dimensions", (2, 3, 4, 40), mask=(40,)),
  SoftmaxCase("mask_without_dimensions", (2, 3, 4, 40), mask=()),
  SoftmaxCase("matrix", (33, 65), is_causal=True, has_offset=True),
  SoftmaxCase("three_dimensions", (5, 7, 9), mask=(7, 9), has_offset=True),
  SoftmaxCase("five_dimensions", (2, 3, 2, 4, 20), mask=(2, 1, 1, 4, 20), has_offset=True),
  SoftmaxCase("six_dimensions", (2, 1, 3, 2, 4, 20), mask=(3, 1, 4, 1), is_causal=True),
  SoftmaxCase("causal-q>k", (1, 2, 40, 25), is_causal=True),
  SoftmaxCase("causal-q<k", (1, 2, 25, 40), is_causal=True),
  SoftmaxCase("causal-square", (1, 3, 130, 130), is_causal=True, scale=0.125),
  SoftmaxCase("causal-offset-q>k", (2, 3, 40, 25), is_causal=True, has_offset=True),
  SoftmaxCase("causal-window", (1, 2, 60, 70), is_causal=True, window=(9, 3)),
  SoftmaxCase("window-one_number", (1, 2, 60, 60), window=7),
  SoftmaxCase("window-open_left", (1, 2, 30, 50), window=(None, 4)),
  SoftmaxCase("window-open_right", (1, 2, 50, 30), window=(4, None)),
  SoftmaxCase("window-own_column_only", (1, 2, 20, 20), window=0),
  SoftmaxCase("everything", (2, 3, 31, 45), 0.7, (2, 1, 31, 45), None, None, True, (20, 0), True),
  SoftmaxCase("bias-causal-offset", (2, 3, 31, 45), 0.7, None, (3, 1, 45), None, True, None, True),
  SoftmaxCase("float32_bias", (2, 3, 7, 45), bias=(3, 7, 45), bias_dtype="f32"),
  SoftmaxCase("bfloat16_bias", (2, 3, 7, 48), bias=(1, 1, 48), bias_dtype="bf16"),
  SoftmaxCase("negative_scale", (2, 3, 7, 45), scale=-0.4, mask=(7, 45)),
  SoftmaxCase("zero_scale", (2, 3, 7, 45), scale=0.0, mask=(7, 45)),
  SoftmaxCase("many_heads", (2, 137, 3, 16), has_offset=True),
  SoftmaxCase("many_rows", (3, 5, 333, 10), is_causal=True),
  SoftmaxCase("large_logits", (1, 2, 9, 200), logit_scale=1e4, scale=0.9),
]


@jit_once
def _ours(operands, dy, options):
  def fun(x, mask=None, bias=None, offset=None):
    mask = bias if mask is None else mask
    return jax_magi.fused_scale_mask_softmax(x, mask, offset=offset, **options)

  mask = {k: v for k, v in operands.items() if v.dtype == bool}
  floats = {k: v for k, v in operands.items() if v.dtype != bool}
  y, vjp = jax.vjp(lambda floats: fun(**floats, **mask), floats)
  return {"y": y, **{f"d{name}": g for name, g in vjp(dy)[0].items()}}


class Options(dict):
  """Static arguments of a jitted function."""

  def __hash__(self):
    return hash(tuple(sorted(self.items(), key=str)))


def check_softmax(
  case: SoftmaxCase,
  dtype: str,
  implementation: str | None,
  num_draws: int = 1,
  first_draw: int = 0,
  **more,
) -> None:
  """Runs ours, forward and backward, and holds every result to the rule.

  Where a gradient is one number, the plain computation may be right by chance: `num_draws` inputs
  are then judged together.
  """
  draws = [
    _run(case, dtype, Options(case.options, implementation=implementation, **more), i)
    for i in range(first_draw, first_draw + num_draws)
  ]
  ours, truth, plain = (
    jax.tree.map(lambda *a: np.stack(a), *trees) for trees in zip(*draws, strict=True)
  )
  x_dtype = DTYPES[dtype]
  assert ours["y"].dtype == x_dtype
  for name, value in ours.items():
    coarser = max(value.dtype, np.dtype(x_dtype), key=lambda d: jnp.finfo(d).eps)
    check_close(name, value, truth[name], plain[name], coarser)
  hidden = np.broadcast_to(~case.in_band(), (num_draws, *case.shape))
  for name in ("y", "dx"):
    assert (ours[name][hidden] == 0).all(), name


def _run(case: SoftmaxCase, dtype: str, options: Options, draw: int) -> tuple[dict, dict, dict]:
  """Results of ours, the truth, and those of the plain computation in the dtype."""
  operands, dy = case.make_inputs(dtype, draw)
  ours = _ours(operands, dy, options)
  mask = operands.pop("mask", None)
  mask = case.in_band() if mask is None else case.in_band() & mask
  expected = functools.partial(dense.softmax, dy=dy, scale=case.scale, mask=mask, **operands)
  truth = expected(dtype=np.float64)
  # float32 is not compared with the plain computation.
  return ours, truth, truth if dtype == "f32" else expected(dtype=DTYPES[dtype])
