"""What MkDocs needs to show files of the repository that are not under docs/.

README.md is the first page; CONTRIBUTING.md and its like, the results of benchmarks and the
examples keep their places in the repository, as pages or files of the site. Links between them are
those that work in the repository, and are moved by one folder here.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
MORE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/results/*", "examples/*.py")


def on_files(files, config):
  """Adds the files."""
  files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
  for path in sorted(path for pattern in MORE for path in ROOT.glob(pattern)):
    name = path.relative_to(ROOT).as_posix()
    files.append(File.generated(config, name, abs_src_path=str(path)))
  return files


def on_page_markdown(markdown, page, config, files):
  """Moves links: docs/ is the site's root."""
  source = Path(page.file.abs_src_path)
  if source.is_relative_to(ROOT / "docs"):
    up = "../" * len(source.parent.relative_to(ROOT / "docs").parts)
    return re.sub(rf"\]\({up}\.\./", f"]({up}", markdown)
  return re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)
