#!/usr/bin/env python3
"""Development commands. Each sets up what it needs, in `.venv` and `build/`, on first use.

python3 dev.py demo    train a small GPT with and without QK-Clip, and plot it (first, a mask)
python3 dev.py test    run the tests; with --all, the long ones too (other arguments go to pytest)
python3 dev.py lint    check formatting, lint, types, and that the documentation's site builds
python3 dev.py gpu     run the GPU tests and the sanitizers, and print one table (see `--help`)
python3 dev.py bench   time attention against XLA's (extra arguments go to the benchmark)
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
HERE = ROOT / "build" / "here"  # The package, as `gpu --here` builds it.
PLUGIN = ROOT / "build" / "cuda_plugin"  # Compiles programs for GPUs on machines without one.
# The targets that the kernels for sm_80 and later are compiled for here: sm_80 and PTX. Wheels have
# machine code for more GPUs, which takes minutes more.
SM80 = "cmake.define.JAX_MAGI_SM80_ARCHITECTURES=80"
# Python keeps compiled modules there, even if the environment forbids it. Without them, a process
# that imports JAX takes three times as long to start, and tests start many.
BYTECODE = {
  "PYTHONDONTWRITEBYTECODE": "",
  "PYTHONPYCACHEPREFIX": str(ROOT / "build" / "bytecode"),
}


def run(*command: object, **environment: str) -> None:
  """Runs a command from the repository root; a failure ends the program with its exit status."""
  print("+", *command, flush=True)
  status = subprocess.run(
    [str(c) for c in command], cwd=ROOT, env={**os.environ, **environment}, check=False
  ).returncode
  if status:
    sys.exit(status)


def run_together(*commands: tuple[object, ...]) -> None:
  """Runs commands at the same time; a failure ends the program once all have ended."""
  processes = []
  for command in commands:
    print("+", *command, flush=True)
    processes.append(subprocess.Popen([str(c) for c in command], cwd=ROOT))
  status = max(abs(process.wait()) for process in processes)
  if status:
    sys.exit(status)


def requirements(config: dict, group: str) -> list[str]:
  """The packages that a group of commands needs: "demo", or "dev" for all commands."""
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
    if group == "dev" and builds_cuda():
      install_plugin(*install)
    if group == "demo":  # Something to look at while kernels are compiled.
      run(PYTHON, "examples/quick_start.py", "--only-picture", PYTHONPATH=str(ROOT))
  # Not isolated: the build folder is kept, and only what changed is compiled.
  path = f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"
  # Verbose, it shows what ptxas says of each kernel: registers, spills.
  verbosity = "--verbose" if os.environ.get("JAX_MAGI_VERBOSE") else "--quiet"
  settings = f"--config-settings={SM80}"
  install = ("install", verbosity, "--no-build-isolation", "--no-deps", settings, "--editable", ".")
  run(PYTHON, "-m", "pip", *install, PATH=path)
  stamps[group].write_text(digest)


def builds_cuda() -> bool:
  """Whether the CUDA kernels will be built."""
  is_wanted = os.environ.get("JAX_MAGI_CUDA", "AUTO").upper() != "OFF"
  return is_wanted and any(map(shutil.which, ("nvcc", "/usr/local/cuda/bin/nvcc")))


def install_plugin(*install: str) -> None:
  """Installs JAX's CUDA plugin (130 MB), for tests of programs for many GPUs.

  It is not in the environment, where every process would look for a GPU and warn about it.
  """
  command = [str(PYTHON), "-c", "import jax; print(jax.__version__)"]
  version = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
  packages = [f"{name}=={version}" for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt")]
  target = ("--no-deps", "--upgrade", "--target", PLUGIN)
  install_command = [str(x) for x in (PYTHON, "-m", "pip", *install, *target, *packages)]
  if subprocess.run(install_command, cwd=ROOT, check=False).returncode:
    print(f"{' and '.join(packages)} cannot be had: programs for GPUs are not tested", flush=True)


def demo(*arguments: str) -> None:
  """Trains a small GPT with and without QK-Clip, and plots it."""
  run(PYTHON, "examples/muon_qk_clip.py", "--compare", *arguments)


def test(*arguments: str) -> None:
  """Runs the tests on all cores, without the long ones unless `--all` is given."""
  rest = [argument for argument in arguments if argument != "--all"]
  chosen = ("-m", "not long") if len(rest) == len(arguments) else ()
  # Neighbours stay together, as they share compiled programs.
  workers = ("-n", str(os.cpu_count() or 1), "--dist", "worksteal")
  run(PYTHON, "-m", "pytest", *workers, *chosen, *rest)


def lint() -> None:
  """Checks formatting, lint and types, and builds the documentation into build/site."""
  sources = [p for s in ("*.h", "*.cc", "*.cuh", "*.cu") for p in sorted((ROOT / "cc").rglob(s))]
  os.environ["NO_MKDOCS_2_WARNING"] = "1"
  run_together(
    (PYTHON, "-m", "mypy"),  # The first time, it takes longer than all others.
    (PYTHON, "-m", "ruff", "check", "."),
    (PYTHON, "-m", "ruff", "format", "--check", "."),
    (VENV / "bin" / "clang-format", "--dry-run", "--Werror", *sources),
    (PYTHON, "-m", "mkdocs", "build", "--strict", "--quiet"),
  )


def build_here(variants: str | None) -> None:
  """Builds the package with the installed Python and tools, without a network."""
  folder = HERE.with_name("here_cmake")
  # An option that is no longer given would stay in the cache. What is compiled is kept.
  (folder / "CMakeCache.txt").unlink(missing_ok=True)
  settings = [f"build-dir={folder}"]
  if variants:
    settings.append(f"cmake.define.JAX_MAGI_CUDA_VARIANTS={variants}")
  install = ("install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--upgrade")
  command = [*install, "--target", HERE, *(f"--config-settings={x}" for x in settings), "."]
  environment = {
    "JAX_MAGI_CUDA": os.environ.get("JAX_MAGI_CUDA", "ON"),
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
  }
  run(sys.executable, "-m", "pip", *command, **environment)


def gpu(*arguments: str) -> None:
  """Builds, runs the GPU tests and the sanitizers, and prints one table."""
  parser = argparse.ArgumentParser(
    prog="dev.py gpu",
    allow_abbrev=False,
    epilog="Other arguments go to scripts/gpu_tests.py, and its --help explains them.",
  )
  parser.add_argument("--here", action="store_true", help="use this Python, and no network")
  parser.add_argument("--variants", help='with --here: kernels, such as "128,128,bfloat16_t"')
  options, others = parser.parse_known_args(arguments)
  if options.here:
    build_here(options.variants)
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    run(sys.executable, "scripts/gpu_tests.py", *others, PYTHONPATH=path)
    return
  if options.variants:
    parser.error("--variants needs --here")
  set_up("dev")
  if not any(VENV.glob("lib/python*/site-packages/jax_plugins/xla_cuda*")):
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extra = config["project"]["optional-dependencies"]["cuda13"]
    run(PYTHON, "-m", "pip", "install", "--quiet", "--no-compile", *extra)
  run(PYTHON, "scripts/gpu_tests.py", *others)


def bench(*arguments: str) -> None:
  """Runs the attention benchmark."""
  run(PYTHON, "-m", "benchmarks.attention", *arguments)


COMMANDS = {command.__name__: command for command in (demo, test, lint, gpu, bench)}


def main() -> None:
  """Entry point."""
  if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
    sys.exit(__doc__)
  os.environ |= BYTECODE
  if sys.argv[1] != "gpu":  # Which builds in one of two ways.
    set_up("demo" if sys.argv[1] == "demo" else "dev")
  COMMANDS[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
  main()
