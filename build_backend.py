"""The build backend: scikit-build-core, and the CUTLASS headers if there is an nvcc.

As a script, it prints what a build without isolation needs in addition to the list in
pyproject.toml.
"""

import os
import shutil
import subprocess
from pathlib import Path

from scikit_build_core import build as _build
from scikit_build_core.build import (  # noqa: F401
  build_editable,
  build_wheel,
  get_requires_for_build_sdist,
  prepare_metadata_for_build_editable,
  prepare_metadata_for_build_wheel,
)


def cuda_requirements() -> list[str]:
  """Headers of the CUDA kernels, if those will be built."""
  nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
  is_wanted = os.environ.get("JAX_MAGI_CUDA", "AUTO").upper() != "OFF"
  return ["nvidia-cutlass==4.2.0.0"] if nvcc and is_wanted else []


def get_requires_for_build_wheel(config_settings=None):
  """For pip."""
  return _build.get_requires_for_build_wheel(config_settings) + cuda_requirements()


def get_requires_for_build_editable(config_settings=None):
  """For pip."""
  return _build.get_requires_for_build_editable(config_settings) + cuda_requirements()


def build_sdist(sdist_directory, config_settings=None):
  """For pip. Adds a file with the commit, because a build from the archive has no git."""
  root = Path(__file__).resolve().parent
  if not (root / ".git").exists():
    return _build.build_sdist(sdist_directory, config_settings)
  command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
  commit = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True).stdout
  file = root / "COMMIT"
  file.write_text(commit or "unknown\n")
  try:
    return _build.build_sdist(sdist_directory, config_settings)
  finally:
    file.unlink()


if __name__ == "__main__":
  print(*cuda_requirements())
