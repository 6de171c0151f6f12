"""Times the CUDA kernels against the available baselines, for each mask and length.

Rates are TFLOP/s over visible pairs: 4 * area * head_dim * heads for a forward pass, and 2.5 times
that for a backward pass (five products instead of two; recomputation does not count). If values and
keys have different head dims, two of the five products, and one of the two, have that of values.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_magi
from benchmarks import jax_passes, timing
from benchmarks.attention_bias import time_bias
from benchmarks.beside import Beside
from benchmarks.masks import MASKS, SAME_AREA, documents, varlen_of_same_area
from benchmarks.peers import Cell, Peer
from jax_magi import AttentionMask

LENGTHS = [2**i for i in range(10, 17)]
BACKWARD_LENGTHS = [n for n in LENGTHS if n <= 32768]
# head_dim, query heads, kv heads
MODELS = [(128, 48, 8), (64, 32, 32)]
# Masks that most baselines support. These are also timed in both models, and as single calls.
SIMPLE = ("full", "causal", "window")
# With `--dims`, so many heads, and these masks alone.
NUM_HEADS_OF_DIMS, MASKS_OF_DIMS = 64, (*SIMPLE, "varlen_causal")
# Lengths for which the deterministic backward pass is timed, too. At the first, documents begin at
# multiples of the units in which queries take turns; at the second, anywhere.
DETERMINISTIC_LENGTHS = (8192, 16384)


@dataclasses.dataclass(frozen=True)
class Choice:
  """What to time instead of the two models.

  Attributes:
    dims: the head dims of keys and of values. None means the two models.
    implementation: our implementation.
    masks: the masks to time with `dims`.
  """

  dims: tuple[int, int] | None = None
  implementation: str = "cuda"
  masks: tuple[str, ...] = MASKS_OF_DIMS


# A few launches in a row, whatever they take: one alone would show the host's part too.
seconds = functools.partial(timing.seconds, min_calls=3, budget=0.06)


def matrix_product_rate() -> float:
  """The TFLOP/s of an 8192^3 bf16 product, which shows the current state of the card."""
  keys = jax.random.split(jax.random.key(0))
  a, b = (jax.random.normal(key, (8192, 8192), jnp.bfloat16) for key in keys)
  return 2 * 8192**3 / seconds(jax.jit(jnp.matmul), a, b) / 1e12


def _ours(mask: AttentionMask, **options) -> Callable:
  """Our attention, with the mask as a constant of the program."""
  options = {"implementation": "cuda"} | options
  return lambda q, k, v: jax_magi.attention(q, k, v, mask, **options)[0]


def _flop(cell: Cell) -> float:
  by_key, by_value = {"forward": (1, 1), "backward": (3, 2)}[cell.direction]
  head_dim, value_dim = cell.dims
  flop_per_pair = 2 * (by_key * head_dim + by_value * value_dim)
  return flop_per_pair * cell.mask.area() * cell.num_q_heads


def _rate(cell: Cell, **options) -> float:
  """Our TFLOP/s."""
  ours = _ours(cell.mask, implementation=cell.implementation, **options)
  return _flop(cell) / jax_passes.seconds(ours, cell) / 1e12


def _add_peers(row: dict, cell: Cell, beside: Beside, names=None, suffix: str = "") -> None:
  """Adds the rates of baselines, and the reasons of those that failed."""
  times, notes = beside.times(cell, names)
  row |= {name + suffix: _flop(cell) / time / 1e12 for name, time in times.items()}
  if notes:
    row["notes"] = row.get("notes", {}) | {name + suffix: note for name, note in notes.items()}


def _ratios(row: dict, beside: Beside) -> str:
  found = [
    f"{row['ours'] / row[name]:5.2f}x {beside.peers[name].title}"
    for name in beside.present
    if name in row
  ]
  failed = [f"{name} failed: {note}" for name, note in row.get("notes", {}).items()]
  return ", ".join(found + failed)


def _beside_peers(cell: Cell, beside: Beside) -> tuple[dict, str]:
  """Our rate and those of baselines, as a row and in words."""
  row = {"head_dim": cell.head_dim, "length": cell.length, "mask": cell.name, "ours": _rate(cell)}
  if cell.value_dim:
    row["value_dim"] = cell.value_dim
  _add_peers(row, cell, beside)
  return row, _ratios(row, beside)


def _print_row(row: dict, text: str) -> None:
  place = f"{row['head_dim']:4} {row['length']:6} {row['mask']:20}"
  print(f"  {place} {row['ours']:7.1f} {text}", flush=True)


def _cells(lengths: list[int], direction: str, choice: Choice) -> Iterator[Cell]:
  options: dict[str, Any] = {"direction": direction, "implementation": choice.implementation}
  if choice.dims:
    head_dim, value_dim = choice.dims
    heads = (NUM_HEADS_OF_DIMS, NUM_HEADS_OF_DIMS)
    for length, name in itertools.product(lengths, choice.masks):
      yield Cell(name, MASKS[name](length), head_dim, *heads, value_dim=value_dim, **options)
    return
  for head_dim, num_q_heads, num_kv_heads in MODELS:
    for length in lengths:
      for name, make in MASKS.items():
        if direction == "backward" and name not in SIMPLE and head_dim != MODELS[0][0]:
          continue
        yield Cell(name, make(length), head_dim, num_q_heads, num_kv_heads, **options)


def time_forward(lengths: list[int], beside: Beside, choice: Choice) -> list[dict]:
  rows = []
  for cell in _cells(lengths, "forward", choice):
    row, text = _beside_peers(cell, beside)
    if cell.name in SAME_AREA:
      other = dataclasses.replace(cell, mask=varlen_of_same_area(cell.mask))
      row["varlen_full_of_same_area"] = _rate(other)
      text += f" {row['ours'] / row['varlen_full_of_same_area']:5.2f}x varlen of same area"
    rows.append(row)
    _print_row(row, text)
  return rows


def time_backward(lengths: list[int], beside: Beside, choice: Choice) -> list[dict]:
  rows = []
  for cell in _cells(lengths, "backward", choice):
    row, text = _beside_peers(cell, beside)
    if cell.length in DETERMINISTIC_LENGTHS:
      row["deterministic"] = _rate(cell, deterministic=True)
      text += f" {100 * (row['ours'] / row['deterministic'] - 1):4.0f}% slower deterministic"
    if cell.name in SIMPLE and cell.length <= jax_passes.SHORT:
      single = dataclasses.replace(cell, is_single=True)
      row["single"] = _rate(single)
      _add_peers(row, single, beside, ("cudnn",), "_single")
      if "cudnn_single" in row:
        text += f", alone {row['single']:7.1f} {row['single'] / row['cudnn_single']:6.2f}x cuDNN"
    rows.append(row)
    _print_row(row, text)
  return rows


def _inputs(length: int, head_dim: int, num_q_heads: int, num_kv_heads: int) -> list[jax.Array]:
  cell = Cell("full", AttentionMask.full(length), head_dim, num_q_heads, num_kv_heads)
  return jax_passes.inputs(cell)


def _percent(cost: float, error: float) -> str:
  return f"{100 * cost:+.2f}% +- {100 * error:.2f}%"


def time_traced_masks(length: int = 2048) -> list[dict]:
  """The cost of a mask that is an argument of the program instead of a constant.

  The program has several calls, like a model: a single call would measure the host.
  """

  def chain(q, k, v, mask):
    for _ in range(8):
      q = jax_magi.attention(q, k, v, mask, implementation="cuda")[0]
    return q

  rows = []
  for model in MODELS:
    operands = _inputs(length, *model)
    for name in ("full", "causal", "varlen_causal"):
      mask = MASKS[name](length)

      def chain_of_constant(q, k, v, _, mask=mask):
        return chain(q, k, v, mask)

      versions = [chain_of_constant, chain]
      cost, error = timing.extra_cost(versions, *operands, jax.device_put(mask))
      row = {"head_dim": model[0], "length": length, "mask": name}
      rows.append(row | {"traced_cost": cost, "standard_error": error})
      print(f"  {model[0]:4} {length:6} {name:14} {_percent(cost, error)}", flush=True)
  return [*rows, *_time_traced_batches()]


def _time_traced_batches(num_rows: int = 16, length: int = 8192) -> list[dict]:
  """The same for a batch with one mask per row, compared with one known mask of all documents.

  With 16 rows of 64 documents, the device has 2,064 candidates for the ends of tiles.
  """
  rng, rows = np.random.default_rng(0), []

  def attention(q, k, v, slices):
    mask = AttentionMask(slices, length, length)
    return jax_magi.attention(q, k, v, mask, implementation="cuda")[0]

  def call_of_traced(q, k, v, slices):
    parts = (x.reshape(num_rows, length, *x.shape[1:]) for x in (q, k, v))
    return jax.vmap(attention)(*parts, slices).reshape(q.shape)

  for model, num_documents in itertools.product(MODELS, (16, 64)):
    ends = [rng.choice(np.arange(1, length), num_documents - 1, False) for _ in range(num_rows)]
    cuts = [np.array([0, *sorted(x), length]) for x in ends]
    slices = np.stack([AttentionMask.from_cu_seqlens(x, causal=True).slices for x in cuts])
    begins = np.concatenate([x[:-1] + i * length for i, x in enumerate(cuts)])
    known = AttentionMask.from_cu_seqlens([*begins, num_rows * length], causal=True)

    def call_of_known(q, k, v, _, known=known):
      return jax_magi.attention(q, k, v, known, implementation="cuda")[0]

    operands = *_inputs(num_rows * length, *model), jax.device_put(slices)
    cost, error = timing.extra_cost([call_of_known, call_of_traced], *operands)
    row = {"head_dim": model[0], "length": length, "mask": f"{num_rows} x {num_documents}"}
    rows.append(row | {"traced_cost": cost, "standard_error": error})
    print(f"  {model[0]:4} {length:6} {row['mask']:14} {_percent(cost, error)}", flush=True)
  return rows


def time_max_logits(lengths: list[int]) -> list[dict]:
  """The cost of return_max_logits=True, measured with on and off in turns."""
  rows = []
  for length in lengths:
    operands = _inputs(length, *MODELS[0])
    for name in ("full", "causal", "varlen_full", "varlen_causal"):
      mask = MASKS[name](length)

      def fun(q, k, v, asked, mask=mask):
        options = {"return_max_logits": asked, "implementation": "cuda"}
        out, meta = jax_magi.attention(q, k, v, mask, **options)
        return out, meta.max_logits

      versions = [functools.partial(fun, asked=asked) for asked in (False, True)]
      cost, error = timing.extra_cost(versions, *operands)
      row = {"length": length, "mask": name, "max_logits_cost": cost, "standard_error": error}
      rows.append(row)
      print(f"  {length:6} {name:14} {_percent(cost, error)}", flush=True)
  return rows


def time_scale(length: int = 1 << 20) -> list[dict]:
  """The time and the total memory of a forward and backward pass over a million tokens."""
  masks = {
    "window": AttentionMask.sliding_window(length, left=4095),
    "varlen_causal": AttentionMask.from_cu_seqlens(documents(length), causal=True),
  }
  head_dim, num_q_heads, num_kv_heads = MODELS[0]
  q, k, v = _inputs(length, head_dim, num_q_heads, num_kv_heads)
  rows = []
  for name, mask in masks.items():

    def both(q, k, v, mask=mask):
      out, vjp = jax.vjp(_ours(mask), q, k, v)
      return out, vjp(out)

    compiled = jax.jit(both).lower(q, k, v).compile()
    time = timing.seconds(compiled, q, k, v, repeats=3)
    memory = compiled.memory_analysis()
    num_bytes = sum(
      getattr(memory, f"{kind}_size_in_bytes") for kind in ("argument", "output", "temp")
    )
    rate = 14 * mask.area() * head_dim * num_q_heads / time / 1e12
    row = {"mask": name, "length": length, "num_slices": len(mask.slices), "seconds": time}
    rows.append(row | {"rate": rate, "gigabytes": num_bytes / 1e9})
    print(f"  {name:14} {time:6.3f} s {rate:6.1f} TFLOP/s {num_bytes / 1e9:6.1f} GB", flush=True)
  return rows


def plot(rows: list[dict], beside: Beside, path: Path, title: str) -> None:
  """Draws a row of axes for each model, a column for each mask, and a curve for each baseline."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  curves = {"ours": "jax_magi"} | {name: beside.peers[name].title for name in beside.present}
  size = (2.3 * len(MASKS), 2.6 * len(MODELS))
  figure, axes = plt.subplots(
    len(MODELS),
    len(MASKS),
    figsize=size,
    layout="constrained",
    sharex=True,
    sharey="row",
    squeeze=False,
  )
  handles = {}
  for i, (head_dim, num_q_heads, num_kv_heads) in enumerate(MODELS):
    for j, mask in enumerate(MASKS):
      ax = axes[i, j]
      own = [r for r in rows if r["head_dim"] == head_dim and r["mask"] == mask]
      for color, (name, label) in enumerate(curves.items()):
        points = [(r["length"], r[name]) for r in own if name in r]
        if points:
          style = {"lw": 2, "ms": 4} if name == "ours" else {"lw": 1, "ls": "--", "ms": 3}
          (handles[label],) = ax.plot(
            *zip(*points, strict=True), marker="o", color=f"C{color}", **style
          )
      ax.set_xscale("log", base=2)
      if i == 0:
        ax.set_title(mask, fontsize=9)
    axes[i, 0].set_ylim(bottom=0)  # Now that the whole row is drawn, which shares it.
    axes[i, 0].set_ylabel(f"head_dim {head_dim}, {num_q_heads}/{num_kv_heads} heads", fontsize=8)
  figure.suptitle(f"{title}: TFLOP/s over visible pairs, by number of tokens")
  figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles))
  figure.savefig(path, dpi=120)
  plt.close(figure)


# Part of the benchmark -> its rows, given the numbers of tokens or none, the peers, and the choice.
PARTS: dict[str, Callable[[list[int] | None, Beside, Choice], list[dict]]] = {
  "forward": lambda lengths, *others: time_forward(lengths or LENGTHS, *others),
  "backward": lambda lengths, *others: time_backward(lengths or BACKWARD_LENGTHS, *others),
  "max_logits": lambda lengths, *_: time_max_logits(lengths or [4096, 8192, 16384]),
  "traced_masks": lambda *_: time_traced_masks(),
  "scale": lambda *_: time_scale(),
  "bias": lambda lengths, _, choice: time_bias(lengths or [8192], choice.dims),
}
_TITLES = {
  "forward": "   dim tokens mask                 TFLOP/s",
  "backward": "   dim tokens mask                 TFLOP/s, backward alone",
  "max_logits": "cost of return_max_logits=True",
  "traced_masks": "cost of a mask that is an argument of the program",
  "scale": "forward + backward of 1,048,576 tokens, 48/8 heads of 128",
  "bias": "time of bias and slopes over none",
}


def main(
  json_path: Path | None,
  plot_path: Path | None,
  parts: list[str],
  lengths: list[int] | None,
  peers: Sequence[Peer],
  choice: Choice,
) -> None:
  device = jax.devices()[0]
  rate = matrix_product_rate()
  print(f"{device.device_kind}, 8192^3 bf16 matrix product {rate:.0f} TFLOP/s")
  with Beside(peers) as beside:
    print(beside.summary(), flush=True)
    results: dict[str, Any] = {"device": device.device_kind, "peers": beside.describe()}
    for part in parts or PARTS:
      print(_TITLES[part])
      results[part] = PARTS[part](lengths, beside, choice)
      if json_path:  # After each part, so that an interrupted run keeps its figures.
        json_path.write_text(json.dumps(results, indent=1) + "\n")
  rate_after = matrix_product_rate()
  print(f"matrix product again {rate_after:.0f} TFLOP/s")
  results["matrix_product"] = [rate, rate_after]
  if json_path:
    json_path.write_text(json.dumps(results, indent=1) + "\n")
  if plot_path:
    for part in ("forward", "backward"):
      if part in results:
        plot(results[part], beside, plot_path.with_stem(f"{plot_path.stem}_{part}"), part)
