"""Options of the overlap tool, and the compiler options that it recommends."""

import subprocess
import sys

import pytest

from jax_magi import overlap
from jax_magi._src.overlap import flags
from jax_magi._src.overlap.command import main

_SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"


def test_command_prints_flags():
  command = [sys.executable, "-m", "jax_magi.overlap", "--flags"]
  result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
  assert f"--{_SCHEDULER}=true" in result.stdout.split()


def test_recommended_flags_are_known_or_warned_of(monkeypatch):
  assert overlap.recommended_flags()[_SCHEDULER] is True
  monkeypatch.setattr(flags, "_RECOMMENDED", {_SCHEDULER: True, "xla_gpu_no_such_option": 1})
  with pytest.warns(UserWarning, match="does not take the compiler option xla_gpu_no_such_option"):
    assert overlap.recommended_flags() == {_SCHEDULER: True}


@pytest.mark.parametrize("share", ["-0.1", "1.5"])
def test_a_share_is_from_0_to_1(capsys, share):
  with pytest.raises(SystemExit, match="2"):
    main(["trace", "--require-hidden", share])
  assert f"must be from 0 to 1, got {share}" in capsys.readouterr().err
