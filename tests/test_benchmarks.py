"""`python -m benchmarks` runs the requested parts, and reports those that it could not run."""

import functools
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from benchmarks import __main__ as command
from benchmarks import context_parallel, mla, rank_programs, timing
from benchmarks.rank_kernels import Kernels
from jax_magi._src.context_parallel.schedule import num_parts_of, steps_of
from jax_magi._src.native.attention import TARGETS
from jax_magi._src.native.backends import CUDA
from jax_magi._src.native.overlap import STAND_IN_TARGETS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.long
def test_figures_have_device_versions_and_commit(tmp_path):
  subprocess.run(
    [sys.executable, "-m", "benchmarks", "train_step", "--quick", "--out", str(tmp_path)],
    cwd=ROOT,
    check=True,
  )
  results = json.loads((tmp_path / "results.json").read_text())
  assert results["versions"]["jax"] == jax.__version__
  assert results["versions"]["jax_magi"] == jax_magi.__version__
  assert results["commit"] and results["devices"] and results["date"]
  (part,) = results["parts"].values()
  assert len(part["figures"]["ours"]["losses"]) == 4
  assert (tmp_path / "train_step.png").stat().st_size > 1000
  assert "ms a step" in (tmp_path / "train_step.log").read_text()


def test_what_needs_a_gpu_is_skipped_without():
  part = command.PARTS["overlap"]
  options = {"is_gpu": False, "quick": False, "show": print}
  assert "GPU" in command.run_part(part, "overlap", ROOT, **options)["skipped"]


def test_a_part_that_fails_is_named_and_others_run(tmp_path, monkeypatch, capsys):
  parts = {
    "broken": command.Part(("json.tool --no-such-option {json}",)),
    "other": command.Part(("json",), on_cpu=None),
  }
  monkeypatch.setattr(command, "PARTS", parts)
  assert command.main(["--out", str(tmp_path)]) == 1
  results = json.loads((tmp_path / "results.json").read_text())["parts"]
  assert "exit status 2" in results["broken"]["failed"]
  assert set(results) == {"broken", "other"}
  assert "[##] 2/2" in capsys.readouterr().out


def test_unknown_parts_are_an_error(capsys):
  with pytest.raises(SystemExit):
    command.main(["attentoin"])
  assert "PART must be one of attention, softmax" in capsys.readouterr().err


def test_extra_cost_is_that_of_the_second(monkeypatch):
  """The clock counts products of matrices, and drifts."""
  turns = itertools.count()

  @functools.cache
  def num_products(program):
    return program.lower(x).as_text().count("stablehlo.dot_general")

  def counted(program, arguments, count):
    del arguments
    return count * num_products(program) * (1 + 1e-3 * next(turns))

  monkeypatch.setattr(timing, "NUM_PROGRAMS", 3)
  monkeypatch.setattr(timing, "NUM_TURNS", 9)
  monkeypatch.setattr(timing, "_in_a_row", counted)

  def product(x):
    return x @ x

  def twice(x):
    return product(product(x))

  x = jnp.ones((8, 8))
  cost, error = timing.extra_cost([product, twice], x, budget=0.004)
  assert cost == pytest.approx(1.0, abs=1e-3) and 0 <= error < 1e-3
  cost, _ = timing.extra_cost([twice, product], x, budget=0.004)
  assert cost == pytest.approx(-0.5, abs=1e-3)


def test_stand_in_for_communication_is_registered_by_benchmarks_alone():
  """A user's program has no use for it."""
  module = CUDA.module
  if module is None:
    pytest.skip("built without the CUDA kernels")
  assert set(module.benchmark_handlers()) == set(STAND_IN_TARGETS)
  assert not set(module.handlers()) & set(STAND_IN_TARGETS)


class _CountedKernels(Kernels):
  """Kernels of small heads, each of which takes a second."""

  def __init__(self, local):
    super().__init__((4, 2), (32, 32), local)

  def _turns(self, programs, operands):
    for program in programs:
      jax.block_until_ready(program(*operands))
    return np.array([_num_kernels(program) for program in programs], float)


def _num_kernels(program):
  return sum(program.as_text().count(f'"{target}"') for target in TARGETS)


@pytest.mark.parametrize("transport, degree", [("two_level", 2), ("all_gather", 1), ("auto", 0)])
def test_pass_of_a_rank_is_timed_as_it_runs(transport, degree, monkeypatch):
  """With all parts of divided kernels, and with shares of stages that add up to the whole."""
  mask = jax_magi.AttentionMask.causal(1024)
  key = jax_magi.magi_attn_flex_key(
    mask, cp_size=4, ranks_per_node=2, overlap_degree=degree, transport=transport
  )
  times = context_parallel.time_ranks(_CountedKernels(256), key)
  counts = [len(path) for path in key.capacities.hops] * bool(degree)
  for number, name in enumerate(("forward", "backward")):
    steps = steps_of(counts, is_backward=bool(number))
    parts = [num_parts_of(steps, stage) for stage in range(degree + 1)]
    assert parts[0] > 1 or not degree or not number
    np.testing.assert_array_equal(times[name], [parts] * len(times[name]))

  def num_kernels(program, *operands, **_):
    jax.block_until_ready(program(*operands))
    assert not re.search(r"all-to-all|all-gather|reduce-scatter|permute", program.as_text())
    return float(_num_kernels(program))

  monkeypatch.setattr(rank_programs, "seconds", num_kernels)
  found = rank_programs.time_programs(_CountedKernels(256), key, 1)
  assert found == {name: sum(times[name][0]) for name in ("forward", "backward")}


def test_ranks_with_much_work_are_not_predicted_from_launches():
  """The timed ranks have hardly any work in this stage: they tell what its launch takes."""
  areas, timed = np.array([2.2e6, 0.5e6, 0.0]), np.array([0.0, 0.05e6, 0.31e6])
  found = context_parallel._seconds_of_all(areas, timed, np.array([78e-6, 82e-6, 60e-6]), 50e-12)
  np.testing.assert_allclose(found, [172e-6, 87e-6, 78e-6], rtol=0.02)


def test_expansion_is_priced_as_it_was_measured():
  """Within 5% of what 8192 rows took on an H200."""
  results = Path(mla.__file__).parent / "results" / "h200_mla_layer.json"
  for parts in json.loads(results.read_text()).values():
    measured = parts["expansion"]["forward"], parts["expansion"]["both"]
    np.testing.assert_allclose(8192 * np.array(mla.priced_expansion()), measured, rtol=0.05)


def test_latents_scale_better_than_expanded_rows():
  """The prediction of the study, with invented times of kernels and expansion."""
  cells = []
  prices = mla.priced_expansion()
  for form in mla.WIDTHS:
    for network in (50e9, 100e9):
      key = mla.make_key(form, "varlen causal", 16, network, prices)
      areas = [key.areas(is_forward=is_forward)[:1].tolist() for is_forward in (True, False)]
      rows = mla.expanded_rows(form, key)
      times = {"areas": areas, "expansion": [(4e-8 * a, 1.2e-7 * b) for a, b in rows]}
      for name, area, rate in zip(("forward", "backward"), areas, (1e-10, 1.7e-10), strict=True):
        times[name] = [[rate * x for x in stages] for stages in area]
      cells.append(
        {"mask": "varlen causal", "form": form, "cp_size": 16, "network": network, **times}
      )
  alone = {"varlen causal": {"area": 10**8, "seconds": 0.027, "expansion": 8192 * 1.6e-7}}
  data = {"expand_seconds": prices, "alone": alone, "cells": cells}
  rows = [line for line in mla.predict(data).splitlines() if "%" in line]
  efficiency = {
    (cells[3].strip(), cells[4].strip()): int(cells[-2].strip(" %"))
    for cells in (line.split("|") for line in rows)
  }
  for network in ("50", "100"):
    assert efficiency[network, "latents"] > efficiency[network, "expanded"] + 20
