"""Trains small models with MaxText or Levanter, with jax_magi as their attention.

python scripts/test_trainers.py maxtext maxtext.tar.gz     # github.com/AI-Hypercomputer/maxtext
python scripts/test_trainers.py levanter marin.tar.gz      # github.com/marin-community/marin
python scripts/test_trainers.py maxtext ARCHIVE --environment DIR    # kept, for further runs
python scripts/test_trainers.py maxtext ARCHIVE -- llama gemma2      # some models only

Makes an environment with what the trainer imports, all from PyPI, and this package, built there;
the trainer itself is used as it is in the archive of its sources, which is yours to provide
(`git archive`, or a download; a folder will do). Both trainers need Python 3.12. Then it runs
scripts/trainers/check_NAME.py, which says what is compared. Needs 4 GB of disk, no GPU, and 20 to
40 CPU minutes for MaxText, 5 for Levanter.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What the trainers import on the way to their trainers; their own lists have much more.
REQUIREMENTS = {
  "maxtext": """
    jax==0.11.* jaxlib==0.11.* flax optax orbax-checkpoint grain omegaconf pydantic aqtp qwix
    tokamax drjax pathwaysutils transformers sentencepiece tiktoken tensorboardx datasets==5.*
    ml-collections absl-py chex etils jsonlines pillow psutil jinja2 sympy
  """,
  "levanter": """
    aqtp braceexpand cloudpickle connect-python datasets==5.* draccus equinox gitpython
    humanfriendly jax==0.11.* jaxlib==0.11.* jaxtyping jinja2 jmp mergedeep optax pyarrow pydantic
    pytimeparse requests s3fs safetensors tblib tensorstore tokenizers tqdm-loggable transformers
    wandb zstandard
  """,
}
SOURCES = {"maxtext": ["src"], "levanter": ["lib/*/src"]}  # In the archives.


def run(*command: object, **options: object) -> int:
  """Runs a command, and returns its exit status."""
  print("+", *command, flush=True)
  return subprocess.run([str(c) for c in command], check=False, **options).returncode


def make(environment: Path, trainer: str, python: str) -> Path:
  """Installs everything but the trainer, unless it is there, and returns the interpreter."""
  interpreter = environment / "bin" / "python"
  if (environment / "made").exists():
    return interpreter
  build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", environment / "wheel", ROOT]
  build += ["--config-settings", f"build-dir={environment}/build"]
  for command in (
    (python, "-m", "venv", environment),
    (interpreter, "-m", "pip", "install", "--quiet", *REQUIREMENTS[trainer].split()),
    (interpreter, *build),
  ):
    if run(*command, env=os.environ | {"JAX_MAGI_CUDA": "OFF"}):
      sys.exit(1)
  (wheel,) = (environment / "wheel").glob("*.whl")
  if run(interpreter, "-m", "pip", "install", "--quiet", "--no-deps", wheel):
    sys.exit(1)
  (environment / "made").touch()
  return interpreter


def sources_of(trainer: str, archive: Path, folder: Path) -> list[Path]:
  """Folders to import the trainer from."""
  if archive.is_file():
    with tarfile.open(archive) as file:
      file.extractall(folder, filter="data")
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
  with contextlib.ExitStack() as stack:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    environment = (options.environment or folder / "environment").resolve()
    interpreter = make(environment, options.trainer, options.python)
    sources = sources_of(options.trainer, options.archive.resolve(), folder / "trainer")
    # Away from the package's sources: the check takes what was installed.
    shutil.copytree(ROOT / "examples", folder / "check" / "examples")
    paths = os.pathsep.join(map(str, (folder / "check", *sources)))
    check = ROOT / "scripts" / "trainers" / f"check_{options.trainer}.py"
    variables = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    return run(interpreter, check, *options.arguments, cwd=folder / "check", env=variables)


if __name__ == "__main__":
  sys.exit(main())
