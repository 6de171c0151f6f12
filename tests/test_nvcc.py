"""Which nvcc the build takes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
  ("says", "obstacle"),
  [
    ("Cuda compilation tools, release 13.0, V13.0.88", None),
    ("Cuda compilation tools, release 13.1, V13.1.2", None),
    ("Cuda compilation tools, release 12.9, V12.9.41", "is of CUDA 12.9, and the kernels were"),
    ("nothing", "does not tell its version"),
  ],
)
def test_older_nvcc_is_an_obstacle(tmp_path, says, obstacle):
  """In AUTO mode a warning, and a build without CUDA kernels; with JAX_MAGI_CUDA=ON an error."""
  cmake = shutil.which("cmake", path=Path(sys.executable).parent) or shutil.which("cmake")
  if cmake is None:
    pytest.skip("needs cmake")
  nvcc = tmp_path / "nvcc"
  nvcc.write_text(f"#!/bin/sh\necho '{says}'\n")
  nvcc.chmod(0o755)
  script = tmp_path / "check.cmake"
  script.write_text(
    f"include({ROOT}/cmake/nvcc.cmake)\n"
    f"jax_magi_nvcc_obstacle({nvcc} result)\n"
    'message("obstacle: ${result}.")\n'
  )
  text = subprocess.run([cmake, "-P", script], check=True, capture_output=True, text=True).stderr
  said = " ".join(text.split())
  assert said == "obstacle: ." if obstacle is None else obstacle in said
