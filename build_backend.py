"""The build backend: scikit-build-core, and the commit in source archives."""

import subprocess
from pathlib import Path

from scikit_build_core import build as _build
from scikit_build_core.build import (  # noqa: F401
  build_editable,
  build_wheel,
  get_requires_for_build_editable,
  get_requires_for_build_sdist,
  get_requires_for_build_wheel,
  prepare_metadata_for_build_editable,
  prepare_metadata_for_build_wheel,
)


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
