"""Which combinations of cases run always, and which in long runs of the tests alone."""

import itertools

import pytest


def in_turns(*axes, every=1):
  """Parameters for all combinations of the axes' values; most of them are marked `long`.

  Those that always run take turns: the first value of each axis together, the second of each, and
  so on, with shorter axes beginning anew, until each value of the longest has had a turn. The third
  axis changes with every second turn, a fourth with every fourth, so that short axes do not always
  meet in the same way. `every` takes one of so many values of the longest.
  """
  axes = [list(axis) for axis in axes]
  longest = max(map(len, axes))
  slowness = [1, *(2**i for i in range(len(axes) - 1))]
  chosen = {
    tuple(
      (turn * every if len(axis) == longest else turn // slow) % len(axis)
      for axis, slow in zip(axes, slowness, strict=True)
    )
    for turn in range(-(-longest // every))
  }
  params = []
  for index in itertools.product(*(range(len(axis)) for axis in axes)):
    values = [axis[i] for axis, i in zip(axes, index, strict=True)]
    marks = () if index in chosen else (pytest.mark.long,)
    params.append(pytest.param(*values, marks=marks))
  return params


def name_of(value):
  """The id of a parameter: the name of a case, or a word."""
  return getattr(value, "name", None) or str(getattr(value, "__name__", value))
