"""Parses the device groups of a collective, in each format that XLA writes."""

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
# An axis with its size, `'cp'=8`; and a grouped axis, `'cp'`, or a part of one, `'cp':(2)4`: here
# the product of the parts before it is 2, and its size is 4.
_AXIS = re.compile(r"(['\"]?)(?P<name>[\w.\-]+)\1=(?P<size>\d+)")
_AXIS_PART = re.compile(r"(['\"]?)(?P<name>[\w.\-]+)\1(?::\((?P<before>\d+)\)(?P<size>\d+))?")


def groups_of(attributes: str, num_devices: int) -> Groups:
  """The groups of a collective; for a permutation, its (sender, receiver) pairs.

  Args:
    attributes: the attributes of the instruction.
    num_devices: the number of devices of the program. If the instruction has no groups, all devices
      are one group.

  Returns:
    The groups, or an empty tuple if their format is unknown.
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
  """Parses `{0,1},{2,3}`."""
  return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,]*)\}", text))


def _iota(text: str) -> np.ndarray:
  """Parses `[8,2]<=[2,8]T(1,0)`: ids 0 to 15 shaped `[2, 8]`, transposed, reshaped to `[8, 2]`.

  The part before `<=` is optional.
  """
  shapes = [_numbers(shape) for shape in re.findall(r"\[([\d,]+)\]", text)]
  ids = np.arange(math.prod(shapes[-1])).reshape(shapes[-1])
  if order := re.search(r"T\(([\d,]+)\)", text):
    ids = ids.transpose(_numbers(order[1]))
  return ids.reshape(shapes[0]) if len(shapes) > 1 else ids


def _mesh_groups(axes: str, ids: str | None, grouped: str) -> Groups:
  """Parses `mesh['a'=2,'b'=8]`, with an optional order of devices, and the grouped axes `{'b'}`."""
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
  # The dimension of each grouped part, by axis and by the product of the parts before it.
  place: dict[tuple[str, int], int] = {}
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
