"""Context parallelism on real processes, that talk through the loopback device."""

import os
import socket
import subprocess
import sys

import pytest


def _free_port():
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


_CASES = [
  f"{mask}:{degree}:{transport}:2"
  for mask in ("documents", "causal", "full")
  for degree, transport in ((0, "two_level"), (1, "auto"), (2, "two_level"))
]


@pytest.mark.parametrize(
  ("count", "cases"),
  [
    (2, ["documents:1:all_to_all:1", "full:0:auto:2"]),
    pytest.param(2, _CASES, marks=pytest.mark.long),
    pytest.param(4, _CASES, marks=pytest.mark.long),
  ],
  ids=["two-few_cases", "two-all_cases", "four-all_cases"],
)
def test_processes_attend_together(count, cases):
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
  command = [sys.executable, "-m", "tests.one_process", str(_free_port()), str(count)]
  processes = [
    subprocess.Popen(
      [*command, str(number), *cases],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for number in range(count)
  ]
  try:
    outputs = [process.communicate(timeout=400)[0] for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, output in zip(processes, outputs, strict=True):
    assert process.returncode == 0, output[-3000:]
    assert output.strip().endswith("right")
