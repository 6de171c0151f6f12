"""Named cases: masks and the shapes of calls around them, for the tests of every implementation."""

import dataclasses
import zlib

import numpy as np

from jax_magi import AttentionMask, MaskType
from tests.accuracy import DTYPES, Inputs, make_inputs

FULL, CAUSAL, INV_CAUSAL, BI_CAUSAL = map(MaskType, range(4))


@dataclasses.dataclass(frozen=True)
class Case:
  """A mask and the shape of the call around it."""

  name: str
  mask: AttentionMask
  num_q_heads: int = 2
  num_kv_heads: int = 2
  head_dim: int = 64
  value_dim: int = 64
  num_sinks: int | None = None
  softcap: float = 0.0
  softmax_scale: float | None = None
  logit_scale: float = 1.0

  @property
  def shape(self):
    heads = (self.num_q_heads, self.num_kv_heads)
    return (self.mask.q_len, self.mask.k_len, *heads, self.head_dim, self.value_dim)

  @property
  def options(self):
    return {"softcap": self.softcap, "softmax_scale": self.softmax_scale}

  def make_inputs(self, dtype: str, **terms) -> Inputs:
    """Random operands, the same each time. `terms` are those of `accuracy.make_inputs`."""
    rng = np.random.default_rng(zlib.crc32(self.name.encode()))
    return make_inputs(
      rng,
      DTYPES[dtype],
      *self.shape,
      num_sinks=self.num_sinks,
      logit_scale=self.logit_scale,
      **terms,
    )


def _ranges(*slices, q_len=None, k_len=None):
  """A mask from (q_begin, q_end, k_begin, k_end, type) tuples."""
  table = np.array(slices, np.int32)
  return AttentionMask.from_ranges(
    table[:, :2], table[:, 2:4], table[:, 4], q_len=q_len, k_len=k_len
  )


def _documents(lengths, causal):
  return AttentionMask.from_cu_seqlens(np.cumsum([0, *lengths]), causal=causal)


def _types():
  """All four types with more, as many and fewer queries than keys."""
  for mask_type in (FULL, CAUSAL, INV_CAUSAL, BI_CAUSAL):
    for name, sq, sk in (("sq>sk", 150, 70), ("sq=sk", 130, 130), ("sq<sk", 70, 150)):
      mask = _ranges((3, 3 + sq, 5, 5 + sk, mask_type), q_len=sq + 10, k_len=sk + 10)
      yield Case(f"{mask_type.name.lower()}-{name}", mask)


_PACKED = _documents([1, 63, 64, 65, 2, 130, 7], causal=True)
_UNCOVERED = _ranges((10, 60, 0, 50, FULL), (90, 120, 40, 100, CAUSAL), q_len=150, k_len=110)
_MANY = _documents([1 + i % 5 for i in range(300)], causal=True)
_SCATTERED = _ranges(
  (0, 100, 0, 20, FULL),
  (0, 100, 33, 34, FULL),
  (0, 100, 60, 130, CAUSAL),
  (100, 101, 7, 9, FULL),
  q_len=110,
  k_len=140,
)

CASES = [
  *_types(),
  Case("length_1", AttentionMask.full(1)),
  Case("one_query_many_keys", AttentionMask.causal(1, 200)),
  Case("many_queries_one_key", AttentionMask.full(200, 1)),
  Case("square_bi_causal", _ranges((0, 64, 0, 64, BI_CAUSAL))),
  Case("causal-one_past_tile", AttentionMask.causal(129)),
  Case("full-one_before_tile", AttentionMask.full(127)),
  Case("full-191x193", AttentionMask.full(191, 193)),
  Case("full-193x191", AttentionMask.full(193, 191)),
  Case("causal-gqa4-one_past_tile", AttentionMask.causal(65), num_q_heads=8),
  Case("causal-gqa3-long_keys", AttentionMask.causal(100, 300), num_q_heads=3, num_kv_heads=1),
  Case("one_token_ranges", _ranges(*((i, i + 1, 3 * i, 3 * i + 1, FULL) for i in range(20)))),
  Case(
    "empty_ranges",
    _ranges((5, 5, 0, 40, FULL), (0, 40, 7, 7, CAUSAL), (0, 0, 0, 0, FULL), (8, 40, 0, 40, FULL)),
  ),
  Case("no_slices", AttentionMask(np.zeros((0, 6), np.int32), 20, 30)),
  Case("band_excludes_all", AttentionMask(np.array([[0, 20, 0, 20, 5, 4]]), 20, 20)),
  Case("uncovered_rows", _UNCOVERED),
  Case("uncovered_rows-sink", _UNCOVERED, num_sinks=0),
  Case("uncovered_rows-three_sinks-gqa2", _UNCOVERED, num_q_heads=4, num_sinks=3),
  Case("several_k_ranges", _SCATTERED),
  Case("several_k_ranges-gqa2-sink", _SCATTERED, num_q_heads=4, num_sinks=1),
  Case("packed_documents", _PACKED),
  Case("packed_documents-full-gqa2", _documents([40, 1, 99, 3, 64], False), num_q_heads=4),
  Case("hundreds_of_slices", _MANY),
  Case("sliding_window", AttentionMask.sliding_window(200, left=17, right=0)),
  Case("sliding_window-two_sided", AttentionMask.sliding_window(150, 180, left=40, right=9)),
  Case("prefix_lm", AttentionMask.prefix_lm(37, 150)),
  Case("block_causal", AttentionMask.block_causal(48, 170)),
  Case("shared_question", AttentionMask.shared_question(50, [30, 1, 70])),
  Case("one_head-odd_lengths", AttentionMask.causal(129, 131), num_q_heads=1, num_kv_heads=1),
  Case("many_heads", AttentionMask.causal(40), num_q_heads=136, num_kv_heads=136, head_dim=16),
  Case("softcap", _PACKED, softcap=3.0),
  Case("softcap-sink", AttentionMask.causal(90), softcap=20.0, num_sinks=0, logit_scale=8.0),
  Case("negative_scale", AttentionMask.causal(90), softmax_scale=-0.2),
  Case("head_dim_1", AttentionMask.causal(70), head_dim=1, value_dim=1),
  Case("head_dim_33-value_dim_65", AttentionMask.causal(70), head_dim=33, value_dim=65),
  Case("head_dim_128", AttentionMask.causal(140), head_dim=128, value_dim=128),
  Case("head_dim_192-value_dim_128", AttentionMask.causal(70), head_dim=192, value_dim=128),
  Case("head_dim_256", AttentionMask.full(70, 90), head_dim=256, value_dim=256),
]


def random_documents(total, seed, median=3000, largest=0.25):
  """Cumulative lengths: log-normal, at most a share of the total."""
  rng = np.random.default_rng(seed)
  ends = [0]
  while ends[-1] < total:
    length = int(np.clip(rng.lognormal(np.log(median), 1.3), 64, largest * total))
    ends.append(min(ends[-1] + length, total))
  return ends
