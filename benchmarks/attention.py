"""Times attention: against XLA's dense attention on a CPU, against cuDNN's on a GPU.

python -m benchmarks.attention [--json FILE] [--plot FILE] [--parts PART ...] [--lengths N ...]

On a CPU it prints the time of the forward pass, of forward and backward, and the peak memory of a
process that runs both, for growing lengths. On a GPU see attention_gpu.py; `--parts` chooses among
its parts, `--lengths` the numbers of tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_magi
from benchmarks import attention_gpu
from benchmarks.timing import seconds

LENGTH, NUM_HEADS, HEAD_DIM = 4096, 8, 64
MEMORY_LENGTHS = (1024, 2048, 4096, 8192)


def make_masks(length: int) -> dict[str, jax_magi.AttentionMask]:
  """The masks that are timed: causal, and causal documents of 128 .. 1024 tokens."""
  rng = np.random.default_rng(0)
  bounds = [0]
  while bounds[-1] < length:
    bounds.append(min(length, bounds[-1] + int(rng.integers(128, 1025))))
  return {
    "causal": jax_magi.AttentionMask.causal(length),
    "documents": jax_magi.AttentionMask.from_cu_seqlens(bounds, causal=True),
  }


def make_inputs(length: int):
  rng = np.random.default_rng(1)
  shape = (length, NUM_HEADS, HEAD_DIM)
  return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(4)]


def ours(mask: jax_magi.AttentionMask):
  return lambda q, k, v: jax_magi.attention(q, k, v, mask)[0]


def xla(mask: jax_magi.AttentionMask):
  dense = jnp.asarray(mask.to_dense())[None]
  return lambda q, k, v: jax.nn.dot_product_attention(
    q, k, v, mask=dense, scale=HEAD_DIM**-0.5, implementation="xla"
  )


CONTENDERS = {"ours": ours, "xla": xla}


def with_backward(fun):
  def both(q, k, v, dout):
    out, vjp = jax.vjp(fun, q, k, v)
    return out, vjp(dout)

  return both


def time_all() -> list[dict]:
  q, k, v, dout = make_inputs(LENGTH)
  rows = []
  for name, mask in make_masks(LENGTH).items():
    for contender, make in CONTENDERS.items():
      fun = make(mask)
      forward = 1e3 * seconds(jax.jit(fun), q, k, v)
      both = 1e3 * seconds(jax.jit(with_backward(fun)), q, k, v, dout)
      rows.append({"mask": name, "by": contender, "forward_ms": forward, "both_ms": both})
      print(f"  {name:10} {contender:5} {forward:9.1f} {both:9.1f}", flush=True)
  return rows


def peak_memory_mb(contender: str, length: int) -> float:
  """Growth of a fresh process's peak memory while it runs forward and backward once."""
  command = [sys.executable, "-m", "benchmarks.attention", "--peak-memory", contender, str(length)]
  return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_own_peak_memory(contender: str, length: int) -> None:
  # A short run first: libraries, compiler and thread pools are not what is measured.
  for n in (128, length):
    before = own_peak_mb()
    fun = CONTENDERS[contender](make_masks(n)["causal"])
    jax.block_until_ready(jax.jit(with_backward(fun))(*make_inputs(n)))
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
  for ax, mask in zip(axes, ("causal", "documents"), strict=False):
    for i, by in enumerate(CONTENDERS):
      row = next(r for r in rows if r["mask"] == mask and r["by"] == by)
      heights = [row["forward_ms"], row["both_ms"]]
      bars = ax.bar(np.arange(2) + 0.4 * i, heights, 0.38, label=by)
      ax.bar_label(bars, fmt="%.0f", fontsize=8)
    ax.set_xticks(np.arange(2) + 0.2, ["forward", "forward + backward"])
    ax.set(title=f"{mask}, {LENGTH} tokens", ylabel="ms")
  for by in CONTENDERS:
    points = [(m["length"], m["peak_mb"]) for m in memory if m["by"] == by]
    axes[2].loglog(*zip(*points, strict=True), "o-", base=2, label=by)
  axes[2].set(title="peak memory, causal", xlabel="tokens", ylabel="MB")
  axes[0].legend()
  figure.savefig(path, dpi=120)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--json", type=Path)
  parser.add_argument("--plot", type=Path)
  parser.add_argument("--parts", nargs="+", default=[], choices=list(attention_gpu.PARTS))
  parser.add_argument("--lengths", nargs="+", type=int)
  parser.add_argument("--peak-memory", nargs=2, metavar=("BY", "LENGTH"), help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.peak_memory:
    measure_own_peak_memory(arguments.peak_memory[0], int(arguments.peak_memory[1]))
    return
  if jax.default_backend() == "gpu":
    attention_gpu.main(arguments.json, arguments.plot, arguments.parts, arguments.lengths)
    return

  print(f"{LENGTH} tokens, {NUM_HEADS} heads, head_dim {HEAD_DIM}, float32, {jax.devices()[0]}")
  print(f"  {'mask':10} {'by':5} {'fwd ms':>9} {'both ms':>9}")
  rows = time_all()
  for name in make_masks(LENGTH):
    a, b = (next(r for r in rows if r["mask"] == name and r["by"] == by) for by in ("ours", "xla"))
    ratios = [b[key] / a[key] for key in ("forward_ms", "both_ms")]
    print(f"{name}: {ratios[0]:.2f}x XLA forward, {ratios[1]:.2f}x forward and backward")

  print(f"peak memory (MB), causal, forward and backward, at {MEMORY_LENGTHS} tokens")
  memory = []
  for by in CONTENDERS:
    peaks = [peak_memory_mb(by, n) for n in MEMORY_LENGTHS]
    lengths = zip(MEMORY_LENGTHS, peaks, strict=True)
    memory += [{"by": by, "length": n, "peak_mb": p} for n, p in lengths]
    print(f"  {by:5}", *(f"{p:9.1f}" for p in peaks), flush=True)
  if arguments.json:
    arguments.json.write_text(json.dumps({"times": rows, "memory": memory}, indent=2) + "\n")
  if arguments.plot:
    plot(rows, memory, arguments.plot)


if __name__ == "__main__":
  main()
