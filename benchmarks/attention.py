"""Times attention against the baselines that are on this machine.

python -m benchmarks.attention [--json FILE] [--plot FILE] [--peers PEER ...]
                               [--parts PART ...] [--lengths N ...] [--dims KEY,VALUE]

On a CPU, it prints the time of the forward pass, the time of forward and backward pass, and the
peak memory of a process that runs both, for several lengths. For GPUs, see attention_gpu.py:
`--parts` selects its parts, `--lengths` the numbers of tokens, and `--dims 192,128` the head dims
of forward and backward passes. `--peers` selects baselines of peers.py; without names, none.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

import jax_magi
from benchmarks import attention_gpu, jax_passes
from benchmarks.beside import Beside
from benchmarks.masks import MASKS
from benchmarks.peers import PEERS, Attention, Cell, Peer

LENGTH, NUM_HEADS, HEAD_DIM = 4096, 8, 64
MEMORY_LENGTHS = (1024, 2048, 4096, 8192)


def make_masks(length: int) -> dict[str, jax_magi.AttentionMask]:
  """The masks that are timed: causal, and causal documents of 128 to 1024 tokens."""
  rng = np.random.default_rng(0)
  bounds = [0]
  while bounds[-1] < length:
    bounds.append(min(length, bounds[-1] + int(rng.integers(128, 1025))))
  return {
    "causal": jax_magi.AttentionMask.causal(length),
    "documents": jax_magi.AttentionMask.from_cu_seqlens(bounds, causal=True),
  }


def make_cells(length: int) -> dict[str, Cell]:
  options = {"dtype": "float32", "direction": "forward"}
  return {
    name: Cell(name, mask, HEAD_DIM, NUM_HEADS, NUM_HEADS, **options)
    for name, mask in make_masks(length).items()
  }


def ours(cell: Cell) -> Attention:
  return lambda q, k, v: jax_magi.attention(q, k, v, cell.mask)[0]


def time_all(beside: Beside) -> list[dict]:
  rows = []
  for name, cell in make_cells(LENGTH).items():
    both = dataclasses.replace(cell, direction="both")
    found = {"ours": {"forward_ms": jax_passes.seconds(ours(cell), cell)}}
    found["ours"]["both_ms"] = jax_passes.seconds(ours(cell), both)
    for key, passes in (("forward_ms", cell), ("both_ms", both)):
      times, notes = beside.times(passes)
      for peer in times:
        found.setdefault(peer, {})[key] = times[peer]
      for peer in notes:
        found.setdefault(peer, {})["note"] = notes[peer]
    for by, values in found.items():
      row = {k: v if k == "note" else 1e3 * v for k, v in values.items()}
      rows.append({"mask": name, "by": by} | row)
      figures = " ".join(f"{row.get(key, float('nan')):9.1f}" for key in ("forward_ms", "both_ms"))
      print(f"  {name:10} {by:17} {figures} {row.get('note', '')}".rstrip(), flush=True)
  return rows


def peak_memory_mb(contender: str, length: int) -> float:
  """Growth of a fresh process's peak memory while it runs forward and backward once."""
  command = [sys.executable, "-m", "benchmarks.attention", "--peak-memory", contender, str(length)]
  return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_own_peak_memory(contender: str, length: int) -> None:
  # A short run first: libraries, compiler and thread pools are not what is measured.
  for n in (128, length):
    before = own_peak_mb()
    cell = make_cells(n)["causal"]
    peers = {peer.name: peer for peer in PEERS}
    attention = ours(cell) if contender == "ours" else peers[contender].ways(cell)[0]
    q, k, v = jax_passes.inputs(cell)
    jax.block_until_ready(jax.jit(jax_passes.forward_and_backward(attention))(q, k, v, q))
  print(own_peak_mb() - before)


def own_peak_mb() -> float:
  status = Path("/proc/self/status")
  if status.exists():  # Linux: getrusage would count what the parent had before this process.
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 2**10
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def plot(rows: list[dict], memory: list[dict], path: Path) -> None:
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
  names = list(dict.fromkeys(row["by"] for row in rows))
  width = 0.8 / len(names)
  for ax, mask in zip(axes, ("causal", "documents"), strict=False):
    for row in (r for r in rows if r["mask"] == mask):
      i = names.index(row["by"])
      heights = [row.get(key, 0.0) for key in ("forward_ms", "both_ms")]
      bars = ax.bar(np.arange(2) + width * i, heights, 0.95 * width, color=f"C{i}", label=row["by"])
      ax.bar_label(bars, fmt="%.0f", fontsize=8)
    ax.set_xticks(np.arange(2) + width * (len(names) - 1) / 2, ["forward", "forward + backward"])
    ax.set(title=f"{mask}, {LENGTH} tokens", ylabel="ms")
  for by in dict.fromkeys(m["by"] for m in memory):
    points = [(m["length"], m["peak_mb"]) for m in memory if m["by"] == by]
    color = f"C{names.index(by)}"
    axes[2].loglog(*zip(*points, strict=True), "o-", base=2, color=color, label=by)
  axes[2].set(title="peak memory, causal", xlabel="tokens", ylabel="MB")
  axes[0].legend()
  figure.savefig(path, dpi=120)
  plt.close(figure)


def _dims(text: str) -> tuple[int, int]:
  head_dim, value_dim = text.split(",")
  return int(head_dim), int(value_dim)


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  names = [peer.name for peer in PEERS]
  parser.add_argument("--json", type=Path)
  parser.add_argument("--plot", type=Path)
  parser.add_argument("--peers", nargs="*", default=names, choices=names, metavar="PEER")
  parser.add_argument("--parts", nargs="+", default=[], choices=list(attention_gpu.PARTS))
  parser.add_argument("--lengths", nargs="+", type=int)
  parser.add_argument("--dims", type=_dims, metavar="KEY,VALUE")
  parser.add_argument("--masks", nargs="+", choices=list(MASKS), help="masks for --dims")
  parser.add_argument("--implementation", default="cuda", help='ours, such as "cuda_sm80"')
  parser.add_argument("--peak-memory", nargs=2, metavar=("BY", "LENGTH"), help=argparse.SUPPRESS)
  options = parser.parse_args(arguments)
  if options.peak_memory:
    measure_own_peak_memory(options.peak_memory[0], int(options.peak_memory[1]))
    return
  peers = [peer for peer in PEERS if peer.name in options.peers]
  if jax.default_backend() == "gpu":
    masks = tuple(options.masks or attention_gpu.MASKS_OF_DIMS)
    choice = attention_gpu.Choice(options.dims, options.implementation, masks)
    attention_gpu.main(options.json, options.plot, options.parts, options.lengths, peers, choice)
  else:
    _main_on_cpu(options.json, options.plot, peers)


def _main_on_cpu(json_path: Path | None, plot_path: Path | None, peers: Sequence[Peer]) -> None:
  print(f"{LENGTH} tokens, {NUM_HEADS} heads, head_dim {HEAD_DIM}, float32, {jax.devices()[0]}")
  with Beside(peers) as beside:
    print(beside.summary())
    print(f"  {'mask':10} {'by':17} {'fwd ms':>9} {'both ms':>9}")
    rows = time_all(beside)
  named = {(row["mask"], row["by"]): row for row in rows}
  for (name, by), row in named.items():
    if by != "ours" and "note" not in row:
      own = named[name, "ours"]
      ratios = [row[key] / own[key] for key in ("forward_ms", "both_ms")]
      title = beside.peers[by].title
      print(f"{name}: {ratios[0]:.2f}x {title} forward, {ratios[1]:.2f}x forward and backward")

  print(f"peak memory (MB), causal, forward and backward, at {MEMORY_LENGTHS} tokens")
  memory = []
  for by in ("ours", *(name for name in beside.present if beside.peers[name].framework == "jax")):
    peaks = [peak_memory_mb(by, n) for n in MEMORY_LENGTHS]
    lengths = zip(MEMORY_LENGTHS, peaks, strict=True)
    memory += [{"by": by, "length": n, "peak_mb": p} for n, p in lengths]
    print(f"  {by:17}", *(f"{p:9.1f}" for p in peaks), flush=True)
  if json_path:
    results = {"peers": beside.describe(), "times": rows, "memory": memory}
    json_path.write_text(json.dumps(results, indent=2) + "\n")
  if plot_path:
    plot(rows, memory, plot_path)


if __name__ == "__main__":
  main()
