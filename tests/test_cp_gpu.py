"""The program of eight GPUs, compiled on one; or on none, where JAX's CUDA plugin is installed."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from jax_magi import overlap
from tests.machine import HAS_GPU

_HAS_PLUGIN = (
  importlib.util.find_spec("jax_plugins") is not None
  and importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
)
needs_compiler = (
  pytest.mark.gpu
  if HAS_GPU
  else pytest.mark.skipif(not _HAS_PLUGIN, reason="needs a GPU or JAX's CUDA plugin")
)

# By overlap degree. In the backward pass, each of 2 * degree transfers has one to hide behind.
_KERNELS = {"forward": {0: 1, 1: 2, 2: 3, 4: 5}, "backward": {0: 1, 1: 3, 2: 4, 4: 8}}


def _run(overlap_degree, exchange, action):
  command = [sys.executable, "-m", "tests.eight_gpus", str(overlap_degree), exchange, action]
  environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
  done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


def _count(name, text):
  """Operations of a kind; an asynchronous one is counted where it starts."""
  return len(re.findall(rf" {name}(?:-start)?\(", text))


@needs_compiler
@pytest.mark.parametrize("overlap_degree", [0, 1, 2, 4])
def test_only_needed_rows_move(overlap_degree):
  text = _run(overlap_degree, "needed", "print")
  # Forward, again in the backward pass, and back.
  assert _count("ragged-all-to-all", text) == 3 * max(overlap_degree, 1)
  assert _count("all-gather", text) == 0
  assert _count("all-to-all", text) == 0
  for direction, kernels in _KERNELS.items():
    calls = re.findall(f'custom_call_target="jax_magi_attention_{direction}', text)
    assert len(calls) == kernels[overlap_degree]


@needs_compiler
@pytest.mark.parametrize("exchange", ["needed", "all_gather"])
@pytest.mark.parametrize("overlap_degree", [1, 2, 4])
def test_each_transfer_has_attention_beside_it(overlap_degree, exchange):
  text = _run(overlap_degree, exchange, "print")
  transfers = [
    collective
    for collective in overlap.schedule_of(text).collectives
    if collective.num_bytes > 4096  # Not the maxima of a few heads.
  ]
  assert len(transfers) == 3 * overlap_degree
  for transfer in transfers:
    assert transfer.is_async, transfer
    assert len(transfer.attention) == 1, transfer
  # Each has a kernel of its own.
  assert len({name for transfer in transfers for name in transfer.attention}) == len(transfers)


@needs_compiler
@pytest.mark.parametrize("exchange", ["needed", "all_gather"])
def test_a_kernel_barrier_is_between_a_transfer_and_its_kernel(exchange):
  text = _run(2, exchange, "print_barrier")
  entry = text[text.index("\nENTRY ") :]
  words = re.findall(
    r" (?:ragged-all-to-all|all-gather|reduce-scatter)-(start|done)\("
    r"|jax_magi_(attention|kernel)_(?:forward|backward|barrier)",
    entry,
  )
  order = ["".join(word) for word in words]
  # The last kernel of the forward pass has nothing beside it.
  beside = ["start", "kernel", "attention", "done"]
  assert order == 2 * beside + ["attention"] + 4 * beside


@needs_compiler
def test_all_gather_where_everything_is_needed():
  text = _run(2, "all_gather", "print")
  assert _count("all-gather", text) == 4
  assert _count("reduce-scatter", text) == 2
  assert _count("ragged-all-to-all", text) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("exchange", ["needed", "all_gather"])
def test_a_rank_runs_its_kernels(exchange):
  assert "ran: [[1024, 8, 128], [1024, 2, 128], [1024, 2, 128]]" in _run(2, exchange, "run")
