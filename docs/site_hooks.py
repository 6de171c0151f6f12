"""MkDocs hooks that add files of the repository outside of docs/ to the site.

README.md is the first page. CONTRIBUTING.md and similar files, the results of benchmarks and the
examples stay at their places in the repository, and become pages or files of the site. Links in
these files work in the repository, and are rewritten here.

Pages also open from the file system, without a network. Scripts that Material would fetch from the
internet are replaced: mermaid.js comes from the mermaidx package, and docs/javascripts has a part
of the search.
"""

import importlib.util
import re
import textwrap
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
MERMAID, SEARCH = "javascripts/mermaid.js", "javascripts/file_search.js"
SHIM = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
SETUP = re.compile(r"^<!-- setup\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
MORE = (
  "CHANGELOG.md",
  "CONTRIBUTING.md",
  "SECURITY.md",
  "benchmarks/results/*",
  "examples/*.py",
  "examples/trainers/*.py",
)


def on_config(config):
  """Adds the link to the issue tracker, which is derived from `repo_url`."""
  project = next(entry["Project"] for entry in config.nav if "Project" in entry)
  project.append({"Issues": f"{config.repo_url.rstrip('/')}/issues"})
  return config


def on_files(files, config):
  """Adds the files."""
  # Not imported: only one file of the package is used.
  package = importlib.util.find_spec("mermaidx").submodule_search_locations[0]
  script = Path(package) / "assets" / "mermaid.js"
  files.append(File.generated(config, MERMAID, abs_src_path=str(script)))
  files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
  for path in sorted(path for pattern in MORE for path in ROOT.glob(pattern)):
    name = path.relative_to(ROOT).as_posix()
    files.append(File.generated(config, name, abs_src_path=str(path)))
  return files


def on_page_markdown(markdown, page, config, files):
  """Turns the setup code of examples into folded blocks, and moves links to the site's root."""
  markdown = SETUP.sub(_fold, markdown)
  source = Path(page.file.abs_src_path)
  if source.is_relative_to(ROOT / "docs"):
    up = "../" * len(source.parent.relative_to(ROOT / "docs").parts)
    return re.sub(rf"\]\({up}\.\./", f"]({up}", markdown)
  return re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)


def _fold(comment):
  """A folded block instead of a comment with code."""
  code = textwrap.indent(f"```python\n{comment[1]}```\n", "    ")
  return f'??? note "Setup of this example"\n\n{code}'


def on_post_page(output, page, config):
  """Replaces scripts that Material loads from the internet by the site's own."""
  up = "../" * page.file.dest_uri.count("/")
  own = [SEARCH]
  if '<pre class="mermaid">' in output:
    own.append(MERMAID)
  assert output.count(SHIM) == 1  # The search would not work.
  return output.replace(SHIM, "".join(f'<script src="{up}{name}"></script>' for name in own))


def on_post_template(output, template_name, config):
  """The same for the 404 page."""
  return output.replace(SHIM, "")
