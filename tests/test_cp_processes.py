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


@pytest.mark.parametrize("count", [2, 4])
def test_processes_attend_together(count):
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
  command = [sys.executable, "-m", "tests.one_process", str(_free_port()), str(count)]
  processes = [
    subprocess.Popen(
      [*command, str(number)],
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
