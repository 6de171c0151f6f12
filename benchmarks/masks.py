"""The masks for which attention is timed on GPUs, for any number of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from jax_magi import AttentionMask

WINDOW = 1024


def documents(length: int, seed: int = 0, shrink: float = 1.0) -> list[int]:
  """The bounds of documents of 128 to 4096 tokens, or `shrink` times that."""
  rng = np.random.default_rng(seed)
  bounds = [0]
  while bounds[-1] < length:
    tokens = round(shrink * int(rng.integers(128, 4097)))
    bounds.append(min(length, bounds[-1] + tokens))
  return bounds


def varlen_of_same_area(mask: AttentionMask) -> AttentionMask:
  """Full attention in documents that are shorter, so that the area equals that of `mask`."""
  low, high = 0.01, 1.0
  for _ in range(20):
    middle = (low + high) / 2
    found = AttentionMask.from_cu_seqlens(documents(mask.q_len, shrink=middle))
    low, high = (middle, high) if found.area() < mask.area() else (low, middle)
  return found


def _place(mask: AttentionMask, begin: int, length: int) -> AttentionMask:
  """`mask` on the diagonal of a longer sequence, from `begin` on."""
  return mask.crop(-begin, length - begin, -begin, length - begin)


def _per_document(length: int, make: Callable[[int], AttentionMask]) -> AttentionMask:
  bounds = documents(length)
  parts = [_place(make(end - begin), begin, length) for begin, end in itertools.pairwise(bounds)]
  return AttentionMask(np.concatenate([p.slices for p in parts]), length, length)


def _shared_question(num_tokens: int) -> AttentionMask:
  question = num_tokens // 4
  answers = [(num_tokens - question) // 4] * 4
  return _place(AttentionMask.shared_question(question, answers), 0, num_tokens)


MASKS: dict[str, Callable[[int], AttentionMask]] = {
  "full": AttentionMask.full,
  "causal": AttentionMask.causal,
  "window": lambda n: AttentionMask.sliding_window(n, left=WINDOW - 1),
  "varlen_full": lambda n: AttentionMask.from_cu_seqlens(documents(n)),
  "varlen_causal": lambda n: AttentionMask.from_cu_seqlens(documents(n), causal=True),
  "varlen_block_causal": lambda n: _per_document(n, lambda m: AttentionMask.block_causal(256, m)),
  "shared_question": lambda n: _per_document(n, _shared_question),
}
# Masks that few baselines support are compared with full attention in documents of the same area.
SAME_AREA = ("varlen_block_causal", "shared_question")
