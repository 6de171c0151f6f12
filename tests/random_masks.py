"""Random masks: every constructor, and lists of disjoint slices."""

import itertools

import numpy as np

from jax_magi import AttentionMask

# The maximum number of slices of these masks. Padded to it, all masks share one program.
MAX_SLICES = 16

_UNBOUNDED = 2**30


def random_mask(rng: np.random.Generator, q_len: int, k_len: int) -> AttentionMask:
  """A mask of these lengths, with `MAX_SLICES` slices in random order."""
  make = _KINDS[rng.integers(len(_KINDS))]
  mask = make(rng, q_len, k_len).pad(MAX_SLICES)
  return AttentionMask(rng.permutation(mask.slices), q_len, k_len)


def random_cuts(rng: np.random.Generator, length: int, num_parts: int) -> np.ndarray:
  """Bounds `[num_parts + 1]` of parts that fill the length; some are empty, some one token."""
  cuts = rng.integers(0, length + 1, num_parts - 1)
  copies = rng.integers(0, num_parts - 1, num_parts - 1) if num_parts > 1 else []
  nudges = rng.integers(0, 3, num_parts - 1)
  for i, copy in enumerate(
    copies
  ):  # An equal cut makes an empty part, the next one a single token.
    if rng.random() < 0.25:
      cuts[i] = min(cuts[copy] + nudges[i], length)
  return np.concatenate([[0], np.sort(cuts), [length]])


def random_ranges(rng: np.random.Generator, length: int, num_ranges: int) -> np.ndarray:
  """Ranges `[num_ranges, 2]` that may overlap, some of them empty."""
  return np.sort(rng.integers(0, length + 1, (num_ranges, 2)), axis=1)


def random_segment_ids(rng: np.random.Generator, length: int, max_segments: int) -> np.ndarray:
  """Document numbers of contiguous documents in random order, some of them padding."""
  cuts = random_cuts(rng, length, max_segments)
  numbers = rng.permutation(max_segments) + 1
  numbers[rng.random(max_segments) < 0.2] = 0
  return np.repeat(numbers, np.diff(cuts)).astype(np.int32)


def _size(rng, length):
  """None, or a number of tokens that is small as often as not."""
  return [None, 0, int(rng.integers(0, 8)), int(rng.integers(0, length + 1))][rng.integers(4)]


def _full(rng, q_len, k_len):
  return AttentionMask.full(q_len, k_len)


def _causal(rng, q_len, k_len):
  return AttentionMask.causal(q_len, k_len)


def _sliding_window(rng, q_len, k_len):
  return AttentionMask.sliding_window(q_len, k_len, left=_size(rng, k_len), right=_size(rng, k_len))


def _from_ranges(rng, q_len, k_len):
  n = int(rng.integers(1, MAX_SLICES + 1))
  cuts = random_cuts(rng, q_len, n)
  q_ranges = np.stack([cuts[:-1], cuts[1:]], axis=1)
  k_ranges = random_ranges(rng, k_len, n)
  return AttentionMask.from_ranges(
    q_ranges, k_ranges, rng.integers(0, 4, n), q_len=q_len, k_len=k_len
  )


def _from_cu_seqlens(rng, q_len, k_len):
  n, causal = int(rng.integers(1, MAX_SLICES + 1)), bool(rng.integers(2))
  cuts = (random_cuts(rng, length, n) for length in (q_len, k_len))
  return AttentionMask.from_cu_seqlens(*cuts, causal=causal, q_len=q_len, k_len=k_len)


def _from_segment_ids(rng, q_len, k_len):
  n, causal = int(rng.integers(1, MAX_SLICES + 1)), bool(rng.integers(2))
  ids, kv_ids = (random_segment_ids(rng, length, n) for length in (q_len, k_len))
  window = (_size(rng, k_len), _size(rng, k_len)) if rng.integers(2) else None
  return AttentionMask.from_segment_ids(ids, n, kv_ids=kv_ids, causal=causal, window=window)


def _square(make):
  """A square mask, cropped to the lengths at a random place, which may reach past it."""

  def cropped(rng, q_len, k_len):
    mask = make(rng, max(q_len, k_len))
    if q_len == k_len and rng.random() < 0.7:
      return mask
    q_begin, k_begin = (int(x) for x in rng.integers(-3, max(q_len, k_len) // 2 + 1, 2))
    return mask.crop(q_begin, q_begin + q_len, k_begin, k_begin + k_len)

  return cropped


def _prefix_lm(rng, length):
  return AttentionMask.prefix_lm(int(rng.integers(0, length + 1)), length)


def _block_causal(rng, length):
  smallest = -(-length // MAX_SLICES)
  return AttentionMask.block_causal(int(rng.integers(smallest, length + 2)), length)


def _shared_question(rng, length):
  lengths = np.diff(random_cuts(rng, length, int(rng.integers(1, MAX_SLICES // 2 + 1))))
  return AttentionMask.shared_question(int(lengths[0]), lengths[1:])


def _grid(rng, q_len, k_len):
  """Some cells of a grid of cuts, each with a random band."""
  q_cuts, k_cuts = (random_cuts(rng, length, int(rng.integers(1, 5))) for length in (q_len, k_len))
  slices = []
  for q_begin, q_end in itertools.pairwise(q_cuts):
    for k_begin, k_end in itertools.pairwise(k_cuts):
      if rng.random() < 0.3:
        continue
      lo = [-_UNBOUNDED, k_begin - q_begin, rng.integers(-q_len, k_len + 1)][rng.integers(3)]
      hi = [_UNBOUNDED, k_end - q_end, rng.integers(-q_len, k_len + 1)][rng.integers(3)]
      slices.append([q_begin, q_end, k_begin, k_end, lo, hi])
  return AttentionMask(np.array(slices, np.int32).reshape(-1, 6), q_len, k_len)


def _sum(rng, q_len, k_len):
  """One mask for the first queries, another for the rest."""
  cut = int(rng.integers(0, q_len + 1))

  def only(mask, begin, end):
    return mask.crop(begin, end, 0, k_len).crop(-begin, q_len - begin, 0, k_len)

  window = _sliding_window(rng, q_len, k_len)
  return only(_causal(rng, q_len, k_len), 0, cut) + only(window, cut, q_len)


_KINDS = [
  _full,
  _causal,
  _sliding_window,
  _from_ranges,
  _from_cu_seqlens,
  _from_segment_ids,
  _square(_prefix_lm),
  _square(_block_causal),
  _square(_shared_question),
  _grid,
  _grid,
  _sum,
]
