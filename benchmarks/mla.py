"""Multi-head latent attention: the cost of expansion, the memory, and how it scales.

python -m benchmarks.mla layer [--length 8192] [--json FILE]                     (one Hopper GPU)
python -m benchmarks.mla memory [--length 32768] [--layers 1 4] [--json FILE]    (one Hopper GPU)
python -m benchmarks.mla measure --json FILE [--sizes 8 64]                      (one Hopper GPU)
python -m benchmarks.mla predict --json FILE [--markdown FILE]                   (anywhere)

64 heads with 128 dims without rotation and 64 with rotation, and values of 128 dims, in 16 bit. The
keys and values of a token are computed from 512 + 64 numbers. `layer` times the kernels, the
products of the expansion, and the copies of rotary keys to all heads. `memory` is the peak of both
passes over a few layers that keep latents, or expanded keys and values. `measure` and `predict` are
like those of benchmarks.context_parallel, with latents or expanded rows on the wire, and with
expansion timed. The planner knows the network and the cost of expansion (`overlap_degree="auto"`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
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
from benchmarks.context_parallel import kernels_of_ranks, time_ranks
from benchmarks.rank_kernels import LOCAL, Kernels
from benchmarks.rank_plans import LATENCY, MASKS, NODE, NVLINK, is_same_plan, networks_of
from benchmarks.timing import seconds
from jax_magi import AttentionMask, Links
from jax_magi._src.context_parallel.hops import rows_by_link
from jax_magi._src.context_parallel.predict import predict as predict_pass

HEADS, NOPE, ROPE, VALUE, RANK = 64, 128, 64, 128, 512
WIDTHS = {"latents": RANK + ROPE, "expanded": HEADS * (NOPE + ROPE + VALUE)}
_REPEATS = {"budget": 0.05, "repeats": 3}


def expand(latent: Any, kv_b: Any) -> tuple[Any, Any]:
  """Expands rows `[n, 512 + 64]` to k and v."""
  k_nope, v = jnp.split(jnp.einsum("tr,rhd->thd", latent[:, :RANK], kv_b), [NOPE], axis=-1)
  return with_rotary(k_nope, latent[:, RANK:]), v


def with_rotary(k_nope: Any, k_rope: Any) -> Any:
  """The keys of all heads, each with the rotary key."""
  shape = (*k_nope.shape[:2], ROPE)
  return jnp.concatenate([k_nope, jnp.broadcast_to(k_rope[:, None], shape)], axis=-1)


def make_queries(length: int) -> Any:
  return jax.random.normal(jax.random.key(0), (length, HEADS, NOPE + ROPE), jnp.bfloat16)


def make_latents(length: int, num_layers: int = 1) -> tuple[Any, Any]:
  """Latents, and the parameters of a number of layers."""
  keys = jax.random.split(jax.random.key(1))
  shapes = (length, RANK + ROPE), (num_layers, RANK, HEADS, NOPE + VALUE)
  latent, kv_b = (
    jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
  )
  return latent, kv_b / RANK**0.5


def both_passes(fun: Callable, operands: Any, cotangents: Any) -> Any:
  """Both passes. Returns the results, too: otherwise, a linear function would not be computed."""
  results, pull_back = jax.vjp(fun, *operands)
  return results, pull_back(cotangents)


# --- one layer ---


def time_layer(length: int) -> dict[str, dict[str, dict[str, float]]]:
  """The seconds of each part of a layer, each in a separate program, by mask."""
  q, (latent, (kv_b,)) = make_queries(length), make_latents(length)
  k, v = jax.jit(expand)(latent, kv_b)
  dout = jax.random.normal(jax.random.key(2), v.shape, v.dtype)

  def product(latent, kv_b):
    return jnp.einsum("tr,rhd->thd", latent[:, :RANK], kv_b)

  def without_rotary(latent, kv_b):
    k_nope, v = jnp.split(product(latent, kv_b), [NOPE], axis=-1)
    return k_nope, v

  def times(fun, *operands, cotangents):
    """The seconds of the forward pass, and of both passes."""
    both = jax.jit(functools.partial(both_passes, fun))
    return {
      "forward": seconds(jax.jit(fun), *operands, **_REPEATS),
      "both": seconds(both, operands, cotangents, **_REPEATS),
    }

  k_nope, rope = k[..., :NOPE], latent[:, RANK:]
  kv = jnp.concatenate([k_nope, v], axis=-1)
  expansion = {
    "expansion": times(expand, latent, kv_b, cotangents=(k, v)),
    "expansion without rotary keys": times(without_rotary, latent, kv_b, cotangents=(k_nope, v)),
    "its product alone": times(product, latent, kv_b, cotangents=kv),
    "rotary keys to all heads": times(with_rotary, k_nope, rope, cotangents=k),
  }
  results = {}
  for name in ("causal", "varlen causal"):
    mask = MASKS[name](length)

    def attend(q, k, v, mask=mask):
      return jax_magi.attention(q, k, v, mask)[0]

    def expanded(q, latent, kv_b, mask=mask):
      return jax_magi.attention(q, *expand(latent, kv_b), mask)[0]

    def recomputed(q, latent, kv_b, mask=mask):
      fun = functools.partial(expand, kv_b=kv_b)
      return jax_magi.latent_attention(q, latent, mask, expand=fun)[0]

    results[name] = {
      "kernels": times(attend, q, k, v, cotangents=dout),
      **expansion,
      "layer, expanded keys kept": times(expanded, q, latent, kv_b, cotangents=dout),
      "layer, latents kept": times(recomputed, q, latent, kv_b, cotangents=dout),
    }
    _print_layer(name, length, results[name])
  return results


def _print_layer(name: str, length: int, parts: dict[str, dict[str, float]]) -> None:
  """Prints a table, and how much an operand pair (k_nope, k_rope) could save at most."""
  whole = parts["layer, latents kept"]["both"]
  print(f"\n{name}, {length} tokens\n\n| part | forward, ms | both passes, ms | of the layer |")
  print("|---|---|---|---|")
  for part, x in parts.items():
    print(
      f"| {part} | {1e3 * x['forward']:.3f} | {1e3 * x['both']:.3f} | {x['both'] / whole:.1%} |"
    )
  # Latents are expanded twice.
  with_keys, without = (
    parts[part]["forward"] + parts[part]["both"]
    for part in ("expansion", "expansion without rotary keys")
  )
  saved = max(with_keys - without, 0.0) / whole
  print(f"\nan operand pair could save {saved:.1%} of the layer", flush=True)


# --- memory ---

_KINDS = ("latents kept", "expanded keys kept")


def measure_memory(kind: str, length: int, num_layers: int) -> dict[str, float]:
  """The peak bytes of both passes over layers that compute latents from a stream of tokens."""
  embed = 1024
  q, (_, kv_b) = make_queries(length), make_latents(length, num_layers)
  mask = AttentionMask.causal(length)
  keys = jax.random.split(jax.random.key(3), 3)
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


def compare_memory(length: int, layers: list[int]) -> list[dict[str, Any]]:
  """Measures each kind in a separate process, because a peak is that of a process."""
  results = []
  print(f"{length} causal tokens, forward and backward\n")
  print("| layers | | peak of the GPU, GB | temporary memory of the program, GB | ms |")
  print("|---|---|---|---|---|")
  for num_layers, (number, kind) in itertools.product(layers, enumerate(_KINDS)):
    command = [sys.executable, "-m", "benchmarks.mla", "memory", "--length", str(length)]
    command += ["--layers", str(num_layers), "--kind", str(number)]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    x = json.loads(done.stdout.splitlines()[-1])
    results.append({"layers": num_layers, "kept": kind, "length": length} | x)
    print(
      f"| {num_layers} | {kind} | {x['peak_bytes'] / 1e9:.2f} | {x['temporary_bytes'] / 1e9:.2f} | "
      f"{x['time_ms']:.1f} |",
      flush=True,
    )
  return results


# --- how it scales ---


_ROWS = jax.ShapeDtypeStruct((1, WIDTHS["latents"]), jnp.bfloat16)


def priced_expansion() -> tuple[float, float]:
  """The seconds per row of expansion, forward and backward, that the planner assumes."""
  kv_b = jnp.zeros((RANK, HEADS, NOPE + VALUE), jnp.bfloat16)
  return Links().for_expand(lambda latent: expand(latent, kv_b), _ROWS).expand_seconds


def links_of(form: str, network: float, expand_seconds: tuple[float, float]) -> Links:
  """The cost of a token's rows and pairs."""
  rows = jax.ShapeDtypeStruct((1, WIDTHS[form]), jnp.bfloat16)
  links = Links(near=NVLINK, far=network, latency=LATENCY)
  links = links.for_rows(rows).for_heads(HEADS, NOPE + ROPE, VALUE)
  if form == "expanded":
    return links
  return dataclasses.replace(links, expand_seconds=expand_seconds)


@functools.cache
def make_key(
  form: str, name: str, cp_size: int, network: float, expand_seconds: tuple[float, float]
) -> jax_magi.DistAttnKey:
  """The plan of a mask on ranks of 8192 tokens."""
  return jax_magi.magi_attn_flex_key(
    MASKS[name](cp_size * LOCAL),
    cp_size=cp_size,
    overlap_degree="auto",
    ranks_per_node=min(NODE, cp_size),
    links=links_of(form, network, expand_seconds),
  )


def expanded_rows(form: str, key: jax_magi.DistAttnKey) -> list[tuple[int, int]]:
  """The rows that are expanded in each stage, padding included, forward and backward."""
  if form == "expanded":  # Each rank's own, before they travel.
    return [(LOCAL, LOCAL)]
  room, own = key.capacities, [LOCAL] * bool(key.spec.overlap_degree)
  whole = room.rows if room.whole_rows is None else room.whole_rows
  return list(zip([*own, *whole], [*own, *room.rows], strict=True))


class Expansion:
  """The seconds of expanding rows: forward, and backward, which expands again."""

  def __init__(self):
    self._forward = jax.jit(expand)
    self._backward = jax.jit(lambda x, w, k, v: both_passes(expand, (x, w), (k, v)))

  @functools.cache  # noqa: B019 (it lives as long as the program)
  def times(self, count: int) -> tuple[float, float]:
    """The seconds for a number of rows."""
    if not count:
      return 0.0, 0.0
    latent, (kv_b,) = make_latents(count)
    k, v = self._forward(latent, kv_b)
    return (
      seconds(self._forward, latent, kv_b, **_REPEATS),
      seconds(self._backward, latent, kv_b, k, v, **_REPEATS),
    )


def measure(names: list[str], sizes: list[int], path: Path) -> None:
  """Measures all cells. Writes the file after each cell, so that an interrupted run is not lost."""
  kernels, expansion = Kernels((HEADS, HEADS), (NOPE + ROPE, VALUE)), Expansion()
  cells: list[dict[str, Any]] = []
  alone: dict[str, Any] = {}
  prices = priced_expansion()
  device = jax.devices()[0].device_kind
  data = {"device": device, "expand_seconds": prices, "alone": alone, "cells": cells}
  for name in names:
    length = 2 * LOCAL
    mask = MASKS[name](length)
    forward, backward = kernels.alone(np.asarray(mask.pad(256).slices), length)
    own = expansion.times(LOCAL)
    alone[name] = {"area": mask.area(), "seconds": forward + backward, "expansion": sum(own)}
  measured: list[tuple[jax_magi.DistAttnKey, dict[str, Any]]] = []
  for cp_size, name in itertools.product(sizes, names):
    for network, form in itertools.product(networks_of(cp_size), WIDTHS):
      key = make_key(form, name, cp_size, network, prices)
      # Two networks often have one plan.
      found = next((times for other, times in measured if is_same_plan(key, other)), None)
      if found is None:
        found = time_ranks(kernels, key)
        measured.append((key, found))
        kernels.forget()
      cell = {"mask": name, "form": form, "cp_size": cp_size, "network": network} | found
      cell["expansion"] = [
        (expansion.times(forward)[0], expansion.times(backward)[1])
        for forward, backward in expanded_rows(form, key)
      ]
      cells.append(cell)
      slowest = (np.sum(cell[name], axis=1).max() for name in ("forward", "backward"))
      times = *slowest, np.sum(cell["expansion"])
      print(
        f"{name}, {form}, cp {cp_size}, {network / 1e9:.0f} GB/s, degree {cell['degree']}: "
        f"ms {1e3 * np.array(times)}",
        flush=True,
      )
      path.write_text(json.dumps(data, indent=1) + "\n")


def predict(data: dict[str, Any]) -> str:
  """Prints a table: each form with the degree that is predicted to finish first."""
  lines = [
    "| mask | ranks | GB/s a NIC | on the wire | transport, degree | work, max / mean | rows "
    "between nodes, in a node | ms at a GPU's rate | kernels | expansion | + exposed | "
    "efficiency |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
  ]
  prices = tuple(data["expand_seconds"])  # With these, plans are those that were timed.
  lines += [_predict(cell, data["alone"][cell["mask"]], prices) for cell in data["cells"]]
  return "\n".join(lines) + "\n"


def _predict(cell: dict[str, Any], alone: dict[str, Any], prices: tuple[float, float]) -> str:
  network, is_latent = cell["network"], cell["form"] == "latents"
  key = make_key(cell["form"], cell["mask"], cell["cp_size"], network, prices)
  stats, spec = key.stats(), key.spec
  expansion = np.array(cell["expansion"])
  found = predict_pass(
    spec.capacities.hops,
    spec.ranks,
    spec.overlap_degree,
    kernels_of_ranks(cell, key),
    # The times of a stage's kernels are those of all its parts.
    dataclasses.replace(links_of(cell["form"], network, prices), stage_seconds=(0.0, 0.0)),
    spec.capacities.orders,
    expansion=expansion if is_latent else None,
  )
  kernels = found.kernels - is_latent * expansion.sum()
  total = found.total + (not is_latent) * expansion.sum()
  ideal = alone["seconds"] / alone["area"] * stats.area.mean() + alone["expansion"]
  by_link = [rows_by_link(hop, spec.ranks) for hops in spec.capacities.hops for hop in hops]
  far, near = map(sum, zip(*by_link, strict=True))
  name = f"{network / 1e9:.0f}" if cell["cp_size"] > NODE else "-"
  whole = ", whole queries" if key.whole_slices is not None else ""
  return (
    f"| {cell['mask']} | {cell['cp_size']} | {name} | {cell['form']} | {spec.transport}, "
    f"{spec.overlap_degree}{whole} | {stats.balance:.3f} | {far}, {near} | {1e3 * ideal:.1f} | "
    f"{1e3 * kernels:.1f} | {1e3 * expansion.sum():.1f} | {1e3 * found.exposed:.1f} | "
    f"{ideal / total:.0%} |"
  )


def main(argv: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("part", choices=["layer", "memory", "measure", "predict"])
  parser.add_argument("--json", type=Path)
  parser.add_argument("--length", type=int, default=8192)
  parser.add_argument("--layers", type=int, nargs="+", default=[1, 4])
  parser.add_argument("--kind", type=int, help=argparse.SUPPRESS)
  parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64])
  parser.add_argument("--masks", nargs="+", choices=MASKS, default=["causal", "varlen causal"])
  parser.add_argument("--markdown", type=Path)
  options = parser.parse_args(argv)
  if options.part == "memory" and options.kind is not None:
    print(json.dumps(measure_memory(_KINDS[options.kind], options.length, options.layers[0])))
  elif options.part in ("layer", "memory"):
    calls: dict[str, Callable[[], Any]] = {
      "layer": lambda: time_layer(options.length),
      "memory": lambda: compare_memory(options.length, options.layers),
    }
    results = calls[options.part]()
    if options.json:
      options.json.write_text(json.dumps(results, indent=1) + "\n")
  elif options.json is None:
    parser.error("--json is needed: the times of kernels")
  elif options.part == "measure":
    measure(options.masks, options.sizes, options.json)
  else:
    text = predict(json.loads(options.json.read_text()))
    print(text)
    if options.markdown:
      options.markdown.write_text(text)


if __name__ == "__main__":
  main(sys.argv[1:])
