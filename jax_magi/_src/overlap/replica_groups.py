"""Which devices a collective is among, in every way that XLA writes it."""

from __future__ import annotations

import math
import re

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_LISTS = re.compile(r"\breplica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"\breplica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(
  r"\breplica_groups=@?mesh\[(?P<axes>[^\]]*)\]"
  r"(?:, device_ids=\((?P<ids>(?:[^()]|\([\d,]*\))*)\))? \{(?P<grouped>[^}]*)\}"
)
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
# `'cp'=8`; and `'cp'` or, of a part of an axis, `'cp':(2)4`, with what is before it and its size.
_AXIS = re.compile(r"(['\"]?)(?P<name>[\w.\-]+)\1=(?P<size>\d+)")
_AXIS_PART = re.compile(r"(['\"]?)(?P<name>[\w.\-]+)\1(?::\((?P<before>\d+)\)(?P<size>\d+))?")


def groups_of(attributes: str, num_devices: int) -> Groups:
  """The groups of a collective; those of a permutation are its (sender, receiver) pairs.

  Args:
    attributes: of the instruction.
    num_devices: of the program, which all are one group where none is written.

  Returns:
    Nothing where they are written in a way that is not known.
  """
  if found := _PAIRS.search(attributes):
    return _lists(found[1])
  if found := _IOTA.search(attributes):
    return _rows(_iota(found[1]))
  if found := _MESH.search(attributes):
    return _mesh_groups(found["axes"], found["ids"], found["grouped"])
  found = _LISTS.search(attributes)
  if found and found[1]:
    return _lists(found[1])
  if "replica_groups=" in attributes and not found:
    return ()
  return (tuple(range(num_devices)),)


def _lists(text: str) -> Groups:
  """`{0,1},{2,3}`."""
  return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,]*)\}", text))


def _iota(text: str) -> np.ndarray:
  """`[8,2]<=[2,8]T(1,0)`: all ids in a shape, transposed, in another shape; or the right side."""
  shapes = [_numbers(shape) for shape in re.findall(r"\[([\d,]+)\]", text)]
  ids = np.arange(math.prod(shapes[-1])).reshape(shapes[-1])
  if order := re.search(r"T\(([\d,]+)\)", text):
    ids = ids.transpose(_numbers(order[1]))
  return ids.reshape(shapes[0]) if len(shapes) > 1 else ids


def _mesh_groups(axes: str, ids: str | None, grouped: str) -> Groups:
  """`mesh['a'=2,'b'=8]`, perhaps with the devices' order, and `{'b'}`: the axes of a group."""
  sizes = {found["name"]: int(found["size"]) for found in _AXIS.finditer(axes)}
  if ids is None:
    devices = np.arange(math.prod(sizes.values()))
  else:
    devices = _iota(ids) if "[" in ids else np.array(_numbers(re.sub(r"[^\d,]", "", ids)))
  parts = [
    (found["name"], int(found["before"] or 1), int(found["size"] or sizes[found["name"]]))
    for found in _AXIS_PART.finditer(grouped)
  ]
  shape: list[int] = []
  place: dict[tuple[str, int], int] = {}  # Of an axis' part that is grouped, by what is before it.
  for name, size in sizes.items():
    done = 1
    for _, before, part in sorted(p for p in parts if p[0] == name):
      shape.append(before // done)
      place[name, before] = len(shape)
      shape.append(part)
      done = before * part
    shape.append(size // done)
  inside = [place[name, before] for name, before, _ in parts]
  outside = [axis for axis in range(len(shape)) if axis not in inside]
  ordered = devices.reshape(shape).transpose(outside + inside)
  return _rows(ordered.reshape(-1, math.prod(shape[axis] for axis in inside)))


def _rows(ids: np.ndarray) -> Groups:
  return tuple(tuple(group) for group in ids.tolist())


def _numbers(text: str) -> list[int]:
  return [int(number) for number in text.split(",") if number]
