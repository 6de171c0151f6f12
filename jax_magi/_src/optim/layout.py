"""The meaning of a parameter's axes, written as a string."""

from __future__ import annotations

import dataclasses
import functools
import re

LAYERS, HEADS, DIM, PARTS = "layers", "heads", "dim", "parts"
# Along these axes, a parameter is a stack of matrices. Muon treats each matrix separately.
_STACKED = (LAYERS, PARTS, "experts")
_TOKEN = re.compile(r"->|\(|\)|[A-Za-z_][A-Za-z0-9_]*|\S")


@dataclasses.dataclass(frozen=True)
class Layout:
  """The names of a parameter's axes. A merged axis has several names, the slowest first.

  Attributes:
    axes: one tuple of names for each axis.
    num_inputs: the number of axes before the arrow.
    text: the string that was parsed.
  """

  axes: tuple[tuple[str, ...], ...]
  num_inputs: int
  text: str

  @property
  def names(self) -> tuple[str, ...]:
    """All names, in order."""
    return tuple(name for axis in self.axes for name in axis)

  def muon_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The axes that a product with an input sums over, and its output axes; None for a bias."""
    stacked = [i for i, axis in enumerate(self.axes) if set(axis) & set(_STACKED)]
    inputs = tuple(i for i in range(self.num_inputs) if i not in stacked)
    outputs = tuple(i for i in range(self.num_inputs, len(self.axes)) if i not in stacked)
    return (inputs, outputs) if inputs and outputs else None

  def check_rank(self, path: str, shape: tuple[int, ...]) -> None:
    """Checks that the parameter has as many axes as the layout."""
    if len(shape) != len(self.axes):
      raise ValueError(
        f"{path} has shape {list(shape)}, which does not fit its layout {self.text!r}"
      )


def parse_layout(text: str) -> Layout:
  """Parses `"layers embed -> heads dim"`, `"embed -> (heads dim)"`, `"-> heads dim"`."""
  if not isinstance(text, str):
    raise ValueError(f"layout must be a string such as 'embed -> heads dim', got {text!r}")
  return _parse_layout(text)


@functools.cache
def _parse_layout(text: str) -> Layout:
  axes: list[tuple[str, ...]] = []
  group: list[str] | None = None
  num_inputs = None
  for token in _TOKEN.findall(text):
    if token == "->" and num_inputs is None and group is None:
      num_inputs = len(axes)
    elif token == "(" and group is None:
      group = []
    elif token == ")" and group:
      axes.append(tuple(group))
      group = None
    elif token.isidentifier():
      if group is None:
        axes.append((token,))
      else:
        group.append(token)
    else:
      raise ValueError(f"layout {text!r} has {token!r} in a place where it is not allowed")
  if num_inputs is None or group is not None:
    raise ValueError(
      "layout must name the axes as inputs -> outputs, for example 'layers embed -> heads dim', "
      f"'embed -> (heads dim)', or '-> heads dim' for a bias; got {text!r}"
    )
  layout = Layout(tuple(axes), num_inputs, text)
  if len(set(layout.names)) != len(layout.names):
    raise ValueError(f"layout {text!r} names an axis twice")
  for axis in axes:
    if len(axis) > 1 and LAYERS in axis:
      raise ValueError(f"layout {text!r} merges layers with another axis; they need their own")
  return layout
