"""Times the fused softmax, against XLA on the plain expression, and against no fusion.

python -m benchmarks.softmax [--json FILE] [--plot FILE]

Contenders, forward:
  ours       `fused_scale_mask_softmax`
  xla        scale, mask and `jax.nn.softmax` in float32, in one `jit`
  unfused    scale, mask, exp, sum, division and cast, a `jit` each: bf16 between them, and float32
             for sum and quotient

and only backward, from the residuals of the forward pass:
  ours       from bf16 probabilities
  xla        the same formula in one `jit`, from bf16 probabilities: what a hand-written derivative
             would do
  autodiff   `jax.vjp` of the forward `xla`, with the residuals that JAX saves

Rates are the bytes that must be moved (visible columns read, the mask read once, all columns
written) divided by time, and their share of the rate of a copy in the same run. Inputs are
arguments, and results are new arrays. All contenders get the same inputs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_magi
from benchmarks import timing
from jax_magi import AttentionMask

WINDOW = 1024
SCALE = 0.125
# batch, heads, q_len, k_len
GPU_SHAPES = [(8, 32, 2048, 2048), (1, 32, 8192, 8192)]
CPU_SHAPES = [(1, 8, 1024, 1024)]

seconds = functools.partial(timing.seconds, min_calls=3, budget=0.06)


@dataclasses.dataclass(frozen=True)
class Case:
  """A mask: as options of ours and as a band, or as an array made from the shape of x."""

  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  band: Callable[[int, int], AttentionMask] = AttentionMask.full
  mask: Callable[[tuple[int, ...]], Any] = lambda shape: None


def _random_mask(shape: tuple[int, ...]) -> jax.Array:
  return jax.random.bernoulli(jax.random.key(2), 0.8, shape)


CASES = {
  "scaled": Case(),
  "boolean mask [b, 1, q, k]": Case(mask=lambda s: _random_mask((s[0], 1, *s[2:]))),
  "additive mask [1, 1, q, k]": Case(
    mask=lambda s: jnp.where(_random_mask((1, 1, *s[2:])), 0.0, -jnp.inf).astype(jnp.bfloat16)
  ),
  "causal": Case({"is_causal": True}, AttentionMask.causal),
  f"window {WINDOW}": Case(
    {"is_causal": True, "window": (WINDOW - 1, 0)},
    functools.partial(AttentionMask.sliding_window, left=WINDOW - 1),
  ),
}


def _in_band(case: Case, shape: tuple[int, ...]):
  """A band as a comparison of row and column indices, which XLA fuses; None if all is visible."""
  if not case.options:
    return None
  lo, hi = case.band(*shape[-2:]).slices[0, 4:]
  row, column = (jax.lax.broadcasted_iota(np.int32, shape[-2:], axis) for axis in (0, 1))
  return (column - row >= lo) & (column - row <= hi)


def _ours(case: Case) -> Callable:
  return lambda x, mask: jax_magi.fused_scale_mask_softmax(x, mask, scale=SCALE, **case.options)


def _xla(case: Case) -> Callable:
  def fun(x, mask):
    scores = x.astype(np.float32) * SCALE
    band = _in_band(case, x.shape)
    if mask is not None:
      is_bool = mask.dtype == bool
      scores = jnp.where(mask, scores, -jnp.inf) if is_bool else scores + mask.astype(np.float32)
    if band is not None:
      scores = jnp.where(band, scores, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1).astype(x.dtype)

  return fun


def _unfused() -> Callable:
  """The unfused pipeline, not jitted as a whole: each step reads and writes memory."""

  def apply_mask(x, mask):
    return jnp.where(mask, x, -jnp.inf) if mask.dtype == bool else x + mask

  scale, apply_mask, exp, total, divide, cast = map(
    jax.jit,
    (
      lambda x: x * jnp.asarray(SCALE, x.dtype),
      apply_mask,
      jnp.exp,
      lambda x: jnp.sum(x, axis=-1, keepdims=True, dtype=np.float32),
      lambda x, total: x.astype(np.float32) / total,
      lambda x: x.astype(jnp.bfloat16),
    ),
  )

  def fun(x, mask):
    x = scale(x)
    if mask is not None:
      x = apply_mask(x, mask)
    x = exp(x)
    return cast(divide(x, total(x)))

  return fun


def _backward_xla(case: Case) -> Callable:
  def fun(y, dy):
    y, dy = (a.astype(np.float32) for a in (y, dy))
    dx = SCALE * y * (dy - jnp.sum(y * dy, axis=-1, keepdims=True))
    band = _in_band(case, y.shape)
    return (dx if band is None else jnp.where(band, dx, 0.0)).astype(jnp.bfloat16)

  return fun


def _backward(forward: Callable, x, mask, dy) -> float:
  """The time of only the backward pass, from the residuals of one forward pass."""
  vjp = jax.jit(lambda x, mask: jax.vjp(lambda x: forward(x, mask), x)[1])(x, mask)
  return seconds(jax.jit(lambda vjp, dy: vjp(dy)), vjp, dy)


def copy_rate(shape: tuple[int, ...]) -> float:
  """The bytes per second, read and written, of a copy."""
  x = jnp.zeros(shape, jnp.bfloat16)
  return 2 * x.nbytes / seconds(jax.jit(jnp.copy), x)


def time_case(name: str, shape: tuple[int, ...]) -> list[dict]:
  case = CASES[name]
  keys = jax.random.split(jax.random.key(0))
  x, dy = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
  mask = case.mask(shape)
  band = case.band(*shape[-2:])
  # The unfused pipeline has no other way to hide what the band does.
  dense = jnp.asarray(band.to_dense()) if case.options else mask
  size, visible = x.size, band.area() / math.prod(shape[-2:])
  forward_bytes = x.itemsize * size * (1 + visible) + (0 if mask is None else mask.nbytes)
  backward_bytes = x.itemsize * size * (1 + 2 * visible)
  y = jax.jit(_ours(case))(x, mask)
  times = {
    ("forward", "ours"): seconds(jax.jit(_ours(case)), x, mask),
    ("forward", "xla"): seconds(jax.jit(_xla(case)), x, mask),
    ("forward", "unfused"): seconds(_unfused(), x, dense),
    ("backward", "ours"): _backward(_ours(case), x, mask, dy),
    ("backward", "xla"): seconds(jax.jit(_backward_xla(case)), y, dy),
    ("backward", "autodiff"): _backward(_xla(case), x, mask, dy),
  }
  return [
    {
      "shape": shape,
      "case": name,
      "pass": direction,
      "by": by,
      "ms": 1e3 * time,
      "bytes": int(forward_bytes if direction == "forward" else backward_bytes),
    }
    for (direction, by), time in times.items()
  ]


def print_rows(rows: list[dict], copy: float) -> None:
  """Prints one line per pass: our time and rate, and how much longer the others take."""
  for direction in ("forward", "backward"):
    own = {r["by"]: r for r in rows if r["pass"] == direction}
    ours = own.pop("ours")
    rate = ours["bytes"] / ours["ms"] * 1e3
    others = "  ".join(f"{by} {r['ms'] / ours['ms']:5.2f}x" for by, r in own.items())
    text = f"{ours['ms']:8.3f} ms {rate / 1e9:6.0f} GB/s {rate / copy:5.0%}  {others}"
    print(f"  {ours['case']:27} {direction:9} {text}", flush=True)


def plot(rows: list[dict], path: Path) -> None:
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  shapes = list(dict.fromkeys(tuple(r["shape"]) for r in rows))
  size = (5.5 * len(shapes), 7)
  figure, axes = plt.subplots(2, len(shapes), figsize=size, layout="constrained", squeeze=False)
  for column, shape in enumerate(shapes):
    for row, direction in enumerate(("forward", "backward")):
      ax = axes[row, column]
      own = [r for r in rows if tuple(r["shape"]) == shape and r["pass"] == direction]
      for i, by in enumerate(dict.fromkeys(r["by"] for r in own)):
        heights = [r["ms"] for r in own if r["by"] == by]
        bars = ax.bar(np.arange(len(CASES)) + 0.27 * i, heights, 0.25, label=by)
        ax.bar_label(bars, fmt="%.2f", fontsize=6)
      ax.set_xticks(np.arange(len(CASES)) + 0.27, [name.replace(" ", "\n", 2) for name in CASES])
      ax.tick_params(axis="x", labelsize=7)
      ax.set(title=f"{direction}, {list(shape)} bf16", ylabel="ms")
      ax.margins(y=0.2)  # For the legend.
      ax.legend(fontsize=8, loc="upper left", ncols=3)
  figure.savefig(path, dpi=120)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--json", type=Path)
  parser.add_argument("--plot", type=Path)
  arguments = parser.parse_args()
  shapes = GPU_SHAPES if jax.default_backend() == "gpu" else CPU_SHAPES
  device = jax.devices()[0]
  results: dict[str, Any] = {"device": device.device_kind, "copy_bytes_per_s": {}, "rows": []}
  for shape in shapes:
    copy = copy_rate(shape)
    print(f"{list(shape)} bf16, {device.device_kind}, copy {copy / 1e9:.0f} GB/s")
    rows = []
    for name in CASES:
      rows += time_case(name, shape)
      print_rows([r for r in rows if r["case"] == name], copy)
    copies = [copy, copy_rate(shape)]
    print(f"  copy again {copies[1] / 1e9:.0f} GB/s")
    results["copy_bytes_per_s"][str(list(shape))] = copies
    results["rows"] += rows
  if arguments.json:
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")
  if arguments.plot:
    plot(results["rows"], arguments.plot)


if __name__ == "__main__":
  main()
