"""The examples run."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import dev

ROOT = Path(__file__).resolve().parent.parent


pytestmark = pytest.mark.usefixtures("with_promotion")


def _load(name):
  spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # Dataclasses look their module up.
  spec.loader.exec_module(module)
  return module


@pytest.mark.long
@pytest.mark.parametrize("name", ["qk_clip_linen", "qk_clip_nnx"])
def test_flax_example_holds_logits_at_the_threshold(name):
  module = _load(name)
  history = np.array(module.main())
  assert history.shape == (40, module.NUM_LAYERS, module.NUM_Q_HEADS)
  # Logits start above the threshold, and grow with every step. Without the clip, they would pass 8.
  assert history[0].max() > module.THRESHOLD
  assert module.THRESHOLD < history[-10:].max() < 1.2 * module.THRESHOLD


@pytest.mark.long
def test_gpt_is_held_at_the_threshold_and_runs_away_without():
  example = _load("muon_qk_clip")
  config = example.dataclasses.replace(
    example.Config(), num_layers=2, hidden=64, length=64, num_steps=40
  )
  histories = {clip: example.train(config, clip) for clip in (False, True)}
  last = {clip: history["max_logit"][-10:] for clip, history in histories.items()}
  assert min(last[False]) > 2 * config.threshold
  assert max(last[True]) < 1.3 * config.threshold
  assert histories[True]["loss"][-1] < histories[False]["loss"][-1]


@pytest.mark.long
def test_gpt_on_many_devices_learns_what_it_learns_on_one():
  example = _load("context_parallel_gpt")
  config = example.dataclasses.replace(example.CONFIG, num_steps=8, threshold=5.5)
  ranks = example.train(config, dp=2, cp=4, overlap_degree=2)
  alone = example.train_on_one_device(config)
  np.testing.assert_allclose(ranks["loss"], alone["loss"], atol=1e-4)
  np.testing.assert_allclose(ranks["max_logit"], alone["max_logit"], rtol=1e-4)
  assert max(alone["max_logit"]) > config.threshold, "nothing was clipped"
  assert ranks["compilations"] <= 3


@pytest.mark.long
def test_the_first_picture_needs_no_kernels(tmp_path):
  hide = (
    "import sys; sys.modules.update({f'jax_magi._src.native.{m}': None for m in ['_cpu', '_cuda']})"
  )
  arguments = ["--only-picture", "--out", str(tmp_path)]
  program = f"{hide}; sys.argv[1:] = {arguments}; from examples import quick_start as x; x.main()"
  printed = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
  assert f"picture of the mask: {tmp_path / 'quick_start_mask.png'}" in printed
  assert "loss" not in printed
  assert (tmp_path / "quick_start_mask.png").stat().st_size > 1000


def test_the_demo_installs_no_more_than_it_needs():
  config = tomllib.loads((ROOT / "pyproject.toml").read_text())
  few, all_of_them = (dev.requirements(config, group) for group in ("demo", "dev"))
  names = [re.match(r"[\w-]+", line)[0] for line in few]
  assert {"cmake", "ninja", "jax", "optax", "matplotlib", "nanobind"} <= set(names)
  assert set(few) < set(all_of_them)


def test_quick_start(tmp_path):
  command = [sys.executable, "examples/quick_start.py", "--out", str(tmp_path)]
  done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
  assert "compilations for two masks: 1" in done.stdout
  assert (tmp_path / "quick_start_mask.png").stat().st_size > 1000


@pytest.mark.long
def test_command_line_writes_plot_and_figures(tmp_path):
  command = [sys.executable, "examples/muon_qk_clip.py", "--no-clip", "--num-steps", "2"]
  outputs = ["--plot", str(tmp_path / "new" / "plot.png"), "--json", str(tmp_path / "figures.json")]
  done = subprocess.run([*command, *outputs], cwd=ROOT, check=True, capture_output=True, text=True)
  assert "without QK-Clip" in done.stdout and "2/2" in done.stdout
  assert (tmp_path / "new" / "plot.png").stat().st_size > 10_000
  results = json.loads((tmp_path / "figures.json").read_text())
  (run,) = results["runs"]
  assert results["config"]["num_steps"] == 2 and not run["clip"]
  assert len(run["loss"]) == len(run["max_logit"]) == 2
  again = ["--from-json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "again.png")]
  subprocess.run([*command[:2], *again], cwd=ROOT, check=True)
  assert (tmp_path / "again.png").stat().st_size == (tmp_path / "new" / "plot.png").stat().st_size


@pytest.mark.long
def test_gpt_on_data_tensor_and_context_parallel_devices():
  example = _load("dp_tp_cp_gpt")
  config = example.dataclasses.replace(example.CONFIG, num_steps=4, threshold=4.0)
  mesh = example.train(config, dp=2, tp=2, cp=2)
  alone = example.train_on_one_device(config)
  np.testing.assert_allclose(mesh["loss"], alone["loss"], atol=1e-4)
  np.testing.assert_allclose(mesh["max_logit"], alone["max_logit"], rtol=1e-4)
  assert max(alone["max_logit"]) > config.threshold, "nothing was clipped"
  # The weights kept their sharding: half of the heads on each device.
  query = mesh["params"]["blocks"]["query"]
  assert query.sharding.shard_shape(query.shape)[2] == config.num_q_heads // 2


@pytest.mark.long
def test_mla_learns_on_eight_devices_what_it_learns_on_one():
  """20 steps in float32, on packed documents, some of which QK-Clip clips."""
  example = _load("mla_gpt")
  config = example.dataclasses.replace(
    example.Config(), num_layers=2, embed=32, num_heads=2, nope_dim=8, value_dim=8, q_rank=16,
    kv_rank=16, hidden=64, length=96, batch=2, num_steps=20, learning_rate=0.03, threshold=4.0,
  )  # fmt: skip
  ranks = example.train(config, dp=2, cp=4)
  alone = example.train(config)
  np.testing.assert_allclose(ranks["loss"], alone["loss"], rtol=1e-5)
  np.testing.assert_allclose(ranks["max_logits"], alone["max_logits"], rtol=1e-4)
  assert np.shape(alone["max_logits"]) == (20, 2)
  assert alone["loss"][-1] < alone["loss"][0]
  assert max(alone["max_logit"]) > config.threshold, "nothing was clipped"
