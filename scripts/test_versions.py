"""Builds and tests the package with each supported combination of Python and JAX.

python scripts/test_versions.py                              # all tests, all three
python scripts/test_versions.py --python 3.11 -- tests/test_mask.py

Interpreters are found as python3.11 and so on. One that is missing is an error, after the others
have run.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The oldest JAX that is supported is the last one for Python 3.11.
VERSIONS = {"3.11": "0.10.2", "3.12": "0.11.*", "3.13": "0.12.*"}


def test(interpreter: str, jax: str, arguments: list[str]) -> bool:
  """Builds a wheel with this Python, and tests it with this JAX."""
  with tempfile.TemporaryDirectory() as folder:
    build = [interpreter, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, "."]
    # Not in build/, whose settings are those of another environment.
    build += ["--config-settings", f"build-dir={folder}/build"]
    if subprocess.run(build, cwd=ROOT, check=False).returncode:
      return False
    (wheel,) = Path(folder).glob("*.whl")
    command = [interpreter, "scripts/test_wheel.py", str(wheel), "--jax", jax, *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main() -> int:
  """Runs all, and returns the exit status: 1 if one failed or is missing."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--python", choices=list(VERSIONS), nargs="+", default=list(VERSIONS))
  parser.add_argument("arguments", nargs="*", help="for pytest, after --")
  options = parser.parse_args()
  results = {}
  for python in options.python:
    interpreter = shutil.which(f"python{python}")
    name = f"Python {python}, JAX {VERSIONS[python]}"
    if interpreter is None:
      results[name] = f"there is no python{python}"
      continue
    with tempfile.TemporaryDirectory() as folder:
      # With pip, which the interpreter itself may lack.
      subprocess.run([interpreter, "-m", "venv", folder], check=True)
      passed = test(str(Path(folder) / "bin" / "python"), VERSIONS[python], options.arguments)
    results[name] = "passed" if passed else "failed"
  print(*(f"{name}: {result}" for name, result in results.items()), sep="\n")
  return 0 if set(results.values()) == {"passed"} else 1


if __name__ == "__main__":
  sys.exit(main())
