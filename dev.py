#!/usr/bin/env python3
"""Development commands. Each sets up what it needs, in `.venv` and `build/`, on first use.

python3 dev.py demo    train a small GPT with and without QK-Clip, and plot it (first, a mask)
python3 dev.py test    run the tests (extra arguments go to pytest)
python3 dev.py lint    check formatting, lint, types, and that the documentation's site builds
python3 dev.py bench   time attention against XLA's (extra arguments go to the benchmark)
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"


def run(*command: object, **environment: str) -> None:
  """Runs a command from the repository root; a failure ends the program with its exit status."""
  print("+", *command, flush=True)
  status = subprocess.run(
    [str(c) for c in command], cwd=ROOT, env={**os.environ, **environment}, check=False
  ).returncode
  if status:
    sys.exit(status)


def requirements(config: dict, group: str) -> list[str]:
  """What has to be installed for a group of commands: "demo", or "dev" for all of them."""
  extras = config["project"]["optional-dependencies"]
  found = [*config["build-system"]["requires"], *config["project"]["dependencies"]]
  if group == "dev":
    return found + extras["dev"]
  # A newcomer waits for it: half of the time to install all.
  tools = [line for line in extras["dev"] if line.startswith(("cmake", "ninja"))]
  return found + tools + extras["optim"] + extras["plot"]


def set_up(group: str) -> None:
  """Makes the environment of pyproject.toml, and builds the package into it."""
  pyproject = (ROOT / "pyproject.toml").read_bytes()
  digest = hashlib.sha256(pyproject).hexdigest()
  stamps = {name: VENV / f"{name}.sha256" for name in ("demo", "dev")}
  enough = [stamps["dev"], stamps[group]]  # All tools are enough for the demo.
  if not any(stamp.exists() and stamp.read_text() == digest for stamp in enough):
    # As `python -m venv` does it, so that one made by hand is welcome too.
    venv.create(VENV, with_pip=True, symlinks=os.name != "nt")
    packages = requirements(tomllib.loads(pyproject.decode()), group)
    # Not compiled to bytecode: most of it is never imported, and the rest is when it is.
    install = ("install", "--quiet", "--no-compile")
    run(PYTHON, "-m", "pip", *install, *packages)
    command = [str(PYTHON), "build_backend.py"]
    more = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    if more.split():
      # Headers only: what the wheel itself asks for is for its Python tools.
      run(PYTHON, "-m", "pip", *install, "--no-deps", *more.split())
    if group == "demo":  # Something to look at while kernels are compiled.
      run(PYTHON, "examples/quick_start.py", "--only-picture", PYTHONPATH=str(ROOT))
  # Not isolated: the build folder is kept, and only what changed is compiled.
  path = f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"
  # Verbose, it shows what ptxas says of each kernel: registers, spills.
  verbosity = "--verbose" if os.environ.get("JAX_MAGI_VERBOSE") else "--quiet"
  install = ("install", verbosity, "--no-build-isolation", "--no-deps", "--editable", ".")
  run(PYTHON, "-m", "pip", *install, PATH=path)
  stamps[group].write_text(digest)


def demo(*arguments: str) -> None:
  """Trains a small GPT with and without QK-Clip, and plots it."""
  run(PYTHON, "examples/muon_qk_clip.py", "--compare", *arguments)


def test(*arguments: str) -> None:
  """Runs the tests, on all cores."""
  run(PYTHON, "-m", "pytest", "-n", str(os.cpu_count() or 1), *arguments)


def lint() -> None:
  """Checks formatting, lint and types, and builds the documentation into build/site."""
  run(PYTHON, "-m", "ruff", "check", ".")
  run(PYTHON, "-m", "ruff", "format", "--check", ".")
  run(PYTHON, "-m", "mypy")
  sources = [p for s in ("*.h", "*.cc", "*.cuh", "*.cu") for p in sorted((ROOT / "cc").rglob(s))]
  run(VENV / "bin" / "clang-format", "--dry-run", "--Werror", *sources)
  run(PYTHON, "-m", "mkdocs", "build", "--strict", "--quiet", NO_MKDOCS_2_WARNING="1")


def bench(*arguments: str) -> None:
  """Runs the attention benchmark."""
  run(PYTHON, "-m", "benchmarks.attention", *arguments)


COMMANDS = {command.__name__: command for command in (demo, test, lint, bench)}


def main() -> None:
  """Entry point."""
  if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
    sys.exit(__doc__)
  set_up("demo" if sys.argv[1] == "demo" else "dev")
  COMMANDS[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
  main()
