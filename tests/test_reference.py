"""The reference has every public name, and every public function has an example that is run."""

import enum
import inspect
import re

import pytest

import jax_magi
from jax_magi import exchange, optim, overlap
from tests.test_docs import ROOT

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
_MODULES = (jax_magi, optim, overlap, exchange)
# Methods that other parts of the package call. Users have no use for them.
_INTERNAL = {
  "AttentionMask": {"tree_flatten_with_keys", "tree_unflatten"},
  "DistAttnKey": {"dispatches"},
  "ExchangeReport": {"level_name"},
  "Links": {"near_row", "far_row", "expand_row"},
  "MlaProjections": {"roles"},
  "Projection": {"factor_axes", "parsed", "sizes", "spread"},
  "QkProjections": {"roles"},
}


def _public():
  """The full name of each public object. An object that two modules export counts once."""
  found = {}
  for module in _MODULES:
    for name in module.__all__:
      value = getattr(module, name)
      is_known = callable(value) and any(value is other for other in found.values())
      if not inspect.ismodule(value) and not is_known:
        found[f"{module.__name__}.{name}"] = value
  return found


def _methods(cls):
  """The public methods and properties that the class itself defines."""
  if issubclass(cls, enum.Enum):
    return set()
  kinds = (classmethod, staticmethod, property)
  names = {
    name
    for name, value in vars(cls).items()
    if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds))
  }
  return names - _INTERNAL.get(cls.__name__, set())


def _documented():
  """The full name of each entry, with the text up to the next entry."""
  entries = {}
  for page in PAGES:
    pieces = re.split(r"^::: ([\w.]+)$", page.read_text(), flags=re.MULTILINE)
    for name, text in zip(pieces[1::2], pieces[2::2], strict=True):
      assert name not in entries, name
      entries[name] = text
      members = re.search(r"^      members: \[([\w, ]+)\]$", text, re.MULTILINE)
      for member in members[1].split(", ") if members else ():
        entries[f"{name}.{member}"] = text
  return entries


def test_every_public_name_is_in_the_reference_and_nothing_else():
  wanted = set(_public())
  for name, value in _public().items():
    if inspect.isclass(value):
      wanted |= {f"{name}.{method}" for method in _methods(value)}
  assert wanted - set(_documented()) == set()
  assert set(_documented()) - wanted == set()


@pytest.mark.parametrize("name", [n for n, x in _public().items() if inspect.isfunction(x)])
def test_every_function_has_an_example(name):
  code = "".join(re.findall(r"```python\n(.*?)```", _documented()[name], re.DOTALL))
  # It is called, assigned, or passed to jax.jit.
  assert re.search(rf"\b{name.rpartition('.')[2]}\(|[=(][\w.]*{name.rpartition('.')[2]}\b", code)


def test_every_method_of_a_mask_has_an_example():
  entries = _documented()
  for method in _methods(jax_magi.AttentionMask):
    text = entries[f"jax_magi.AttentionMask.{method}"]
    assert f".{method}(" in "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), method


def test_every_public_name_is_listed_with_its_anchor():
  index = (ROOT / "docs" / "functions.md").read_text()
  anchors = {page.name: page.read_text() for page in PAGES}
  listed = re.findall(r"\]\(reference/(\w+\.md)#([\w.]+)\)", index)
  assert set(_public()) - {name for _, name in listed} == set()
  for page, name in listed:
    assert re.search(rf"^::: {re.escape(name)}$", anchors[page], re.MULTILINE), name


@pytest.mark.parametrize("name", [n for n, x in _public().items() if callable(x)])
def test_every_docstring_describes_every_argument(name):
  value = _public()[name]
  text = inspect.getdoc(value) or ""
  assert text, "no docstring"
  if inspect.isfunction(value) and re.search(r"^Args:$", text, re.MULTILINE):
    for parameter in inspect.signature(value).parameters:
      assert re.search(rf"^  (\*\*)?{parameter}: ", text, re.MULTILINE), parameter
