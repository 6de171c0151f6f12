"""Trains small models with MaxText or Levanter, with jax_magi as their attention.

python scripts/test_trainers.py maxtext maxtext.tar.gz     # github.com/AI-Hypercomputer/maxtext
python scripts/test_trainers.py levanter marin.tar.gz      # github.com/marin-community/marin
python scripts/test_trainers.py maxtext ARCHIVE --environment DIR    # kept, for further runs
python scripts/test_trainers.py maxtext ARCHIVE -- llama gemma2      # some models only

The script makes an environment with the wheels from PyPI that scripts/trainers/requirements.txt
lists, which both trainers import, and with this package, built from its sources with its CPU
kernels. You provide the trainer as an archive of its sources (`git archive`, or a download), or as
a folder. Then the script runs scripts/trainers/check_NAME.py, which says what is compared. Both
trainers need Python 3.12: name it with --python if it is not `python3.12`. Needs 4 GB of disk, no
GPU, and 15 CPU minutes for MaxText, 6 for Levanter.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "scripts" / "trainers" / "requirements.txt"
SOURCES = {"maxtext": ["src"], "levanter": ["lib/*/src"]}  # In the archives.


def run(*command: object, **options: object) -> int:
  """Runs a command, and returns its exit status."""
  print("+", *command, flush=True)
  return subprocess.run([str(c) for c in command], check=False, **options).returncode


def require(purpose: str, *command: object, **options: object) -> None:
  """Runs a command, and exits if it fails."""
  if status := run(*command, **options):
    sys.exit(f"Could not {purpose}: the command above ended with status {status}.")


def make(environment: Path, python: str) -> Path:
  """Installs everything but the trainer, and returns the interpreter."""
  interpreter = environment / "bin" / "python"
  pip = (interpreter, "-m", "pip")
  if not (environment / "made").exists():
    if shutil.which(python) is None:
      sys.exit(f"There is no {python}. Name an interpreter of Python 3.12 with --python.")
    need = "import sys; sys.exit(sys.version_info[:2] != (3, 12))"
    require(f"use {python}, which must be Python 3.12", python, "-c", need)
    require(f"make {environment}", python, "-m", "venv", environment)
    # The list is complete. With a choice, pip tries many versions, and builds some of them.
    wheels = ("--only-binary", ":all:", "--no-deps", "--no-compile", "-r", REQUIREMENTS)
    require("install what the trainers import", *pip, "install", "--quiet", *wheels)
    (environment / "made").touch()
  # Built in each run, because the package may have changed.
  with tempfile.TemporaryDirectory() as folder:
    wheel = (*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    wheel += ("--config-settings", f"build-dir={folder}/build")
    require("build jax_magi", *wheel, env=os.environ | {"JAX_MAGI_CUDA": "OFF"})
    install = (*pip, "install", "--quiet", "--no-deps", "--force-reinstall")
    require("install jax_magi", *install, *Path(folder).glob("*.whl"))
  return interpreter


def sources_of(trainer: str, archive: Path, folder: Path) -> list[Path]:
  """Folders to import the trainer from."""
  if not archive.is_dir():
    try:
      with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    except (OSError, tarfile.TarError) as error:
      sys.exit(f"Could not extract {archive}: {error}")
    archive = folder
  # Archives of GitHub have everything in one folder.
  for root in (archive, *archive.iterdir()):
    found = sorted(path for pattern in SOURCES[trainer] for path in root.glob(pattern))
    if any((path / trainer).is_dir() for path in found):
      return found
  sys.exit(f"{archive} has no folder {trainer} in {SOURCES[trainer]}")


def main() -> int:
  """Makes the environment, runs the check, and returns the exit status."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("trainer", choices=list(SOURCES))
  parser.add_argument("archive", type=Path, help="of the trainer's sources, or their folder")
  parser.add_argument("--python", default="python3.12")
  parser.add_argument("--environment", type=Path, help="where to keep it")
  parser.add_argument("arguments", nargs="*", help="for the check, after --")
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    sources = sources_of(options.trainer, options.archive.resolve(), folder / "trainer")
    environment = (options.environment or folder / "environment").resolve()
    interpreter = make(environment, options.python)
    # Away from the package's sources: the check takes what was installed.
    shutil.copytree(ROOT / "examples", folder / "check" / "examples")
    paths = os.pathsep.join(map(str, (folder / "check", *sources)))
    check = ROOT / "scripts" / "trainers" / f"check_{options.trainer}.py"
    variables = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    return run(interpreter, check, *options.arguments, cwd=folder / "check", env=variables)


if __name__ == "__main__":
  sys.exit(main())
