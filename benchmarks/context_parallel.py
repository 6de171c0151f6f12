"""Predicts how context parallelism scales, without a cluster.

python -m benchmarks.context_parallel measure --json FILE       (on one Hopper GPU)
python -m benchmarks.context_parallel programs --json FILE      (on one Hopper GPU, after `measure`)
python -m benchmarks.context_parallel predict --json FILE... [--plot FILE] [--markdown FILE]

`measure` plans each mask on ranks of 8192 tokens, eight per node, and times the kernels of a few
ranks. All kernels of a pass are one program, in the order of the plan and without the transfers:
one launch makes their tile lists, and each continues with the results of earlier ones. Plans are
those of `overlap_degree="auto"`, for 50 and 100 GB/s between nodes. `measure` skips the cells that
the file already has. `programs` times the passes of the rank with the most work again, with the
gathers that pack and unpack rows, and everything else but the collectives. `predict` adds the
transfers, padding included, and simulates the steps of both passes: a transfer begins when all
ranks of its group are ready, and a step ends when its kernel and its transfers have ended. After
`programs`, one column adds the time by which programs exceed kernels, because neither kernels nor
transfers overlap with packing. Each file is compared with the single GPU of its own run.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jax_magi
from benchmarks.rank_kernels import HEAD_DIM, NUM_Q_HEADS, Kernels
from benchmarks.rank_plans import (
  CP_SIZES,
  LATENCY,
  MASKS,
  NODE,
  NVLINK,
  ROW_BYTES,
  is_same_plan,
  make_key,
  networks_of,
  planned_key,
)
from benchmarks.rank_programs import time_programs
from benchmarks.scaling_report import Cell, place, plot, to_markdown
from jax_magi import Links
from jax_magi._src.context_parallel.hops import rows_by_link
from jax_magi._src.context_parallel.key import kernels_of
from jax_magi._src.context_parallel.predict import predict as predict_pass
from jax_magi._src.context_parallel.schedule import steps_of
from jax_magi._src.context_parallel.stats import pair_rows

# The ranks whose kernels are timed: those with the most and with the least work, and some between.
NUM_TIMED = 5
# A ragged exchange with one update for each of eight peers, measured on one H200.
RAGGED = 20e9


# --- on the GPU ---


def measure(cp_sizes: tuple[int, ...], names: list[str], path: Path) -> None:
  """Measures the cells that the file lacks. Writes it after each cell."""
  kernels = Kernels()
  data: dict[str, Any] = {"device": jax.devices()[0].device_kind, "alone": {}, "cells": []}
  if path.exists():
    data = json.loads(path.read_text())
  done = {(cell["mask"], cell["cp_size"], cell["network"]) for cell in data["cells"]}
  for name in names:
    measured: list[tuple[jax_magi.DistAttnKey, dict[str, Any]]] = []
    if name not in data["alone"]:
      data["alone"][name] = time_alone(kernels, name)
    for cp_size, network in ((n, x) for n in cp_sizes for x in networks_of(n)):
      if (name, cp_size, network) in done:
        continue
      key = planned_key(name, cp_size, network)
      # Two networks often have one plan.
      times = next((times for other, times in measured if is_same_plan(key, other)), None)
      if times is None:
        times = time_ranks(kernels, key)
        measured.append((key, times))
        kernels.forget()
      cell = {"mask": name, "cp_size": cp_size, "network": network, **times}
      data["cells"].append(cell)
      busiest = _busiest(cell)
      seconds = (sum(cell[name][busiest]) for name in ("forward", "backward"))
      print(
        f"{name:16s} cp {cp_size:3d} {network / 1e9:3.0f} GB/s degree {cell['degree']}"
        f"{' whole queries' if key.whole_slices is not None else ''}, busiest rank: "
        f"{_rates(sum(cell['areas'][0][busiest]), *seconds)}",
        flush=True,
      )
      path.write_text(json.dumps(data, indent=1) + "\n")


def measure_programs(names: list[str], path: Path) -> None:
  """Adds the seconds of programs to the cells that lack them. Writes the file after each cell."""
  kernels = Kernels()
  data = json.loads(path.read_text())
  known: list[tuple[jax_magi.DistAttnKey, dict[str, float]]] = []
  for cell in data["cells"]:
    if "programs" in cell or cell["mask"] not in names:
      continue
    key = planned_key(cell["mask"], cell["cp_size"], cell["network"])
    times = next((times for other, times in known if is_same_plan(key, other)), None)
    if times is None:
      times = time_programs(kernels, key, _rank_of(cell, key, _busiest(cell)))
      known.append((key, times))
      kernels.forget()
    cell["programs"] = times
    more = [1e3 * x for x in _around(cell)]
    print(
      f"{cell['mask']:16s} cp {cell['cp_size']:3d} {cell['network'] / 1e9:3.0f} GB/s, besides "
      f"kernels: forward {more[0]:.2f} ms, backward {more[1]:.2f} ms",
      flush=True,
    )
    path.write_text(json.dumps(data, indent=1) + "\n")


def _busiest(cell: dict[str, Any]) -> int:
  """The index of the timed rank with the most work."""
  return int(np.sum(cell["areas"][0], axis=1).argmax())


def _rank_of(cell: dict[str, Any], key: jax_magi.DistAttnKey, timed: int) -> int:
  """A rank with the work of a timed rank."""
  areas = [key.areas(is_forward=not number) == cell["areas"][number][timed] for number in range(2)]
  return int(np.concatenate(areas, axis=1).all(axis=1).argmax())


def _around(cell: dict[str, Any]) -> tuple[float, float]:
  """The seconds by which programs exceed kernels, forward and backward; 0 if not measured."""
  if "programs" not in cell:
    return 0.0, 0.0
  timed = _busiest(cell)
  forward, backward = (
    max(cell["programs"][name] - sum(cell[name][timed]), 0.0) for name in ("forward", "backward")
  )
  return forward, backward


def time_alone(kernels: Kernels, name: str) -> dict[str, Any]:
  """The area of a mask on one GPU, and its seconds."""
  length = 4 * kernels.local
  mask = MASKS[name](length)
  slices = mask.pad(_round_up(len(mask.slices))).slices
  forward, backward = kernels.alone(np.asarray(slices), length)
  print(f"{name:16s} one GPU, {length} tokens: {_rates(mask.area(), forward, backward)}")
  return {"area": mask.area(), "forward": forward, "backward": backward}


def time_ranks(kernels: Kernels, key: jax_magi.DistAttnKey) -> dict[str, Any]:
  """The areas of the stages of a few ranks, forward and backward, and their seconds."""
  capacities, is_whole = key.capacities, key.whole_slices is not None
  areas = key.areas(is_forward=True), key.areas()
  by_area = np.argsort(areas[0].sum(axis=1))
  ranks = np.unique(by_area[np.linspace(0, len(by_area) - 1, NUM_TIMED).astype(int)])
  # Of ranks with equal work, one is enough.
  _, first = np.unique(np.concatenate(areas, axis=1)[ranks], axis=0, return_index=True)
  ranks = ranks[first]
  is_staged = bool(key.spec.overlap_degree)
  counts = [len(path) for path in capacities.hops] * is_staged
  own = [kernels.local] * is_staged
  forward_rows = capacities.whole_rows if is_whole else capacities.rows
  tables = key.whole_slices if is_whole else key.slices
  steps = [steps_of(counts, x, is_backward=bool(i)) for i, x in enumerate(capacities.orders)]
  forward, backward = (
    [time(np.asarray(slices[rank]), [*own, *rows]).tolist() for rank in ranks]
    for slices, rows, time in (
      (tables, forward_rows, functools.partial(kernels.forward_pass, steps[0], is_whole=is_whole)),
      (key.slices, capacities.rows, functools.partial(kernels.backward_pass, steps[1])),
    )
  )
  return {
    "degree": key.spec.overlap_degree,
    "orders": str(capacities.orders),
    "areas": [area[ranks].tolist() for area in areas],
    "forward": forward,
    "backward": backward,
  }


def _round_up(count: int) -> int:
  return 1 << max(count - 1, 0).bit_length()


def _rates(area: int, forward: float, backward: float) -> str:
  flops = 4 * HEAD_DIM * NUM_Q_HEADS * area
  return (
    f"forward {flops / forward / 1e12:4.0f}, backward {2.5 * flops / backward / 1e12:4.0f} TFLOP/s"
  )


# --- anywhere ---


def predict(data: dict[str, Any]) -> list[Cell]:
  """The cells of each mask, size and network."""
  return [_predict(cell, data["alone"][cell["mask"]]) for cell in data["cells"]]


def kernels_of_ranks(cell: dict[str, Any], key: jax_magi.DistAttnKey) -> Any:
  """The kernels of both passes of all ranks, from the times of a few ranks."""
  orders = str(key.spec.capacities.orders)
  for number, areas in enumerate(cell["areas"]):
    planned = key.areas(is_forward=not number)
    is_same = cell.get("orders", orders) == orders and len(areas[0]) == planned.shape[1]
    if not is_same or not all((planned == x).all(axis=1).any() for x in np.array(areas)):
      raise ValueError(f"the plan of {cell['mask']} is not the one that was timed: measure anew")
  # Over all stages of a pass.
  usual_rates = [
    np.sum(cell[name]) / np.sum(cell["areas"][number])
    for number, name in enumerate(("forward", "backward"))
  ]
  kernels = [
    np.stack(
      [
        _seconds_of_all(areas, np.array(timed), np.array(seconds), usual_rates[number])
        for areas, timed, seconds in zip(
          key.areas(is_forward=not number).T,
          np.array(cell["areas"][number]).T,
          np.array(cell[name]).T,
          strict=True,
        )
      ],
      axis=1,
    )
    for number, name in enumerate(("forward", "backward"))
  ]
  return kernels_of(key, np.stack(kernels, axis=-1))


def _predict(cell: dict[str, Any], alone: dict[str, Any]) -> Cell:
  network = cell["network"]
  key = planned_key(cell["mask"], cell["cp_size"], network)
  stats, spec, kernels = key.stats(), key.spec, kernels_of_ranks(cell, key)

  def links(grad_row_bytes: int) -> Links:
    return Links(
      near=NVLINK,
      far=network,
      latency=LATENCY,
      row_bytes=ROW_BYTES,
      grad_row_bytes=grad_row_bytes,
      stage_seconds=(0.0, 0.0),  # The times of a stage's kernels are those of all its parts.
    )

  def passes(grad_row_bytes: int, keep_remote_kv: bool = False):
    return predict_pass(
      spec.capacities.hops,
      spec.ranks,
      spec.overlap_degree,
      kernels,
      links(grad_row_bytes),
      spec.capacities.orders,
      keep_remote_kv=keep_remote_kv,
    )

  found = passes(2 * ROW_BYTES)
  ideal = (alone["forward"] + alone["backward"]) / alone["area"] * stats.area.mean()
  by_link = [rows_by_link(hop, spec.ranks) for hops in spec.capacities.hops for hop in hops]
  far, near = map(sum, zip(*by_link, strict=True))
  return Cell(
    mask=cell["mask"],
    cp_size=cell["cp_size"],
    network=network,
    degree=cell["degree"],
    transport=spec.transport,
    balance=stats.balance,
    far_rows=far,
    near_rows=near,
    ideal=ideal,
    kernels=found.kernels,
    around=sum(_around(cell)),
    total=found.total,
    total_bfloat16=passes(ROW_BYTES).total,
    total_kept=passes(2 * ROW_BYTES, keep_remote_kv=True).total,
    total_ragged=_total_ragged(found.kernels, cell, network),
    forward=found.forward,
    flops=4 * HEAD_DIM * NUM_Q_HEADS * float(stats.area.mean()),
  )


def _seconds_of_all(
  areas: np.ndarray, timed: np.ndarray, seconds: np.ndarray, usual_rate: float
) -> np.ndarray:
  """The seconds of a stage of all ranks, from a line through those of the timed ranks.

  Args:
    areas: the visible pairs of all ranks.
    timed: the visible pairs of the timed ranks.
    seconds: the seconds of the timed ranks.
    usual_rate: the seconds per pair of a pass.
  """
  # Ranks without work in this stage launch its kernel, too.
  idle = seconds[timed == 0].mean() if (timed == 0).any() else 0.0
  timed, seconds = timed[timed > 0], seconds[timed > 0]
  if not len(timed):
    return np.where(areas > 0, np.nan, idle)
  rate, start = seconds.sum() / timed.sum(), 0.0
  if timed.max() > 1.1 * timed.min():
    fit, at_zero = np.polyfit(timed, seconds, 1)
    if fit > 0.0 and at_zero > 0.0:
      rate, start = fit, at_zero
  if rate > 2.0 * usual_rate:  # Launches outweigh the work of the timed ranks.
    rate, start = usual_rate, max(np.mean(seconds - usual_rate * timed), 0.0)
  return np.where(areas > 0, start + rate * areas, idle)


def _total_ragged(kernels: float, cell: dict[str, Any], network: float) -> float:
  """The seconds with a ragged exchange, which overlaps with kernels inside a node with stages."""
  moving = ragged_seconds(cell["mask"], cell["cp_size"], network)
  if cell["cp_size"] <= NODE and cell["degree"]:
    return max(kernels, moving)
  return kernels + moving


@functools.cache
def ragged_seconds(name: str, cp_size: int, network: float) -> float:
  """The seconds of `ragged_all_to_all`, as XLA of jax 0.11.1 and later runs it.

  Between nodes, it is an all-gather of all reserved rows, which overlaps with no kernel. Inside a
  node, one CTA moves the rows for each of eight peers. Keys move twice, and gradients once, in 32
  bit.
  """
  key = make_key(name, cp_size, 1, "all_to_all")
  rows = pair_rows(key.spec, key.pairs)
  capacity = max(rows.sum(axis=1).max(), rows.sum(axis=0).max())
  crossing = (max(cp_size // NODE, 1) - 1) * capacity * ROW_BYTES / network
  inside = rows.sum(axis=0).max() * ROW_BYTES / RAGGED
  return float(4 * (crossing + inside))


def main(argv: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("part", choices=["measure", "programs", "predict"])
  parser.add_argument("--json", required=True, nargs="+", type=Path, help="times of kernels")
  parser.add_argument("--sizes", type=int, nargs="+", default=list(CP_SIZES))
  parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
  parser.add_argument("--plot")
  parser.add_argument("--markdown")
  options = parser.parse_args(argv)
  if options.part != "predict" and len(options.json) > 1:
    parser.error(f"{options.part} writes one file")
  if options.part == "measure":
    measure(tuple(options.sizes), options.masks, options.json[0])
    return
  if options.part == "programs":
    measure_programs(options.masks, options.json[0])
    return
  runs = [json.loads(path.read_text()) for path in options.json]
  cells = sorted((cell for run in runs for cell in predict(run)), key=place)
  text = to_markdown(cells)
  print(text)
  if options.markdown:
    Path(options.markdown).write_text(text)
  if options.plot:
    plot(cells, options.plot)


if __name__ == "__main__":
  main(sys.argv[1:])
