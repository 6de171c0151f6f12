"""Named cases with bias and ALiBi slopes: every mask, and every shape of a bias."""

import dataclasses
import itertools

import numpy as np

from jax_magi import AttentionMask
from tests.accuracy import DTYPES, Inputs, make_inputs
from tests.cases import CASES, Case

# Dimensions of a bias, as letters; 1 is shared.
BIAS_SHAPES = ("hqk", "1qk", "h1k", "11k", "qk", "k", "hq1")


@dataclasses.dataclass(frozen=True)
class BiasCase:
  """A named case with more terms in its logits."""

  case: Case
  bias: str | None = None
  is_bias_f32: bool = False
  has_alibi: bool = False

  @property
  def name(self):
    kind = f"-bias_{self.bias}" if self.bias else ""
    kind += "-f32_bias" if self.is_bias_f32 else ""
    return f"{self.case.name}{kind}{'-alibi' if self.has_alibi else ''}"

  def make_inputs(self, dtype: str) -> Inputs:
    """Random operands, the same each time."""
    bias_dtype = DTYPES["f32" if self.is_bias_f32 else dtype]
    terms = {"bias": self.bias, "bias_dtype": bias_dtype, "has_alibi": self.has_alibi}
    return self.case.make_inputs(dtype, **terms)


_BY_NAME = {case.name: case for case in CASES}
_FEW = (
  "causal-gqa3-long_keys",
  "uncovered_rows-three_sinks-gqa2",
  "sliding_window-two_sided",
  "softcap-sink",
)


def _every_mask():
  """All masks. The shape of the bias, its dtype, and slopes take turns."""
  kinds = zip(CASES, itertools.cycle(BIAS_SHAPES), itertools.cycle([False, True, True]))
  for i, (case, bias, has_alibi) in enumerate(kinds):
    yield BiasCase(case, bias, is_bias_f32=i % 4 == 1, has_alibi=has_alibi)


def _every_shape():
  for name, bias in itertools.product(_FEW, BIAS_SHAPES):
    yield BiasCase(_BY_NAME[name], bias)
  for name in _FEW:
    yield BiasCase(_BY_NAME[name], "1qk", is_bias_f32=True)
    yield BiasCase(_BY_NAME[name], has_alibi=True)


BIAS_CASES = list({case.name: case for case in (*_every_mask(), *_every_shape())}.values())


def many_slices(heads, dims, bias: str | None) -> tuple[Inputs, AttentionMask]:
  """Inputs with slopes, and a mask with 150 slices in a row.

  All keys that count are far from the queries, and dslopes is what is left of large terms: an error
  of delta counts as often as there are keys in between.
  """
  q_len, k_len, num_slices = 200, 1600, 150
  begins = 10 * np.arange(num_slices)
  q_ranges = np.tile([[20, 150]], (num_slices, 1))
  k_ranges = np.stack([begins, begins + 5], axis=1)
  mask = AttentionMask.from_ranges(q_ranges, k_ranges, q_len=q_len, k_len=k_len)
  shape = (q_len, k_len, *heads, *dims)
  rng = np.random.default_rng(0)
  return make_inputs(rng, DTYPES["bf16"], *shape, bias=bias, has_alibi=True), mask
