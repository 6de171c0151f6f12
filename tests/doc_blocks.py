"""The code in a page of the documentation.

All Python blocks of a page run in order, in one namespace. Code that readers do not need to see is
in a comment before a block, and runs as well. The site shows it as a folded block:

<!-- setup
q = jnp.zeros((8, 2, 16))
-->

`check` instead of `setup` marks code that runs after a block, and that the site does not show.
`<!-- needs equinox -->` skips the next block if that package is missing.
`<!-- from examples/quick_start.py -->` says that the next block is a literal part of that file, and
runs with it.
"""

import dataclasses
import importlib.util
import re
import textwrap
from pathlib import Path

_PIECES = re.compile(
  r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^ *```$"
  r"|^<!-- (?P<hidden>setup|check)\n(?P<source>.*?)^-->$"
  r"|^<!-- needs (?P<package>\w+) -->$"
  r"|^<!-- from (?P<file>[\w./]+) -->$",
  re.MULTILINE | re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Block:
  """Code of a page.

  Attributes:
    language: "python", "sh" or others; "" is no code.
    code: its text.
    line: where it begins.
    is_shown: whether readers see it.
    file: where it is from, word for word; None is from nowhere.
    package: what has to be installed to run it; None is nothing.
  """

  language: str
  code: str
  line: int
  is_shown: bool = True
  file: str | None = None
  package: str | None = None


def blocks_of(page: Path) -> list[Block]:
  """All blocks of a page, in order."""
  text = page.read_text()
  blocks: list[Block] = []
  marks: dict[str, str] = {}
  for piece in _PIECES.finditer(text):
    line = text.count("\n", 0, piece.start()) + 2
    if piece["package"] or piece["file"]:
      marks |= {name: piece[name] for name in ("package", "file") if piece[name]}
    elif piece["hidden"]:
      blocks.append(Block("python", piece["source"], line, is_shown=False))
    else:
      code = textwrap.dedent(piece["code"])
      blocks.append(Block(piece["language"], code, line, **marks))
      marks = {}
  return blocks


def run_python(page: Path) -> int:
  """Runs the Python blocks of a page, and returns the number of blocks that readers see."""
  namespace: dict = {"__name__": "__page__"}
  count = 0
  for block in blocks_of(page):
    is_missing = block.package is not None and importlib.util.find_spec(block.package) is None
    if block.language != "python" or block.file or is_missing:
      continue
    # Empty lines before it, so that errors name the page's lines.
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
    exec(code, namespace)
    count += block.is_shown
  return count
