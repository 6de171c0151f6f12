"""The program of eight GPUs, compiled on one."""

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


def _program(overlap_degree, exchange):
  command = [sys.executable, "-m", "tests.eight_gpus", str(overlap_degree), exchange]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr[-3000:]
  assert re.search(r"rank \d ran", done.stdout), "the rank's kernels did not run"
  return done.stdout


def _count(name, text):
  """Operations of a kind; an asynchronous one is counted where it starts."""
  return len(re.findall(rf" {name}(?:-start)?\(", text))


@pytest.mark.parametrize("overlap_degree", [0, 1, 2, 4])
def test_only_needed_rows_move(overlap_degree):
  text = _program(overlap_degree, "needed")
  transfers = max(overlap_degree, 1)
  # Forward, again in the backward pass, and back.
  assert len(re.findall(r"ragged-all-to-all(?:-start)?\(", text)) == 3 * transfers
  assert _count("all-gather", text) == 0
  assert _count("all-to-all", text) == 0
  stages = 1 + overlap_degree
  assert len(re.findall(r'custom_call_target="jax_magi_attention_forward', text)) == stages
  assert len(re.findall(r'custom_call_target="jax_magi_attention_backward', text)) == stages


def test_all_gather_where_everything_is_needed():
  text = _program(2, "all_gather")
  assert _count("all-gather", text) == 4
  assert _count("reduce-scatter", text) == 2
  assert "ragged-all-to-all" not in text
