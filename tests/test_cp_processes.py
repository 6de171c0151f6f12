"""Context parallelism on real processes that communicate over the loopback device."""

import os
import socket
import subprocess
import sys

import pytest

from tests.machine import QUICK_FLAGS


def _free_port():
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


# Each case takes a program. Masks, degrees and transports take turns.
@pytest.mark.parametrize(
  ("count", "cases"),
  [
    (2, ["documents:1:all_to_all:1", "full:0:auto:2"]),
    pytest.param(
      4,
      ["documents:2:two_level:2", "full:1:auto:2", "causal:0:all_to_all:4"],
      marks=pytest.mark.long,
    ),
  ],
  ids=["two", "four"],
)
def test_processes_attend_together(count, cases):
  for output in _outputs("tests.one_process", count, cases):
    assert output.endswith("right")


@pytest.mark.long
def test_processes_check_their_exchange_together():
  # Only one process sees the wrong rows of the second report, but both report the same figures.
  reports = [x.split("\n---\n")[1:] for x in _outputs("tests.one_exchange_check", 2, [])]
  assert reports[0] == reports[1]
  right, wrong = reports[0]
  assert right.strip().endswith("no faults")
  assert "fault: two_level" in wrong


def _outputs(module, count, arguments):
  """The outputs of several processes, all of which must succeed."""
  # Not the flags of conftest.py, which ask for eight devices. Programs run once: optimizing them
  # would take longer.
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(QUICK_FLAGS)}
  command = [sys.executable, "-m", module, str(_free_port()), str(count)]
  processes = [
    subprocess.Popen(
      [*command, str(number), *arguments],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for number in range(count)
  ]
  try:
    outputs = [process.communicate(timeout=400) for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, (output, errors) in zip(processes, outputs, strict=True):
    assert process.returncode == 0, (output + errors)[-3000:]
  return [output.strip() for output, _ in outputs]
