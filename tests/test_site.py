"""The built site, opened from the file system in a browser, without a network."""

import os
import re
import subprocess
import sys
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser import CHROMIUM, Browser
from tests.test_docs import ROOT

pytestmark = [
  pytest.mark.long,
  pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium)"),
]
PAGES = [
  "index",
  "quick_start",
  "masks",
  "attention",
  "hardware",
  "troubleshooting",
  "functions",
  "reference/attention",
  "context_parallel",
  "guides/context_parallel",
  "mla",
  "qk_clip",
  "kernels",
  "performance",
  "benchmarks/results/index",
]
# Mermaid puts diagrams into closed shadow trees, which scripts cannot inspect. Open them.
_OPEN_TREES = """
  const attach = Element.prototype.attachShadow;
  Element.prototype.attachShadow = function () { return attach.call(this, {mode: "open"}); };
"""
_OVERFLOWING = """
  [...document.querySelectorAll(".md-content pre > code, .md-content img, .md-content p")]
    .filter(x => x.scrollWidth > x.clientWidth + 1 && getComputedStyle(x).display != "inline"
            || x.getBoundingClientRect().right > innerWidth)
    .map(x => x.textContent.slice(0, 60) || x.src)
"""
_TABLES_THAT_DO_NOT_SCROLL = """
  [...document.querySelectorAll(".md-content table:not(.highlighttable)")]
    .filter(x => {
      const box = x.closest(".md-typeset__scrollwrap");
      return !box || box.getBoundingClientRect().right > innerWidth
        || !["auto", "scroll"].includes(getComputedStyle(box).overflowX);
    }).map(x => x.textContent.slice(0, 60))
"""
_BROKEN_IMAGES = """
  [...document.querySelectorAll("img")].filter(x => !x.naturalWidth).map(x => x.src)
"""
_DRAWN = """
  [...document.querySelectorAll("div.mermaid")].filter(x => {
    const svg = x.shadowRoot && x.shadowRoot.querySelector("svg");
    return svg && svg.getBoundingClientRect().height > 20 && svg.querySelectorAll("g").length > 1
      && svg.getAttribute("aria-roledescription") != "error";
  }).length
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  folder = tmp_path_factory.mktemp("site")
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
  environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
  subprocess.run(command, cwd=ROOT, env=environment, check=True)
  return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
  with Browser(1300, 900, tmp_path_factory.mktemp("chromium")) as browser:
    browser.before_each_page(_OPEN_TREES)
    yield browser


def _source_of(name):
  if name == "index":
    return ROOT / "README.md"
  return (
    ROOT / "benchmarks/results/README.md"
    if name.startswith("benchmarks/")
    else ROOT / "docs" / f"{name}.md"
  )


@pytest.mark.parametrize("name", PAGES)
def test_page(browser, site, name):
  browser.open((site / f"{name}.html").as_uri())
  num_diagrams = _source_of(name).read_text().count("```mermaid")
  browser.evaluate("document.querySelectorAll('pre.mermaid').forEach(x => x.scrollIntoView())")
  assert browser.wait_for(f"{_DRAWN} == {num_diagrams}"), "diagrams that are not drawn"
  num_setups = _source_of(name).read_text().count("\n<!-- setup\n")
  assert browser.evaluate("document.querySelectorAll('.md-content details').length") == num_setups
  browser.evaluate("document.querySelectorAll('details').forEach(x => x.open = true)")
  assert browser.evaluate(_BROKEN_IMAGES) == []
  assert browser.evaluate(_OVERFLOWING) == []
  assert browser.evaluate(_TABLES_THAT_DO_NOT_SCROLL) == []
  assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
  requests, failed = browser.requests()
  assert [url for url in requests if not re.match("file:|data:|about:|blob:", url)] == []
  assert failed == []


def test_nothing_is_too_wide_on_any_other_page(browser, site):
  found = {}
  for page in sorted(site.rglob("*.html")):
    name = page.relative_to(site).with_suffix("").as_posix()
    if name not in (*PAGES, "404"):
      browser.open(page.as_uri())
      browser.evaluate("document.querySelectorAll('details').forEach(x => x.open = true)")
      found[name] = browser.evaluate(_OVERFLOWING) + browser.evaluate(_TABLES_THAT_DO_NOT_SCROLL)
  assert len(found) > 15
  assert {name: texts for name, texts in found.items() if texts} == {}


@pytest.mark.parametrize("name", PAGES)
def test_links(browser, site, name):
  browser.open((site / f"{name}.html").as_uri())
  links = browser.evaluate("[...new Set([...document.links].map(x => x.href))]")
  assert len(links) > 20
  broken = []
  for link in links:
    parts = urlsplit(link)
    if parts.scheme != "file":
      continue
    target = site.joinpath(unquote(parts.path))
    if not target.is_file():
      broken.append(link)
    elif parts.fragment:
      anchor = re.escape(unquote(parts.fragment))
      if not re.search(f'(?:id|name)="{anchor}"', target.read_text()):
        broken.append(link)
  assert broken == []


def test_search_finds_a_page(browser, site):
  browser.open((site / "index.html").as_uri())
  browser.evaluate("""
    const field = document.querySelector("input.md-search__input");
    field.focus();
    field.value = "QK-Clip";
    field.dispatchEvent(new Event("input", {bubbles: true}));
    field.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
  """)
  assert browser.wait_for("document.querySelectorAll('.md-search-result__link').length > 0")
