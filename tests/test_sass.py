"""What the compiler made of the Hopper kernels: it can halve their speed without a word."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jax_magi import _ffi


def _search_path() -> str:
  """Where the tools may be: in a CUDA toolkit, or in the wheels that NVIDIA makes of them."""
  spec = importlib.util.find_spec("nvidia")
  roots = spec.submodule_search_locations if spec else None
  wheels = [str(folder) for root in roots or () for folder in Path(root).glob("*/bin")]
  return os.pathsep.join([os.environ["PATH"], *wheels])


@pytest.fixture(scope="module")
def sass() -> str:
  """The library's machine code as text."""
  if "cuda" not in _ffi.PLATFORMS:
    pytest.skip("built without the CUDA kernels")
  path = _search_path()
  cuobjdump, nvdisasm = (shutil.which(tool, path=path) for tool in ("cuobjdump", "nvdisasm"))
  if cuobjdump is None or nvdisasm is None:
    pytest.skip("needs cuobjdump and nvdisasm")
  library = Path(_ffi._cuda.__file__).with_name("libjax_magi_cuda.so")
  environment = {**os.environ, "PATH": path}
  return subprocess.check_output([cuobjdump, "-sass", library], env=environment, text=True)


def _kernels(sass: str) -> dict[str, str]:
  """Code by name."""
  _, *parts = re.split(r"Function : (\S+)", sass)
  return dict(zip(parts[::2], parts[1::2], strict=True))


def test_products_overlap(sass):
  # Where ptxas cannot keep a product in flight, it waits for it at once: a wait after each wgmma.
  counts = {
    name: (len(re.findall(r"\bHGMMA\b", code)), code.count("WARPGROUP.DEPBAR"))
    for name, code in _kernels(sass).items()
    if re.search(r"\d(Forward|Backward)Kernel", name)
  }
  assert counts
  for name, (num_products, num_waits) in counts.items():
    assert num_products >= 16, name
    assert num_waits <= 6, f"{name}: products run one by one"
