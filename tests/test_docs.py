"""The files and functions that the documentation names exist, and its code runs."""

import re
import subprocess
from pathlib import Path

import pytest

from jax_magi._src.exchange_check import api as exchange_api
from tests.doc_blocks import blocks_of, run_python

ROOT = Path(__file__).resolve().parent.parent
# Their code trains models, compiles programs for many devices, or many operations one by one.
_LONG_PAGES = {
  "README.md",
  "docs/attention.md",
  "docs/context_parallel.md",
  "docs/guides/context_parallel.md",
  "docs/guides/gqa.md",
  "docs/guides/memory.md",
  "docs/guides/mla.md",
  "docs/guides/muon_clip.md",
  "docs/guides/packed_documents.md",
  "docs/integrations.md",
  "docs/mla.md",
  "docs/numerics.md",
  "docs/overlap.md",
  "docs/qk_clip.md",
  "docs/reference/attention.md",
  "docs/reference/context_parallel.md",
  "docs/reference/optim.md",
  "docs/troubleshooting.md",
}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def _with(language):
  return [page for page in PAGES if any(b.language == language for b in blocks_of(page))]


def _name(page):
  return page.relative_to(ROOT).as_posix()


def _marked(page):
  return pytest.param(page, marks=pytest.mark.long) if _name(page) in _LONG_PAGES else page


@pytest.mark.parametrize("page", [_marked(page) for page in _with("python")], ids=_name)
@pytest.mark.usefixtures("with_promotion")
def test_python_runs(page, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # Some blocks write files.
  # A page checks an exchange. test_exchange_check.py does so with all degrees.
  monkeypatch.setattr(exchange_api, "_DEGREES", (1,))
  assert run_python(page) > 0


@pytest.mark.parametrize("page", _with("python"), ids=_name)
def test_what_is_from_a_file_stands_there(page):
  for block in blocks_of(page):
    assert not block.file or block.code in (ROOT / block.file).read_text(), block.line


@pytest.mark.parametrize("page", _with("sh"), ids=_name)
def test_commands_can_be_parsed_and_name_what_is_there(page):
  for block in blocks_of(page):
    if block.language != "sh":
      continue
    subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
    scripts = re.findall(r"(?:python3?|bash) ([\w./]+\.(?:py|sh))", block.code)
    modules = re.findall(r"-m ((?:jax_magi|benchmarks)[\w.]*)", block.code)
    files = [ROOT / name for name in scripts]
    for name in modules:
      path = ROOT.joinpath(*name.split("."))
      files.append(path / "__main__.py" if path.is_dir() else path.with_suffix(".py"))
    assert [path for path in files if not path.exists()] == [], f"line {block.line}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_files_that_are_named_exist(page):
  text = page.read_text()
  named = re.findall(r"`((?:jax_magi|cc|tests|docs|benchmarks|examples)/[\w./]+)`", text)
  linked = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
  missing = {name for name in named if not (ROOT / name).exists()}
  missing |= {name for name in linked if not (page.parent / name).exists()}
  assert missing == set()
  assert named or linked or page.name != "design.md"


def test_every_environment_variable_is_in_the_table():
  sources = "".join(path.read_text() for path in (ROOT / "jax_magi").rglob("*.py"))
  names = set(re.findall(r'"((?:JAX_)?MAGI_[A-Z_]+)"', sources))
  assert len(names) >= 3
  table = (ROOT / "docs" / "functions.md").read_text()
  assert {name for name in names if f"`{name}`" not in table} == set()


def test_every_hop_of_the_walk_is_there():
  text = (ROOT / "docs" / "design.md").read_text()
  hops = re.findall(r"^\| (\d+) \| `([\w./]+)`: ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
  assert [int(number) for number, _, _ in hops] == list(range(1, len(hops) + 1))
  assert 5 <= len(hops) <= 8
  for _, path, names in hops:
    for name in re.findall(r"\w+", names):
      defined = rf"(?:def |class |[ :]){name}[(:]"
      assert re.search(defined, (ROOT / path).read_text()), f"{path}: {name}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "guides").glob("*.md")), ids=_name)
def test_guides_hide_nothing(page):
  blocks = [block for block in blocks_of(page) if block.language == "python"]
  assert len(blocks) >= 3
  assert all(block.is_shown and block.file is None and block.package is None for block in blocks)
