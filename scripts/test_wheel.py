"""Tests a built wheel in a clean environment, away from the sources of the package.

python -m build                                          # dist/*.tar.gz, and a wheel from it
python scripts/test_wheel.py dist/jax_magi-*.whl         # all tests that need no sources
python scripts/test_wheel.py WHEEL tests/test_mask.py    # some; arguments go to pytest
python scripts/test_wheel.py WHEEL --jax 0.10.2          # with this JAX, and not the newest

The environment has the Python that runs this script. CUDA wheels can be imported without a driver,
and are tested like CPU wheels if there is none.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# These look at sources.
DEFAULT = ["tests", "--ignore=tests/test_rooms.py", "--ignore=tests/test_docs.py"]
# Of the extra "dev": what only checks or builds sources stays out.
TOOLS = ("clang-format", "cmake", "mkdocs", "mypy", "ninja", "ruff")


def run(*command: object, cwd: Path) -> None:
  """Runs a command; a failure ends the program with its exit status."""
  print("+", *command, flush=True)
  status = subprocess.run([str(c) for c in command], cwd=cwd, check=False).returncode
  if status:
    sys.exit(status)


def main(wheel: Path, jax: str | None, arguments: list[str]) -> None:
  """Installs and tests."""
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  extras = project["optional-dependencies"]["dev"]
  requirements = [r for r in extras if not r.startswith(TOOLS)]
  if jax is not None:
    requirements += [f"jax=={jax}", f"jaxlib=={jax}"]
  print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    venv.create(folder / "venv", with_pip=True, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel, *requirements, cwd=folder)
    # What tests need, without the package.
    files = subprocess.run(
      ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
      cwd=ROOT,
      check=True,
      capture_output=True,
      text=True,
    ).stdout.splitlines()
    for file in files:
      if not file.startswith(("jax_magi/", "cc/")) and (ROOT / file).exists():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes((ROOT / file).read_bytes())
    run(python, "-m", "jax_magi", cwd=folder)
    run(python, "-m", "pytest", "-q", *(arguments or DEFAULT), cwd=folder)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("wheel", type=Path)
  parser.add_argument("--jax", metavar="VERSION")
  options, more = parser.parse_known_args()
  if not options.wheel.is_file():
    parser.error(f"there is no file {options.wheel}")
  main(options.wheel.resolve(), options.jax, more)
