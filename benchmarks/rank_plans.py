"""The masks and plans of the study of context parallelism: 8192 tokens a rank, 8 ranks a node."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np

import jax_magi
from benchmarks.rank_kernels import HEAD_DIM, LOCAL, NUM_KV_HEADS
from jax_magi import AttentionMask, Links

NODE = 8
CP_SIZES = (8, 16, 32, 64, 128)
# The bytes per second of a GPU. NVLink 4 has 900 GB/s in both directions together (NVIDIA's H200
# datasheet). A NIC has 400 Gbit/s (ConnectX-7, one per GPU of a DGX H200) or 800 (ConnectX-8).
# These are peaks, which NCCL does not reach. The latency is an assumption.
NVLINK, LATENCY = 450e9, 20e-6
NETWORKS = (50e9, 100e9)
# The bytes of a row of keys and values in 16 bit. Gradients travel in 32 or in 16 bit.
ROW_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 2


def documents(total: int, seed: int = 0) -> list[int]:
  """Cumulative lengths: log-normal with a median of 3000 tokens, at most a quarter of the total."""
  rng = np.random.default_rng(seed)
  ends = [0]
  while ends[-1] < total:
    length = int(np.clip(rng.lognormal(np.log(3000), 1.3), 64, total // 4))
    ends.append(min(ends[-1] + length, total))
  return ends


def shared_questions(total: int) -> AttentionMask:
  """Documents with a question of up to 2048 tokens and eight answers of up to 1024 tokens."""
  rng = np.random.default_rng(1)
  parts, begin = [], 0
  while begin < total:
    mask = AttentionMask.shared_question(int(rng.integers(256, 2049)), rng.integers(64, 1025, 8))
    mask = mask.crop(0, min(mask.q_len, total - begin), 0, min(mask.k_len, total - begin))
    slices = mask.slices.copy()
    slices[:, :4] += begin  # Bands are of differences, and stay.
    parts.append(slices)
    begin += mask.q_len
  return AttentionMask(np.concatenate(parts), total, total)


MASKS: dict[str, Callable[[int], AttentionMask]] = {
  "full": AttentionMask.full,
  "causal": AttentionMask.causal,
  "varlen full": lambda n: AttentionMask.from_cu_seqlens(documents(n)),
  "varlen causal": lambda n: AttentionMask.from_cu_seqlens(documents(n), causal=True),
  "window": lambda n: AttentionMask.sliding_window(n, left=4095),
  "shared question": shared_questions,
}


@functools.cache
def _first_key(name: str, cp_size: int) -> jax_magi.DistAttnKey:
  mask = MASKS[name](cp_size * LOCAL)
  return jax_magi.magi_attn_flex_key(mask, cp_size=cp_size, ranks_per_node=min(NODE, cp_size))


def make_key(name: str, cp_size: int, degree: int, transport: str = "auto") -> jax_magi.DistAttnKey:
  """A key. The keys of all degrees share one dispatch."""
  mask = MASKS[name](cp_size * LOCAL)
  return jax_magi.key_for_new_mask(
    _first_key(name, cp_size), mask, overlap_degree=degree, transport=transport
  )


@functools.cache
def planned_key(name: str, cp_size: int, network: float) -> jax_magi.DistAttnKey:
  """The key that the planner chooses on the dispatch of `make_key`."""
  mask = MASKS[name](cp_size * LOCAL)
  links = Links(near=NVLINK, far=network, latency=LATENCY, row_bytes=ROW_BYTES)
  return jax_magi.key_for_new_mask(
    _first_key(name, cp_size), mask, overlap_degree="auto", links=links
  )


def networks_of(cp_size: int) -> tuple[float, ...]:
  """The speeds between nodes. With a single node, there is one entry."""
  return NETWORKS if cp_size > NODE else NETWORKS[:1]


def is_same_plan(key: jax_magi.DistAttnKey, other: jax_magi.DistAttnKey) -> bool:
  """Whether ranks compute the same with both plans."""
  leaves = [jax.tree.leaves((x.slices, x.whole_slices)) for x in (key, other)]
  return key.capacities == other.capacities and all(map(np.array_equal, *leaves))
