"""The documentation names files and functions that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
  text = page.read_text()
  named = re.findall(r"`((?:jax_magi|cc|tests|docs|benchmarks|examples)/[\w./]+)`", text)
  linked = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
  missing = {name for name in named if not (ROOT / name).exists()}
  missing |= {name for name in linked if not (page.parent / name).exists()}
  assert missing == set()
  assert named or linked or page.name != "design.md"


def test_every_hop_of_the_walk_is_there():
  text = (ROOT / "docs" / "design.md").read_text()
  hops = re.findall(r"^\| (\d+) \| `([\w./]+)`: `(\w+)` \|", text, re.MULTILINE)
  assert [int(number) for number, _, _ in hops] == list(range(1, len(hops) + 1))
  assert 8 <= len(hops) <= 12
  for _, path, name in hops:
    assert re.search(rf"(?:def |[ :]){name}\(", (ROOT / path).read_text()), f"{path}: {name}"
