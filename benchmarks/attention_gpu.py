"""Times the CUDA kernels beside JAX's cuDNN attention, mask by mask and length by length.

Rates are TFLOP/s over visible pairs: 4 * area * head_dim * heads for a forward pass, 2.5 times that
for a backward pass alone (five products instead of two; what it recomputes does not count).
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_magi
from benchmarks import timing
from jax_magi import AttentionMask

LENGTHS = [2**i for i in range(10, 17)]
# head_dim, query heads, kv heads
MODELS = [(128, 48, 8), (64, 32, 32)]
WINDOW = 1024
# Up to this length the host may take longer to start a call than the device to make it: such calls
# are timed by eight in a program, as a model has them.
SHORT = 4096
# Where the deterministic backward pass is timed, too.
DETERMINISTIC_LENGTH = 8192


def documents(length: int, seed: int = 0, shrink: float = 1.0) -> list[int]:
  """Bounds of documents of 128 .. 4096 tokens, or `shrink` times that."""
  rng = np.random.default_rng(seed)
  bounds = [0]
  while bounds[-1] < length:
    tokens = round(shrink * int(rng.integers(128, 4097)))
    bounds.append(min(length, bounds[-1] + tokens))
  return bounds


def _varlen_of_same_area(mask: AttentionMask) -> AttentionMask:
  """Full attention in documents so much shorter that the area is `mask`'s."""
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
# Masks that no peer has are held against full attention in documents of the same area.
SAME_AREA = ("varlen_block_causal", "shared_question")
CUDNN: dict[str, dict[str, Any]] = {
  "full": {},
  "causal": {"is_causal": True},
  "window": {"is_causal": True, "local_window_size": (WINDOW - 1, 0)},
}


# A few launches in a row, whatever they take: one alone would show the host's part too.
seconds = functools.partial(timing.seconds, min_calls=3, budget=0.06)


def matrix_product_rate() -> float:
  """TFLOP/s of an 8192^3 bf16 product: what this card does now."""
  keys = jax.random.split(jax.random.key(0))
  a, b = (jax.random.normal(key, (8192, 8192), jnp.bfloat16) for key in keys)
  return 2 * 8192**3 / seconds(jax.jit(jnp.matmul), a, b) / 1e12


def _cudnn(q, k, v, options):
  batch = (x[None] for x in (q, k, v))
  return jax.nn.dot_product_attention(*batch, implementation="cudnn", **options)


def _ours(mask: AttentionMask) -> Callable:
  """With a concrete mask, as a constant of the program."""
  return lambda q, k, v: jax_magi.attention(q, k, v, mask, implementation="cuda")[0]


def _forward_seconds(attention: Callable, q, k, v) -> float:
  """Of one call."""
  if len(q) > SHORT:
    return seconds(jax.jit(attention), q, k, v)
  queries = [jnp.roll(q, i, axis=0) for i in range(8)]  # Equal calls would be made once.
  program = jax.jit(lambda queries, k, v: [attention(q, k, v) for q in queries])
  return seconds(program, queries, k, v) / len(queries)


def time_forward(lengths: list[int]) -> list[dict]:
  rows = []
  for head_dim, num_q_heads, num_kv_heads in MODELS:
    for length in lengths:
      q, k, v = _inputs(length, head_dim, num_q_heads, num_kv_heads)
      for name, make in MASKS.items():
        mask = make(length)
        flop = 4 * mask.area() * head_dim * num_q_heads

        row = {"head_dim": head_dim, "length": length, "mask": name}
        row["ours"] = flop / _forward_seconds(_ours(mask), q, k, v) / 1e12
        if name in CUDNN:
          cudnn = functools.partial(_cudnn, options=CUDNN[name])
          row["cudnn"] = flop / _forward_seconds(cudnn, q, k, v) / 1e12
        if name in SAME_AREA:
          other = _varlen_of_same_area(mask)
          other_flop = 4 * other.area() * head_dim * num_q_heads
          rate = other_flop / _forward_seconds(_ours(other), q, k, v) / 1e12
          row["varlen_full_of_same_area"] = rate
        rows.append(row)
        ratio = ""
        if "cudnn" in row:
          ratio = f"{row['ours'] / row['cudnn']:6.2f}x cuDNN"
        elif "varlen_full_of_same_area" in row:
          ratio = f"{row['ours'] / row['varlen_full_of_same_area']:6.2f}x varlen of same area"
        print(f"  {head_dim:4} {length:6} {name:20} {row['ours']:7.1f} {ratio}", flush=True)
  return rows


def _backward_seconds(attention: Callable, q, k, v, *, is_single: bool = False) -> float:
  """Of one backward pass alone, from residuals of one forward pass."""
  out, vjp = jax.jit(lambda q, k, v: jax.vjp(attention, q, k, v))(q, k, v)
  keys = jax.random.split(jax.random.key(1), 8 if len(q) <= SHORT and not is_single else 1)
  douts = [jax.random.normal(key, out.shape, out.dtype) for key in keys]
  program = jax.jit(lambda vjp, douts: [vjp(dout) for dout in douts])
  return seconds(program, vjp, douts) / len(douts)


def time_backward(lengths: list[int]) -> list[dict]:
  rows = []
  for head_dim, num_q_heads, num_kv_heads in MODELS:
    for length in lengths:
      q, k, v = _inputs(length, head_dim, num_q_heads, num_kv_heads)
      for name, make in MASKS.items():
        if name not in CUDNN and head_dim != 128:
          continue
        mask = make(length)
        flop = 10 * mask.area() * head_dim * num_q_heads

        def ours(q, k, v, mask=mask, deterministic=False):
          options = {"implementation": "cuda", "deterministic": deterministic}
          return jax_magi.attention(q, k, v, mask, **options)[0]

        def rate(attention, q=q, k=k, v=v, flop=flop, **options):
          return flop / _backward_seconds(attention, q, k, v, **options) / 1e12

        row = {"head_dim": head_dim, "length": length, "mask": name, "ours": rate(ours)}
        if length == DETERMINISTIC_LENGTH:
          row["deterministic"] = rate(functools.partial(ours, deterministic=True))
        if name in CUDNN:
          cudnn = functools.partial(_cudnn, options=CUDNN[name])
          row["cudnn"] = rate(cudnn)
        if name in CUDNN and length <= SHORT:
          row |= {"single": rate(ours, is_single=True), "cudnn_single": rate(cudnn, is_single=True)}
        rows.append(row)
        ratio = f"{row['ours'] / row['cudnn']:6.2f}x cuDNN" if "cudnn" in row else " " * 13
        if "single" in row:
          ratio += f", alone {row['single']:7.1f} {row['single'] / row['cudnn_single']:6.2f}x"
        slower = ""
        if "deterministic" in row:
          slower = f"{100 * (row['ours'] / row['deterministic'] - 1):4.0f}% slower deterministic"
        rate_text = f"{row['ours']:7.1f} {ratio} {slower}"
        print(f"  {head_dim:4} {length:6} {name:20} {rate_text}", flush=True)
  return rows


def _compare(versions: list[Callable], arguments: list[tuple]) -> float:
  """How much longer the second takes than the first, as the clock drifts: in turns, many times."""
  ratios = []
  for i in range(150):
    times = {}
    for j in (0, 1) if i % 2 else (1, 0):  # Neither is always the first.
      times[j] = seconds(versions[j], *arguments[j], budget=0.012, repeats=1)
    ratios.append(times[1] / times[0])
  return statistics.median(ratios) - 1


def _inputs(length: int, head_dim: int, num_q_heads: int, num_kv_heads: int) -> list[jax.Array]:
  keys = jax.random.split(jax.random.key(length), 3)
  heads = (num_q_heads, num_kv_heads, num_kv_heads)
  return [
    jax.random.normal(key, (length, h, head_dim), jnp.bfloat16)
    for key, h in zip(keys, heads, strict=True)
  ]


def time_traced_masks(length: int = 2048) -> list[dict]:
  """Cost of a mask that is an argument of the program, over one that is a constant of it.

  A program of several calls, as a model is: one alone takes no longer than the host to start it.
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
      on_device = jax.device_put(mask)
      versions = [jax.jit(functools.partial(chain, mask=mask)), jax.jit(chain)]
      cost = _compare(versions, [tuple(operands), (*operands, on_device)])
      rows.append({"head_dim": model[0], "length": length, "mask": name, "traced_cost": cost})
      print(f"  {model[0]:4} {length:6} {name:14} {100 * cost:+.2f}%", flush=True)
  return rows


def time_max_logits(lengths: list[int]) -> list[dict]:
  """Cost of return_max_logits=True, on and off in turns."""
  rows = []
  for length in lengths:
    operands = tuple(_inputs(length, *MODELS[0]))
    for name in ("full", "causal", "varlen_full", "varlen_causal"):
      mask = MASKS[name](length)

      def fun(q, k, v, asked, mask=mask):
        options = {"return_max_logits": asked, "implementation": "cuda"}
        out, meta = jax_magi.attention(q, k, v, mask, **options)
        return out, meta.max_logits

      versions = [jax.jit(functools.partial(fun, asked=asked)) for asked in (False, True)]
      cost = _compare(versions, [operands, operands])
      rows.append({"length": length, "mask": name, "max_logits_cost": cost})
      print(f"  {length:6} {name:14} {100 * cost:+.2f}%", flush=True)
  return rows


def time_scale(length: int = 1 << 20) -> list[dict]:
  """Forward and backward of a million tokens, in time and in the memory that all of it takes."""
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


def plot(rows: list[dict], path: Path, title: str) -> None:
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(1, len(MODELS), figsize=(11, 4), layout="constrained")
  for ax, (head_dim, num_q_heads, num_kv_heads) in zip(axes, MODELS, strict=True):
    for i, name in enumerate(MASKS):
      own = [r for r in rows if r["head_dim"] == head_dim and r["mask"] == name]
      lengths = [r["length"] for r in own]
      ax.plot(lengths, [r["ours"] for r in own], "o-", color=f"C{i}", label=name)
      if name in CUDNN:
        ax.plot(lengths, [r["cudnn"] for r in own], "x--", color=f"C{i}", alpha=0.6)
    ax.set_xscale("log", base=2)
    ax.set(title=f"{title}, head_dim {head_dim}, {num_q_heads}/{num_kv_heads} heads")
    ax.set(xlabel="tokens", ylabel="TFLOP/s over visible pairs (dashed: cuDNN)")
  axes[0].legend(fontsize=8)
  figure.savefig(path, dpi=120)


# Part of the benchmark -> its rows, given the numbers of tokens or none.
PARTS: dict[str, Callable[[list[int] | None], list[dict]]] = {
  "forward": lambda lengths: time_forward(lengths or LENGTHS),
  "backward": lambda lengths: time_backward(lengths or [n for n in LENGTHS if n <= 32768]),
  "max_logits": lambda lengths: time_max_logits(lengths or [4096, 8192, 16384]),
  "traced_masks": lambda _: time_traced_masks(),
  "scale": lambda _: time_scale(),
}
_TITLES = {
  "forward": "   dim tokens mask                 TFLOP/s",
  "backward": "   dim tokens mask                 TFLOP/s, backward alone",
  "max_logits": "cost of return_max_logits=True",
  "traced_masks": "cost of a mask that is an argument of the program",
  "scale": "forward + backward of 1,048,576 tokens, 48/8 heads of 128",
}


def main(
  json_path: Path | None, plot_path: Path | None, parts: list[str], lengths: list[int] | None
) -> None:
  device = jax.devices()[0]
  rate = matrix_product_rate()
  print(f"{device.device_kind}, 8192^3 bf16 matrix product {rate:.0f} TFLOP/s")
  results: dict[str, Any] = {"device": device.device_kind}
  for part in parts or PARTS:
    print(_TITLES[part])
    results[part] = PARTS[part](lengths)
  rate_after = matrix_product_rate()
  print(f"matrix product again {rate_after:.0f} TFLOP/s")
  results["matrix_product"] = [rate, rate_after]
  if json_path:
    json_path.write_text(json.dumps(results, indent=1) + "\n")
  if plot_path:
    for part in ("forward", "backward"):
      if part in results:
        plot(results[part], plot_path.with_stem(f"{plot_path.stem}_{part}"), part)
