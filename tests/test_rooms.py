"""The layout: which room may import which, in Python and C++. New edges are decided here."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "jax_magi" / "_src"
CC = ROOT / "cc"

# Each room, or shared module, with the rooms that it imports. Rooms import only later lines.
PYTHON = {
  "public": {
    "about",
    "attention",
    "context_parallel",
    "exchange_check",
    "masks",
    "optim",
    "overlap",
    "softmax",
    "version",
  },
  "about": {"native", "version"},
  "overlap": {"native"},
  "exchange_check": {"arguments", "context_parallel", "masks"},
  "context_parallel": {"arguments", "attention", "masks", "native", "optim", "transforms"},
  "softmax": {"arguments", "masks", "native", "transforms"},
  "attention": {"arguments", "masks", "native", "softmax_lse", "transforms"},
  "optim": {"transforms"},
  "masks": {"arguments", "transforms"},
  "native": {"arguments", "transforms"},
  "transforms": set(),
  "arguments": set(),
  "softmax_lse": set(),
  "version": set(),
  "reference": set(),
}

# Each folder of cc/ with the folders that it includes; "" has the shared headers.
CPP = {
  "ffi": {"", "cpu", "cuda", "cuda/attention", "cuda/overlap", "cuda/softmax"},
  "cpu": {""},
  "cuda/attention/sm90": {"", "cuda", "cuda/attention"},
  "cuda/attention/sm80": {"", "cuda", "cuda/attention"},
  "cuda/attention": {"", "cuda"},
  "cuda/overlap": {"cuda"},
  "cuda/softmax": {"", "cuda"},
  "cuda": set(),
  "": set(),
}

# Prefixes of external headers, with the folders that may include them.
OUTSIDE = {
  "xla/": {"ffi"},
  "nanobind/": {"ffi"},
  "cute/": set(),
  "cutlass/": set(),
  "cuda": {"cuda", "cuda/attention", "cuda/attention/sm90", "cuda/softmax"},
}

MAX_LINES = 450


def _python_files():
  return sorted((ROOT / "jax_magi").rglob("*.py"))


def _python_room(module: str) -> str:
  """`jax_magi._src.masks.mask` -> `masks`."""
  parts = module.split(".")
  if parts[:2] == ["jax_magi", "_src"]:
    return parts[2] if len(parts) > 2 else "_src"
  return "reference" if parts[1:] == ["reference"] else "public"


def _module_name(path: Path) -> str:
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path):
  """The modules of this project that a file imports, as deep as the statement says."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: imports are absolute"
      names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    else:
      continue
    yield from (name for name in names if name.split(".")[0] == "jax_magi")


def test_python_rooms_know_only_what_they_should():
  edges: dict[str, set[str]] = {room: set() for room in PYTHON}
  for path in _python_files():
    room = _python_room(_module_name(path))
    if room == "_src":
      assert not list(_imports(path))
      continue
    edges.setdefault(room, set()).update(_python_room(name) for name in _imports(path))
  assert {room: seen - {room} for room, seen in edges.items()} == PYTHON


def test_rooms_are_layers():
  order = list(PYTHON)
  for room, known in PYTHON.items():
    assert all(order.index(other) > order.index(room) for other in known), room


def test_public_modules_only_re_export():
  for path in (ROOT / "jax_magi" / "__init__.py", ROOT / "jax_magi" / "optim" / "__init__.py"):
    for node in ast.parse(path.read_text()).body:
      is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
      is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
      assert is_all or is_docstring or isinstance(node, ast.ImportFrom), ast.unparse(node)


@pytest.mark.parametrize(
  ("text", "home"),
  [("jax_magi_attention_", "native"), ("jax_magi_softmax_", "native"), ("ffi_call", "native")],
)
def test_only_native_knows_the_ffi(text, home):
  found = {p.relative_to(SRC).parts[0] for p in SRC.rglob("*.py") if text in p.read_text()}
  assert found == {home}


def test_only_backends_names_a_gpu_platform():
  def strings(path):
    tree = ast.parse(path.read_text())
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}

  found = {p.relative_to(SRC).as_posix() for p in SRC.rglob("*.py") if "cuda" in strings(p)}
  assert found == {"native/backends.py"}


def _cpp_files():
  suffixes = {".h", ".cuh", ".cc", ".cu"}
  return sorted(path for path in CC.rglob("*") if path.suffix in suffixes)


def _folder(path: Path) -> str:
  folder = path.parent.relative_to(CC).as_posix()
  return "" if folder == "." else folder


def test_cpp_folders_include_only_what_they_should():
  edges: dict[str, set[str]] = {folder: set() for folder in CPP}
  for path in _cpp_files():
    for name in re.findall(r'#include "cc/(\S+)"', path.read_text()):
      assert (CC / name).exists(), f"{path} includes {name}"
      edges.setdefault(_folder(path), set()).add(_folder(CC / name))
  assert {folder: seen - {folder} for folder, seen in edges.items()} == CPP


def test_cpp_folders_include_only_what_they_should_from_outside():
  for path in _cpp_files():
    for name in re.findall(r'#include ["<](?!cc/)(\S+)[">]', path.read_text()):
      for prefix, folders in OUTSIDE.items():
        assert not name.startswith(prefix) or _folder(path) in folders, f"{path} includes {name}"


@pytest.mark.parametrize("folder", ["cuda/attention", "cuda/attention/sm80", "cuda/attention/sm90"])
def test_kernels_of_an_architecture_have_a_namespace(folder):
  """Those of several architectures have the same names; what they share is one level above."""
  headers = [path for path in (CC / folder).iterdir() if path.suffix in {".h", ".cuh"}]
  assert headers
  expected = folder.replace("/", "::").replace("::attention", "")
  for path in headers:
    found = re.findall(r"^namespace (jax_magi\S*) {$", path.read_text(), re.MULTILINE)
    assert found == [f"jax_magi::{expected}"], path


def test_files_can_be_read_in_one_sitting():
  folders = ("jax_magi", "cc", "tests", "benchmarks", "examples", "docs")
  suffixes = {".py", ".h", ".cuh", ".cc", ".cu"}
  paths = [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in suffixes]
  lengths = {p.relative_to(ROOT).as_posix(): len(p.read_text().splitlines()) for p in paths}
  assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}
