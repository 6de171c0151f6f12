"""Chunks of the sequence, and which rank holds each."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jax_magi._src.context_parallel.intervals import joined


@dataclasses.dataclass(frozen=True)
class Dispatch:
  """One axis of the mask over ranks: chunks of `chunk_size` tokens, and the rank of each.

  A rank holds its chunks in ascending order.
  """

  length: int
  chunk_size: int
  cp_size: int
  ranks: np.ndarray  # int32 [num_chunks]

  @property
  def num_chunks(self) -> int:
    """The number of chunks of all ranks, including padding."""
    return len(self.ranks)

  @property
  def chunks(self) -> np.ndarray:
    """int32 `[cp_size, chunks of a rank]`: the chunks that each rank holds."""
    return np.argsort(self.ranks, kind="stable").reshape(self.cp_size, -1).astype(np.int32)

  @property
  def local_length(self) -> int:
    """The number of tokens of a rank, including padding."""
    return self.num_chunks // self.cp_size * self.chunk_size

  def local_begins(self) -> np.ndarray:
    """int64 `[num_chunks]`: where each chunk begins in its rank's buffer."""
    begins = np.empty(self.num_chunks, np.int64)
    begins[self.chunks] = np.arange(self.num_chunks // self.cp_size) * self.chunk_size
    return begins

  def runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Begin, end, rank and local begin of each run of neighbouring chunks on one rank."""
    first, last = joined(np.append(True, self.ranks[1:] != self.ranks[:-1]))
    begins = first * self.chunk_size
    ends = (last + 1) * self.chunk_size
    return begins, ends, self.ranks[first].astype(np.int64), self.local_begins()[first]


def num_chunks(length: int, chunk_size: int, cp_size: int, multiple: int = 1) -> int:
  """The number of chunks for `length` tokens; each rank gets the same multiple of `multiple`."""
  of_rank = math.ceil(length / (chunk_size * cp_size * multiple)) * multiple
  return max(of_rank, multiple) * cp_size
