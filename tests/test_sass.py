"""The machine code of the Hopper kernels: the compiler can silently halve their speed."""

import collections
import concurrent.futures
import functools
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from jax_magi._src.native.backends import CUDA
from jax_magi._src.overlap.kinds import Kind, kernel_kind


def _search_path() -> str:
  """Where the tools may be: in a CUDA toolkit, or in NVIDIA's wheels of them."""
  spec = importlib.util.find_spec("nvidia")
  roots = spec.submodule_search_locations if spec else None
  wheels = [str(folder) for root in roots or () for folder in Path(root).glob("*/bin")]
  return os.pathsep.join([os.environ["PATH"], *wheels])


@functools.cache
def _library_and_environment() -> tuple[Path, dict[str, str]]:
  """The library to inspect, and an environment in which cuobjdump and nvdisasm are found."""
  if CUDA.module is None:
    pytest.skip("built without the CUDA kernels")
  path = _search_path()
  cuobjdump, nvdisasm = (shutil.which(tool, path=path) for tool in ("cuobjdump", "nvdisasm"))
  if cuobjdump is None or nvdisasm is None:
    pytest.skip("needs cuobjdump and nvdisasm")
  library = Path(CUDA.module.__file__).with_name("libjax_magi_cuda.so")
  return library, {**os.environ, "PATH": path}


def _dump(*options: object, folder: Path | None = None) -> str:
  """The output of cuobjdump for the library."""
  library, environment = _library_and_environment()
  command = ["cuobjdump", *map(str, options), str(library)]
  return subprocess.check_output(command, env=environment, cwd=folder, text=True)


def _disassemble(file: Path) -> str:
  """The code of a file as text."""
  # cuobjdump prints each instruction's bits, too: four times as much text.
  command = ["nvdisasm", "--print-code", "--no-dataflow", str(file)]
  _, environment = _library_and_environment()
  return subprocess.check_output(command, env=environment, text=True)


def _kernels(part_of_name: str, folder: Path) -> dict[str, str]:
  """The machine code of the attention kernels that have this in their names."""
  _dump("-xelf", "sm_90a", folder=folder)
  files = [path for path in sorted(folder.iterdir()) if part_of_name.encode() in path.read_bytes()]
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    text = "".join(pool.map(_disassemble, files))
  _, *parts = re.split(r"^\.text\.(\S+):$", text, flags=re.MULTILINE)
  named = dict(zip(parts[::2], parts[1::2], strict=True))
  # A file has several kernels, with and without terms.
  is_attention = re.compile(r"\d(Forward|Backward)Kernel").search
  found = {n: code for n, code in named.items() if part_of_name in n and is_attention(n)}
  assert found
  return found


def test_only_the_kernels_for_hopper_are_for_hopper_alone():
  """Softmax, and the kernels around attention kernels, are for Ampere and later."""
  _, *parts = re.split(r"arch = (\w+)", _dump("-res-usage"))
  names = collections.defaultdict(set)
  for arch, text in zip(parts[::2], parts[1::2], strict=True):
    names[arch] |= set(re.findall(r"Function (\w+):", text))
  # What compiles for sm_80 has no instruction of Hopper.
  since_ampere = {name for found in names.values() for name in found if "4cuda4sm80" in name}
  assert since_ampere <= names["sm_80"] and not since_ampere & names["sm_90a"]
  for found in names.values():
    found -= since_ampere
  assert {arch for arch, found in names.items() if found} == {"sm_80", "sm_90", "sm_90a"}
  assert all("Softmax" in name for name in names["sm_90"])
  around = names["sm_80"] - names["sm_90"]
  assert names["sm_80"] > names["sm_90"]
  assert any("TileListKernel" in name for name in around)
  # By the rule that profiles are read by.
  is_attention = {name: kernel_kind(name, "") is Kind.ATTENTION for name in names["sm_90a"]}
  assert {name for name, x in is_attention.items() if not x} == around
  assert all(re.search(r"\d(Forward|Backward)Kernel", n) for n, x in is_attention.items() if x)
  ptx = collections.Counter(re.findall(r"\.(sm_\w+)\.ptx", _dump("--list-ptx")))
  variants = CUDA.module.variants()["attention sm80"]
  # Two kernels of each pass: without terms, with. They share a file.
  assert len(since_ampere) >= 4 * len(variants) > 0
  sources = (Path(__file__).resolve().parent.parent / "cc" / "cuda").rglob("*.cu")
  num_around = sum(not path.stem.endswith("_instance") for path in sources)
  # Three are those of softmax, for a dtype each.
  assert ptx == {"sm_80": 2 * len(variants) + num_around + 3}


def _count_products(code: str) -> int:
  return code.count(" HGMMA.")  # An expression would take seconds for all kernels.


def _check_that_products_overlap(kernels):
  # Where ptxas cannot keep a product in flight, it waits for it at once: a wait after each wgmma.
  for name, code in kernels.items():
    assert _count_products(code) >= 16, name
    most = 8 if _has_roles(name) else 6
    assert code.count("WARPGROUP.DEPBAR") <= most, f"{name}: products run one by one"


def _has_roles(name: str) -> bool:
  """Whether warpgroups have different roles, with a loop for each."""
  return "BackwardConfigILi256E" in name or "WideBackwardTermsConfig" in name


def _main_loops(code: str, has_roles: bool) -> list[str]:
  """The shortest loops with half of the products, or a third if there are two such loops."""
  lines: list[str] = []
  index: dict[str, int] = {}  # Of the instruction behind each label.
  for line in code.splitlines():
    if line.startswith(".L_"):
      index[line.rstrip(":")] = len(lines)
    elif re.match(r"\s+/\*[0-9a-f]{4,}\*/ ", line):
      lines.append(line)
  products = np.cumsum([0, *("HGMMA" in line for line in lines)])  # Before each line.
  found = []
  for end, line in enumerate(lines):
    branch = re.search(r"\bBRA\b[^;]*`\((.L_\w+)\)", line)
    begin = index[branch[1]] if branch else end
    share = products[end] - products[begin]
    if begin < end and (3 if has_roles else 2) * share >= products[-1]:
      found.append((end - begin, begin))
  assert found
  loops: list[range] = []
  for length, begin in sorted(found):
    loop = range(begin, begin + length + 1)
    if all(loop.stop <= other.start or other.stop <= loop.start for other in loops):
      loops.append(loop)
  return ["\n".join(lines[loop.start : loop.stop]) for loop in loops]


def _check_that_descriptors_are_the_same_in_a_warp(kernels):
  # Else each product waits for its descriptors on their way to uniform registers.
  for name, code in kernels.items():
    if re.search(r"\dBackwardTermsConfig", name):
      continue  # In which ptxas does not see it.
    for loop in _main_loops(code, _has_roles(name)):
      moves = len(re.findall(r"\bR2UR\b", loop))
      assert moves <= 1.5 * _count_products(loop), f"{name}: {moves} words of descriptors are moved"


def _check_that_softmax_runs_under_a_product(kernels):
  # ptxas may move it behind the wait for the product: 4% of the speed.
  tuned = r"ForwardConfigILi(64|128)ELi(64|128)EN\w+as_cutlass\w+_tELb0E"
  found = {name: code for name, code in kernels.items() if re.search(tuned, name)}
  assert found
  for name, code in found.items():
    _, loop = code.split("DEPBAR.LE gsb0, 0x1", 1)
    before, after, *_ = loop.split("DEPBAR.LE gsb0, 0x0")
    assert before.count("MUFU.EX2") >= 60 and after.count("MUFU.EX2") <= 4, name


def _check_that_tiles_do_not_wait_for_the_maximum(kernels):
  # A fence of all threads makes ptxas ask for replies: up to 4% of the speed under a window.
  forward = {name: code for name, code in kernels.items() if "ForwardKernel" in name}
  assert forward
  for name, code in forward.items():
    assert re.search(r"\bREDG\.E\.MAX", code), name
    assert not re.search(r"\bATOMG?\.E\.(MAX|MIN)", code), name


@pytest.mark.parametrize(
  "part_of_name",
  [
    # Disassembling takes most of the time: the files of the most common calls are an eighth.
    "ConfigILi128ELi128ENS0_10as_cutlass10bfloat16_tE",
    pytest.param("as_cutlass10bfloat16_t", marks=pytest.mark.long),
    pytest.param("as_cutlass6half_t", marks=pytest.mark.long),
  ],
  ids=["128 dims in bfloat16", "bfloat16", "float16"],
)
def test_code_of_attention(part_of_name, tmp_path):
  # One test, as several of pytest's workers would disassemble the same kernels.
  kernels = _kernels(part_of_name, tmp_path)
  _check_that_products_overlap(kernels)
  _check_that_descriptors_are_the_same_in_a_warp(kernels)
  _check_that_softmax_runs_under_a_product(kernels)
  _check_that_tiles_do_not_wait_for_the_maximum(kernels)
