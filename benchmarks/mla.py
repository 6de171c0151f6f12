"""Multi-head latent attention: what expansion costs, what stays in memory, and how it scales.

python -m benchmarks.mla layer [--length 8192] [--json FILE]    (on one Hopper GPU)
python -m benchmarks.mla memory [--length 32768] [--layers 4] [--json FILE]    (likewise)
python -m benchmarks.mla measure --json FILE [--sizes 8 64]     (likewise)
python -m benchmarks.mla predict --json FILE [--markdown FILE]  (anywhere)

64 heads of 128 dims without rotation and 64 with it, values of 128, in 16 bit. Of a token, 512 + 64
numbers make the keys and values. `layer` times the kernels beside the products of the expansion and
the copies of rotary keys to all heads. `memory` is the peak of both passes over a few layers, with
latents kept or expanded keys and values. `measure` and `predict` are those of
benchmarks.context_parallel, with latents or expanded rows on the wire, and expansion timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_magi
from benchmarks.context_parallel import (
  LATENCY,
  MASKS,
  NETWORKS,
  NODE,
  NVLINK,
  kernels_of_ranks,
  time_ranks,
)
from benchmarks.rank_kernels import LOCAL, Kernels
from benchmarks.timing import seconds
from jax_magi import AttentionMask, Links
from jax_magi._src.context_parallel.predict import predict as predict_pass

HEADS, NOPE, ROPE, VALUE, RANK = 64, 128, 64, 128, 512
WIDTHS = {"latents": RANK + ROPE, "expanded": HEADS * (NOPE + ROPE + VALUE)}
DEGREES = (1, 2, 4)
_REPEATS = {"budget": 0.05, "repeats": 3}


def expand(latent: Any, kv_b: Any) -> tuple[Any, Any]:
  """k and v of rows `[n, 512 + 64]`."""
  k_nope, v = jnp.split(jnp.einsum("tr,rhd->thd", latent[:, :RANK], kv_b), [NOPE], axis=-1)
  return with_rotary(k_nope, latent[:, RANK:]), v


def with_rotary(k_nope: Any, k_rope: Any) -> Any:
  """Keys of all heads, each with the rotary key."""
  shape = (*k_nope.shape[:2], ROPE)
  return jnp.concatenate([k_nope, jnp.broadcast_to(k_rope[:, None], shape)], axis=-1)


def make_operands(length: int, count: int = 1) -> tuple[Any, Any, Any]:
  """q, latents, and the parameters of so many layers."""
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = [
    (length, HEADS, NOPE + ROPE),
    (length, RANK + ROPE),
    (count, RANK, HEADS, NOPE + VALUE),
  ]
  q, latent, kv_b = (
    jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
  )
  return q, latent, kv_b / RANK**0.5


# --- one layer ---


def time_layer(length: int) -> dict[str, dict[str, float]]:
  """Seconds of each part of a layer, alone in its program, by mask."""
  q, latent, (kv_b,) = make_operands(length)
  k, v = jax.jit(expand)(latent, kv_b)
  dout = jax.random.normal(jax.random.key(1), v.shape, v.dtype)
  results = {}
  for name in ("causal", "varlen causal"):
    mask = MASKS[name](length)

    def attend(q, k, v, mask=mask):
      return jax_magi.attention(q, k, v, mask)[0]

    def expanded(q, latent, kv_b):
      return attend(q, *expand(latent, kv_b))

    def recomputed(q, latent, kv_b, mask=mask):
      fun = functools.partial(expand, kv_b=kv_b)
      return jax_magi.latent_attention(q, latent, mask, expand=fun)[0]

    def without_rotary(latent, kv_b):
      k_nope, v = jnp.split(jnp.einsum("tr,rhd->thd", latent[:, :RANK], kv_b), [NOPE], axis=-1)
      return k_nope, v

    def times(fun, *operands, cotangents):
      """Forward, and both passes."""
      both = jax.jit(lambda operands, cotangents: jax.vjp(fun, *operands)[1](cotangents))
      return {
        "forward": seconds(jax.jit(fun), *operands, **_REPEATS),
        "both": seconds(both, operands, cotangents, **_REPEATS),
      }

    k_nope, rope = k[..., :NOPE], latent[:, RANK:]
    results[name] = {
      "kernels": times(attend, q, k, v, cotangents=dout),
      "expansion": times(expand, latent, kv_b, cotangents=(k, v)),
      "expansion without rotary keys": times(without_rotary, latent, kv_b, cotangents=(k_nope, v)),
      "rotary keys to all heads": times(with_rotary, k_nope, rope, cotangents=k),
      "layer, expanded keys kept": times(expanded, q, latent, kv_b, cotangents=dout),
      "layer, latents kept": times(recomputed, q, latent, kv_b, cotangents=dout),
    }
    whole = results[name]["layer, expanded keys kept"]
    print(f"\n{name}, {length} tokens\n\n| part | forward, ms | both passes, ms | of the layer |")
    print("|---|---|---|---|")
    for part, x in results[name].items():
      print(
        f"| {part} | {1e3 * x['forward']:.3f} | {1e3 * x['both']:.3f} | "
        f"{x['both'] / whole['both']:.1%} |"
      )
    # What an operand pair (k_nope, k_rope) could save at most.
    parts = [results[name][part]["both"] for part in list(results[name])[1:4]]
    saved = max(parts[0] - parts[1], 0.0)
    print(f"\nan operand pair could save {saved / whole['both']:.1%} of the layer")
  return results


# --- memory ---

_KINDS = ("latents kept", "expanded keys kept")


def measure_memory(kind: str, length: int, num_layers: int) -> dict[str, float]:
  """Bytes at the peak of both passes over layers, whose latents are made of a stream of tokens."""
  embed = 1024
  q, _, kv_b = make_operands(length, num_layers)
  mask = AttentionMask.causal(length)
  keys = jax.random.split(jax.random.key(2), 3)
  x = jax.random.normal(keys[0], (length, embed), jnp.bfloat16)
  shapes = ((num_layers, embed, RANK + ROPE), (num_layers, HEADS, VALUE, embed))
  kv_a, out_proj = (
    jax.random.normal(key, shape, jnp.bfloat16) / 64
    for key, shape in zip(keys[1:], shapes, strict=True)
  )

  def layer(x, weights):
    kv_a, kv_b, out_proj = weights
    latent = x @ kv_a
    if kind == _KINDS[0]:
      fun = functools.partial(expand, kv_b=kv_b)
      out, _ = jax_magi.latent_attention(q, latent, mask, expand=fun)
    else:
      out, _ = jax_magi.attention(q, *expand(latent, kv_b), mask)
    return x + jnp.einsum("thd,hde->te", out, out_proj), None

  def loss(x, weights):
    return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(np.float32) ** 2)

  step = jax.jit(jax.grad(loss, (0, 1)))
  weights = (kv_a, kv_b, out_proj)
  compiled = step.lower(x, weights).compile()
  time_ms = 1e3 * seconds(compiled, x, weights, budget=0.2, repeats=3)
  stats = jax.devices()[0].memory_stats() or {}
  analysis = compiled.memory_analysis()
  return {
    "peak_bytes": stats.get("peak_bytes_in_use", 0),
    "temporary_bytes": analysis.temp_size_in_bytes,
    "time_ms": time_ms,
  }


def compare_memory(length: int, num_layers: int) -> dict[str, Any]:
  """Each kind in a process of its own, as a peak is that of a process."""
  results = {}
  print(f"{num_layers} layers of {length} causal tokens, forward and backward\n")
  print("| | peak of the GPU, GB | temporary memory of the program, GB | ms |\n|---|---|---|---|")
  for number, kind in enumerate(_KINDS):
    command = [sys.executable, "-m", "benchmarks.mla", "memory", "--length", str(length)]
    command += ["--layers", str(num_layers), "--kind", str(number)]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    results[kind] = x = json.loads(done.stdout.splitlines()[-1])
    print(
      f"| {kind} | {x['peak_bytes'] / 1e9:.2f} | {x['temporary_bytes'] / 1e9:.2f} | "
      f"{x['time_ms']:.1f} |"
    )
  return results


# --- how it scales ---


def links_of(form: str, network: float = NETWORKS[0]) -> Links:
  """What a token's rows and pairs cost."""
  rows = jax.ShapeDtypeStruct((1, WIDTHS[form]), jnp.bfloat16)
  links = Links(near=NVLINK, far=network, latency=LATENCY)
  return links.for_rows(rows).for_heads(HEADS, NOPE + ROPE, VALUE)


def make_key(form: str, name: str, cp_size: int, degree: int) -> jax_magi.DistAttnKey:
  """The plan of a mask on ranks of 8192 tokens."""
  key = jax_magi.magi_attn_flex_key(
    MASKS[name](cp_size * LOCAL),
    cp_size=cp_size,
    overlap_degree=degree,
    ranks_per_node=min(NODE, cp_size),
    links=links_of(form),
  )
  if form == "latents":  # Its stages merge results, as `calc_latent_attn` has it.
    key = dataclasses.replace(key, whole_slices=None, whole_runs=None)
  return key


def stage_lengths(key: jax_magi.DistAttnKey) -> list[int]:
  """Rows of each stage, padding included."""
  return [LOCAL] * bool(key.spec.overlap_degree) + list(key.capacities.rows)


class Expansion:
  """Seconds of the expansion of some rows: forward, and backward with expansion again."""

  def __init__(self):
    self._forward = jax.jit(expand)
    self._backward = jax.jit(lambda x, w, k, v: jax.vjp(expand, x, w)[1]((k, v)))

  @functools.cache  # noqa: B019 (it lives as long as the program)
  def times(self, count: int) -> tuple[float, float]:
    """Of so many rows."""
    if not count:
      return 0.0, 0.0
    _, latent, (kv_b,) = make_operands(count)
    k, v = self._forward(latent, kv_b)
    return (
      seconds(self._forward, latent, kv_b, **_REPEATS),
      seconds(self._backward, latent, kv_b, k, v, **_REPEATS),
    )


def measure(names: list[str], sizes: list[int], degrees: list[int], path: Path) -> None:
  """Writes what it has after each cell, so that a run that is cut short is not lost."""
  kernels, expansion = Kernels((HEADS, HEADS), (NOPE + ROPE, VALUE)), Expansion()
  cells: list[dict[str, Any]] = []
  alone: dict[str, Any] = {}
  data = {"device": jax.devices()[0].device_kind, "alone": alone, "cells": cells}
  for name in names:
    length = 2 * LOCAL
    mask = MASKS[name](length)
    forward, backward = kernels.alone(np.asarray(mask.pad(256).slices), length)
    own = expansion.times(LOCAL)
    alone[name] = {"area": mask.area(), "seconds": forward + backward, "expansion": sum(own)}
    for cp_size in sizes:
      for form in WIDTHS:
        for degree in degrees:
          key = make_key(form, name, cp_size, degree)
          counts = stage_lengths(key) if form == "latents" else [LOCAL]
          cell = {"mask": name, "form": form, "cp_size": cp_size, "degree": degree}
          cell |= time_ranks(kernels, key)
          cell["expansion"] = [expansion.times(count) for count in counts]
          cells.append(cell)
          slowest = (np.sum(cell[name], axis=1).max() for name in ("forward", "backward"))
          times = *slowest, np.sum(cell["expansion"])
          print(f"{name}, {form}, cp {cp_size}, degree {degree}: ms {1e3 * np.array(times)}")
          path.write_text(json.dumps(data, indent=1) + "\n")


def predict(data: dict[str, Any]) -> str:
  """A table: each form with the degree that is predicted to end first."""
  lines = [
    "| mask | ranks | GB/s a NIC | on the wire | transport, degree | work, max / mean | rows "
    "between nodes, in a node | ms at a GPU's rate | kernels | expansion | + exposed | "
    "efficiency |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
  ]
  best: dict[tuple[Any, ...], tuple[float, str]] = {}
  for cell in data["cells"]:
    for network in NETWORKS if cell["cp_size"] > NODE else NETWORKS[:1]:
      total, line = _predict(cell, data["alone"][cell["mask"]], network)
      group = (cell["mask"], cell["cp_size"], network, cell["form"])
      best[group] = min(best.get(group, (total, line)), (total, line))
  return "\n".join([*lines, *(line for _, line in best.values())]) + "\n"


def _predict(cell: dict[str, Any], alone: dict[str, Any], network: float) -> tuple[float, str]:
  key = make_key(cell["form"], cell["mask"], cell["cp_size"], cell["degree"])
  stats, spec = key.stats(), key.spec
  found = predict_pass(
    spec.capacities.hops,
    spec.ranks,
    spec.overlap_degree,
    kernels_of_ranks(cell, key),
    links_of(cell["form"], network),
    spec.capacities.orders,
  )
  # Beside no transfer.
  expansion = float(np.sum(cell["expansion"]))
  total = found.total + expansion
  ideal = alone["seconds"] / alone["area"] * stats.area.mean() + alone["expansion"]
  rows = [stats.levels[level].padded_rows for level in spec.levels]
  far, near = rows if len(rows) == 2 else (0, rows[0])
  name = f"{network / 1e9:.0f}" if cell["cp_size"] > NODE else "-"
  line = (
    f"| {cell['mask']} | {cell['cp_size']} | {name} | {cell['form']} | {spec.transport}, "
    f"{spec.overlap_degree} | {stats.balance:.3f} | {far}, {near} | {1e3 * ideal:.1f} | "
    f"{1e3 * found.kernels:.1f} | {1e3 * expansion:.1f} | {1e3 * found.exposed:.1f} | "
    f"{ideal / total:.0%} |"
  )
  return total, line


def main(argv: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("part", choices=["layer", "memory", "measure", "predict"])
  parser.add_argument("--json", type=Path)
  parser.add_argument("--length", type=int, default=8192)
  parser.add_argument("--layers", type=int, default=4)
  parser.add_argument("--kind", type=int, help=argparse.SUPPRESS)
  parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64])
  parser.add_argument("--masks", nargs="+", choices=MASKS, default=["causal", "varlen causal"])
  parser.add_argument("--degrees", type=int, nargs="+", default=list(DEGREES))
  parser.add_argument("--markdown", type=Path)
  options = parser.parse_args(argv)
  if options.part == "memory" and options.kind is not None:
    print(json.dumps(measure_memory(_KINDS[options.kind], options.length, options.layers)))
  elif options.part in ("layer", "memory"):
    calls: dict[str, Callable[[], dict[str, Any]]] = {
      "layer": lambda: time_layer(options.length),
      "memory": lambda: compare_memory(options.length, options.layers),
    }
    results = calls[options.part]()
    if options.json:
      options.json.write_text(json.dumps(results, indent=1) + "\n")
  elif options.json is None:
    parser.error("--json is needed: the times of kernels")
  elif options.part == "measure":
    measure(options.masks, options.sizes, options.degrees, options.json)
  else:
    text = predict(json.loads(options.json.read_text()))
    print(text)
    if options.markdown:
      options.markdown.write_text(text)


if __name__ == "__main__":
  main(sys.argv[1:])
