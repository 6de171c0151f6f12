"""Programs that compile for GPUs, each in a process of its own: on one GPU; or on none, where
JAX's CUDA plugin and our CUDA kernels are.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import HAS_GPU

_ROOT = Path(__file__).resolve().parent.parent
# The folder into which `dev.py` puts the plugin. It may also be an installed package.
_FOLDER = _ROOT / "build" / "cuda_plugin"
_PLUGIN = "jax_plugins/xla_cuda13"


def _missing() -> str:
  """What is missing to compile for GPUs, if anything."""
  spec = importlib.util.find_spec("jax_plugins")
  folders = [
    _FOLDER,
    *(Path(path).parent for path in (spec and spec.submodule_search_locations) or ()),
  ]
  if not any((folder / _PLUGIN).is_dir() for folder in folders):
    return "JAX's CUDA plugin"
  if importlib.util.find_spec("jax_magi._src.native._cuda") is None:
    return "our CUDA kernels"
  return "" if shutil.which("ptxas", path=_path()) else "ptxas"


def _path() -> str:
  return os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])


def run_compiler(module: str, *arguments: str) -> str:
  """Runs a module of `tests` that compiles for GPUs, and returns what it prints."""
  environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
  if not HAS_GPU:
    paths = [environment.get("PYTHONPATH", ""), str(_FOLDER)]
    environment |= {"PATH": _path(), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
  command = [sys.executable, "-m", module, *arguments]
  done = subprocess.run(
    command, capture_output=True, text=True, timeout=600, env=environment, cwd=_ROOT, check=False
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


_MISSING = "" if HAS_GPU else _missing()
needs_compiler = (
  pytest.mark.gpu
  if HAS_GPU
  else pytest.mark.skipif(bool(_MISSING), reason=f"needs a GPU, or {_MISSING}")
)
