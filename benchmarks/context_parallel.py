"""How context parallelism scales, without a cluster.

python -m benchmarks.context_parallel measure --json FILE       (on one Hopper GPU)
python -m benchmarks.context_parallel predict --json FILE [--plot FILE] [--markdown FILE]

`measure` plans each mask on 8 .. 128 ranks of 8192 tokens, and times the kernel calls, forward and
backward, of some ranks: those with the most and the least work, and another, each with its own
slices. `predict` adds what moves, at the stated speeds of links, and simulates the order in which
transfers and calls follow each other: with overlap, a call waits only for its own rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import jax_magi
from jax_magi import AttentionMask

LOCAL = 8192
CP_SIZES = (8, 16, 32, 64, 128)
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 48, 8, 128
# Transfers of a pass; of these, the study takes what is predicted to end first.
DEGREES = (1, 4)

# Bytes of a row of keys and values in 16 bit; gradients travel in 32.
ROW_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 2
# Bytes a second of a GPU, in its node of eight and out of it; seconds for a transfer to begin.
NVLINK, NETWORK, LATENCY = 450e9, 50e9, 20e-6
NODE = 8
# MagiAttention's published forward rates, TFLOP/s a GPU, at 8 and 64 ranks.
PUBLISHED = {"varlen causal": (459, 240), "full": (664, 630)}


def documents(total: int, seed: int = 0) -> list[int]:
  """Cumulative lengths: log-normal with a median of 3000 tokens, at most a quarter of the total."""
  rng = np.random.default_rng(seed)
  ends = [0]
  while ends[-1] < total:
    length = int(np.clip(rng.lognormal(np.log(3000), 1.3), 64, total // 4))
    ends.append(min(ends[-1] + length, total))
  return ends


def shared_questions(total: int) -> AttentionMask:
  """Documents that are questions of up to 2048 tokens with eight answers of up to 1024."""
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
  return jax_magi.magi_attn_flex_key(MASKS[name](cp_size * LOCAL), cp_size=cp_size)


def make_key(name: str, cp_size: int, degree: int) -> jax_magi.DistAttnKey:
  """Those of all degrees have one dispatch."""
  mask = MASKS[name](cp_size * LOCAL)
  return jax_magi.key_for_new_mask(_first_key(name, cp_size), mask, overlap_degree=degree)


# --- on the GPU ---


class Kernels:
  """Times of kernel calls: the stages of a rank, and whole masks for comparison."""

  def __init__(self):
    import jax
    import jax.numpy as jnp

    from jax_magi._src.attention import ops

    self.jax, self.jnp, self.ops = jax, jnp, ops
    self.config = ops.AttentionConfig(HEAD_DIM**-0.5)

  def times(self, slices: np.ndarray, q_len: int, k_len: int) -> tuple[float, float]:
    """Seconds of a forward and a backward call, float32 results, mask as data."""
    from benchmarks.timing import seconds

    forward, backward = self._programs(q_len, k_len)
    q, k, v = self._operands(q_len, k_len)
    table = self.jnp.asarray(slices[None])
    out, lse, _ = forward(q, k, v, table)
    delta = self.jnp.zeros_like(lse)
    del out
    return (
      seconds(forward, q, k, v, table, budget=0.02, repeats=2),
      seconds(backward, q, k, v, q, lse, delta, table, budget=0.02, repeats=2),
    )

  def _operands(self, q_len: int, k_len: int):
    keys = self.jax.random.split(self.jax.random.key(0), 3)
    shapes = [(1, q_len, NUM_Q_HEADS), (1, k_len, NUM_KV_HEADS), (1, k_len, NUM_KV_HEADS)]
    return [
      self.jax.random.normal(key, (*shape, HEAD_DIM), self.jnp.bfloat16)
      for key, shape in zip(keys, shapes, strict=True)
    ]

  def _programs(self, q_len: int, k_len: int):
    sink = np.full((1, NUM_Q_HEADS), -np.inf, np.float32)

    def forward(q, k, v, slices):
      return self.ops.forward(self.config, q, k, v, slices, sink, out_dtype=np.float32)

    def backward(q, k, v, dout, lse, delta, slices):
      return self.ops.backward(
        self.config, q, k, v, dout, lse, delta, slices, grad_dtype=np.float32
      )

    if not hasattr(self, "_jitted"):
      self._jitted = self.jax.jit(forward), self.jax.jit(backward)
    return self._jitted


def measure(cp_sizes: tuple[int, ...], names: list[str], path: Path) -> None:
  """Writes what it has after each cell, so that a run that is cut short is not lost."""
  import jax

  kernels = Kernels()
  cells: list[dict[str, Any]] = []
  alone: dict[str, Any] = {}
  data = {"device": jax.devices()[0].device_kind, "alone": alone, "cells": cells}
  for name in names:
    make = MASKS[name]
    length = 4 * LOCAL
    mask = make(length)
    slices = mask.pad(_round_up(len(mask.slices))).slices
    forward, backward = kernels.times(np.asarray(slices), length, length)
    alone[name] = {"area": mask.area(), "forward": forward, "backward": backward}
    print(f"{name:16s} one GPU, {length} tokens: {_rates(mask.area(), forward, backward)}")
    for cp_size in cp_sizes:
      for degree in DEGREES:
        key = make_key(name, cp_size, degree)
        ranks = [_time_rank(kernels, key, rank) for rank in _some_ranks(key.stats().area)]
        cells.append({"mask": name, "cp_size": cp_size, "degree": degree, "ranks": ranks})
        slowest = max(ranks, key=lambda r: np.sum(r["stages"]))
        rates = _rates(slowest["area"], *np.sum(slowest["stages"], axis=0))
        print(f"{name:16s} cp {cp_size:3d} degree {degree}, slowest rank: {rates}", flush=True)
        path.write_text(json.dumps(data, indent=1) + "\n")


def _time_rank(kernels: Kernels, key: jax_magi.DistAttnKey, rank: int) -> dict[str, Any]:
  stages = []
  for stage in range(key.slices.shape[1]):
    table = key.slices[rank, stage]
    # Rounded up further than keys are, as each length is compiled.
    k_len = LOCAL if stage == 0 else max(LOCAL, _round_up(key.capacities.rows))
    stages.append(kernels.times(table, LOCAL, k_len) if table.any() else (0.0, 0.0))
  return {"rank": int(rank), "area": int(key.stats().area[rank]), "stages": stages}


def _some_ranks(area: np.ndarray) -> list[int]:
  if (area == area[0]).all():
    return [0]
  return sorted({int(area.argmax()), int(area.argmin()), len(area) // 2})


def _round_up(count: int) -> int:
  return 1 << max(count - 1, 0).bit_length()


def _rates(area: int, forward: float, backward: float) -> str:
  flops = 4 * HEAD_DIM * NUM_Q_HEADS * area
  return (
    f"forward {flops / forward / 1e12:4.0f}, backward {2.5 * flops / backward / 1e12:4.0f} TFLOP/s"
  )


# --- anywhere ---


@dataclasses.dataclass(frozen=True)
class Prediction:
  """Of one mask on so many ranks. Times are of the slowest rank, forward and backward."""

  mask: str
  cp_size: int
  degree: int
  balance: float
  share: float
  busiest_share: float
  megabytes: float
  ideal: float
  compute: float
  exposed: float
  overlapped: float
  serial: float
  efficiency: float
  serial_efficiency: float
  forward_rate: float


def predict(data: dict[str, Any]) -> list[Prediction]:
  """The best degree of each mask and size."""
  cells: dict[tuple[str, int], list[Prediction]] = {}
  for cell in data["cells"]:
    key = make_key(cell["mask"], cell["cp_size"], cell["degree"])
    prediction = _predict(cell, key, data["alone"][cell["mask"]])
    cells.setdefault((cell["mask"], cell["cp_size"]), []).append(prediction)
  return [min(group, key=lambda p: p.overlapped) for group in cells.values()]


def _predict(cell: dict[str, Any], key: jax_magi.DistAttnKey, alone: dict[str, Any]) -> Prediction:
  stats = key.stats()
  stages = np.array(max(cell["ranks"], key=lambda r: np.sum(r["stages"]))["stages"])
  cast = transfer_times(key)
  forward = simulate_forward(stages[:, 0], cast)
  backward = simulate_backward(stages[:, 1], cast)
  compute = float(stages.sum())
  serial = compute + float(4 * cast.sum())  # Keys twice, gradients in twice as many bytes.
  ideal = (alone["forward"] + alone["backward"]) / alone["area"] * stats.area.mean()
  flops = 4 * HEAD_DIM * NUM_Q_HEADS * stats.area.mean()
  return Prediction(
    mask=cell["mask"],
    cp_size=cell["cp_size"],
    degree=cell["degree"],
    balance=stats.balance,
    share=stats.share,
    busiest_share=stats.busiest_share,
    megabytes=float(stats.rows_received.max() * ROW_BYTES / 1e6),
    ideal=ideal,
    compute=compute,
    exposed=forward + backward - compute,
    overlapped=forward + backward,
    serial=serial,
    efficiency=ideal / (forward + backward),
    serial_efficiency=ideal / serial,
    forward_rate=flops / forward / 1e12,
  )


def transfer_times(key: jax_magi.DistAttnKey) -> np.ndarray:
  """Seconds of each transfer of keys and values: of the rank that is busiest, in or out."""
  spec = key.spec
  n = spec.cp_size
  rows = np.asarray(key.pairs)[:, :, 0].astype(np.float64)  # [sender, transfer, receiver]
  if spec.capacities.all_gather:
    rows = np.full((n, spec.num_transfers, n), spec.k_local / spec.num_transfers)
    rows[np.arange(n), :, np.arange(n)] = 0.0
  node = np.arange(n) // NODE
  is_near = (node[:, None] == node[None, :])[:, None, :]
  near, far = rows * is_near, rows * ~is_near
  times = [
    ROW_BYTES * np.maximum(part.sum(axis=2), part.sum(axis=0).T).max(axis=0) / speed
    for part, speed in ((near, NVLINK), (far, NETWORK))
  ]
  return np.maximum(*times) + LATENCY  # Both kinds of link at once.


def network_rows(key: jax_magi.DistAttnKey) -> tuple[float, float]:
  """Rows that a rank gets from other nodes, on average: as it is, and if nodes got each once."""
  spec = key.spec
  node = np.arange(spec.cp_size) // NODE
  length = spec.cp_size * spec.k_local
  chunks = np.asarray(key.k_chunks)
  total = 0
  arrived = np.zeros((node[-1] + 1, length), bool)
  for rank in range(spec.cp_size):
    for transfer in range(spec.num_transfers):
      sizes = np.asarray(key.pairs)[rank, transfer, 0]
      runs = np.asarray(key.send_runs)[rank, transfer]
      runs = runs[runs[:, 0] < sizes.sum()]
      lengths = np.diff(runs[:, 0], append=sizes.sum())
      rows = np.repeat(runs[:, 1] - runs[:, 0], lengths) + np.arange(sizes.sum())
      receiver = node[np.repeat(np.arange(spec.cp_size), sizes)]
      is_far = receiver != node[rank]
      tokens = (
        chunks[rank][rows // spec.k_chunk_size] * spec.k_chunk_size + rows % spec.k_chunk_size
      )
      arrived[receiver[is_far], tokens[is_far]] = True
      total += int(is_far.sum())
  return total / spec.cp_size, arrived.sum() / spec.cp_size


def simulate_forward(compute: np.ndarray, cast: np.ndarray) -> float:
  """Seconds until the last call has ended; transfers follow each other on the link."""
  now = compute[0]
  arrived = 0.0
  for call, transfer in zip(compute[1:], cast, strict=True):
    arrived += transfer
    now = max(now, arrived) + call
  return float(now)


def simulate_backward(compute: np.ndarray, cast: np.ndarray) -> float:
  """The same with gradients of what came in each transfer on their way back, in 32 bit."""
  now = compute[0]
  link = 0.0
  ends = []
  for call, transfer in zip(compute[1:], cast, strict=True):
    link += transfer
    now = max(now, link) + call
    ends.append(now)
  for end, transfer in zip(ends, cast, strict=True):
    link = max(link, end) + 2 * transfer
  return float(max(now, link))


def to_markdown(predictions: list[Prediction]) -> str:
  lines = [
    "| mask | ranks | degree | work, max / mean | rows: mean, busiest | MB | ms at a GPU's rate | "
    "kernels | + exposed | efficiency | without overlap | forward, TFLOP/s |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
  ]
  for p in predictions:
    lines.append(
      f"| {p.mask} | {p.cp_size} | {p.degree} | {p.balance:.3f} | {p.share:.2f}, "
      f"{p.busiest_share:.2f} | {p.megabytes:.0f} | {1e3 * p.ideal:.1f} | {1e3 * p.compute:.1f} | "
      f"{1e3 * p.exposed:.1f} | {p.efficiency:.0%} | {p.serial_efficiency:.0%} | "
      f"{p.forward_rate:.0f} |"
    )
  return "\n".join(lines) + "\n"


def plot(predictions: list[Prediction], path: str) -> None:
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
  panels = (
    ("efficiency", "share of one GPU's rate", [p.efficiency for p in predictions]),
    ("rows received (mean)", "share of an all-gather", [p.share for p in predictions]),
    ("forward", "TFLOP/s a GPU", [p.forward_rate for p in predictions]),
  )
  for ax, (title, label, values) in zip(axes, panels, strict=True):
    for name in MASKS:
      points = [(p.cp_size, v) for p, v in zip(predictions, values, strict=True) if p.mask == name]
      if points:
        ax.plot(*zip(*points, strict=True), marker="o", ms=3, label=name)
    ax.set(xscale="log", title=title, ylabel=label, xlabel="ranks", ylim=(0, None))
    ax.set_xticks(CP_SIZES, [str(n) for n in CP_SIZES])
    ax.minorticks_off()
  for name, rates in PUBLISHED.items():
    axes[2].plot((8, 64), rates, ls=":", marker="x", color="gray", lw=1)
    axes[2].annotate(f"MagiAttention, {name}", (64, rates[1]), fontsize=7, color="gray")
  axes[0].legend(fontsize=7)
  figure.savefig(path, dpi=150)


def main(argv: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("part", choices=["measure", "predict"])
  parser.add_argument("--json", required=True, help="times of kernels")
  parser.add_argument("--sizes", type=int, nargs="+", default=list(CP_SIZES))
  parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
  parser.add_argument("--plot")
  parser.add_argument("--markdown")
  options = parser.parse_args(argv)
  if options.part == "measure":
    measure(tuple(options.sizes), options.masks, Path(options.json))
    return
  data = json.loads(Path(options.json).read_text())
  predictions = predict(data)
  text = to_markdown(predictions)
  print(text)
  if options.markdown:
    Path(options.markdown).write_text(text)
  for name in ("varlen full", "varlen causal"):
    for cp_size in (n for n in options.sizes if n > NODE):
      flat, once = network_rows(make_key(name, cp_size, 1))
      print(f"{name}, {cp_size} ranks: {flat:.0f} rows from other nodes, once a node {once:.0f}")
  if options.plot:
    plot(predictions, options.plot)


if __name__ == "__main__":
  main(sys.argv[1:])
