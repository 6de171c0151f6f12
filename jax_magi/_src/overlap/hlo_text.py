"""Parses scheduled HLO text, as far as the order of instructions requires."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

_HOW_TO_GET = "pass the text of `jax.jit(f).lower(...).compile().as_text()`"

_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-$]+) (?:\(.*\) -> .*)?\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(?P<name>[\w.\-$]+) = (?P<rest>.+)$")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")
_CALLED = re.compile(
  r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-$]+)"
)
_LISTS = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_CONTROL = re.compile(r"\bcontrol-predecessors=\{([^}]*)\}")
_NAME = re.compile(r"%?([\w.\-$]+)")
_ARRAY = re.compile(r"(?P<type>[a-z]+)(?P<bits>\d*)\w*\[(?P<sizes>[\d,<=]*)\]")


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation.

  Attributes:
    name: the name of the instruction, without `%`.
    opcode: the opcode, with its suffix `-start` or `-done`, if any.
    shape: the shape of the result.
    operands: the names of the operands.
    attributes: the rest of the line.
  """

  name: str
  opcode: str
  shape: str
  operands: tuple[str, ...]
  attributes: str

  @functools.cached_property
  def called(self) -> tuple[str, ...]:
    """The computations that the instruction calls."""
    return (*_CALLED.findall(self.attributes), *self._listed(_LISTS))

  @functools.cached_property
  def predecessors(self) -> tuple[str, ...]:
    """The instructions that must end before this one begins: operands and control dependencies."""
    return (*self.operands, *self._listed(_CONTROL))

  @property
  def custom_call_target(self) -> str:
    """The target of a custom call; "" for other instructions."""
    return self._attribute(r'custom_call_target="([^"]*)"')

  @property
  def op_name(self) -> str:
    """The named scopes and the JAX operation it comes from; "" if XLA has not kept them."""
    return self._attribute(r'\bop_name="([^"]*)"')

  @property
  def is_sync(self) -> bool:
    """Whether XLA runs the instruction synchronously, even if it is written as a start."""
    return bool(self._attribute(r'("is_sync":true)'))

  @property
  def trip_count(self) -> int:
    """The number of iterations of a loop; 1 for other instructions, and if XLA does not know."""
    return int(self._attribute(r'"known_trip_count":\{"n":"(\d+)"') or 1)

  @property
  def num_bytes(self) -> int:
    """The size of the result in bytes."""
    return num_bytes(self.shape)

  def _listed(self, pattern: re.Pattern[str]) -> list[str]:
    return [name for part in pattern.findall(self.attributes) for name in _NAME.findall(part)]

  def _attribute(self, pattern: str) -> str:
    found = re.search(pattern, self.attributes)
    return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Module:
  """A program.

  Attributes:
    name: the name of the module.
    entry: the name of the entry computation.
    num_devices: the number of devices that the program runs on.
    computations: the instructions of each computation, in the order in which they run.
  """

  name: str
  entry: str
  num_devices: int
  computations: dict[str, tuple[Instruction, ...]]


def parse(text: str) -> Module:
  """Parses the text of one scheduled module. Text around it is ignored.

  Raises:
    ValueError: if the text is something else. The message says what, and what to pass instead.
  """
  headers = re.findall(r"^HloModule ([^\s,]+)(.*)$", text, re.MULTILINE)
  if not headers:
    if re.search(r"^\s*module @\S+", text, re.MULTILINE):
      raise ValueError(f"it is StableHLO, which has no order yet: {_HOW_TO_GET}")
    raise ValueError(f"it is not HLO, which has a line `HloModule NAME, ...`: {_HOW_TO_GET}")
  if len(headers) > 1:
    names = ", ".join(name for name, _ in headers)
    raise ValueError(f"it holds {len(headers)} modules ({names}): pass one file for each")
  (name, header), *_ = headers
  if "is_scheduled=true" not in header:
    raise ValueError(
      f"its module {name} is not scheduled (there is no is_scheduled=true): {_HOW_TO_GET}, or a "
      "file *after_optimizations.txt of XLA's dumps"
    )
  counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
  return _parse_computations(name, math.prod(map(int, counts)), text)


def _parse_computations(module: str, num_devices: int, text: str) -> Module:
  computations: dict[str, tuple[Instruction, ...]] = {}
  entry = current = None
  instructions: list[Instruction] = []
  for line in text.splitlines():
    if current is None:
      if header := _COMPUTATION.match(line):
        current = header["name"]
        entry = current if header["entry"] else entry
    elif line.startswith("}"):
      computations[current] = tuple(instructions)
      current, instructions = None, []
    elif (parts := _INSTRUCTION.match(line)) and (found := _instruction(**parts.groupdict())):
      instructions.append(found)
  if current is not None:
    raise ValueError(f"it ends in the middle of computation {current}: is the file complete?")
  if entry is None:
    raise ValueError(f"its module {module} has no ENTRY computation: is the file complete?")
  return Module(module, entry, num_devices, computations)


def _instruction(name: str, rest: str) -> Instruction | None:
  shape_end = _balanced(rest) if rest.startswith("(") else rest.find(" ")
  opcode = _OPCODE.match(rest, max(shape_end, 0))
  if opcode is None:
    return None
  begin = opcode.end() - 1
  end = begin + _balanced(rest[begin:])
  operands = re.sub(r"/\*.*?\*/", "", rest[begin + 1 : end - 1])
  names = re.findall(r"%([\w.\-$]+)", operands) or _NAME.findall(operands)  # Shapes may precede.
  return Instruction(name, opcode["opcode"], rest[:shape_end], tuple(names), rest[end:])


def _balanced(text: str) -> int:
  """The position after the parenthesis that closes the one at the start of `text`."""
  depth = 0
  for found in re.finditer(r"[()]", text):
    depth += 1 if found[0] == "(" else -1
    if depth == 0:
      return found.end()
  return len(text)


def num_bytes(shape: str) -> int:
  """The size in bytes of an array, or of all arrays of a tuple, each rounded up."""
  total = 0
  for found in _ARRAY.finditer(shape):
    sizes = [int(size) for size in found["sizes"].replace("<=", "").split(",") if size]
    bits = int(found["bits"] or (8 if found["type"] == "pred" else 0))
    total += math.ceil(math.prod(sizes) * bits / 8)
  return total
