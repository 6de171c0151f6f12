"""Finds the exchanges of a program: our collectives, which move keys, values and gradients."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from jax_magi._src.native.overlap import EXCHANGE_SCOPE, SINGLE_EXCHANGE_SCOPE
from jax_magi._src.overlap.hlo_text import Instruction, Module

_SCOPE = re.compile(
  rf"\b(?:(?P<hidden>{EXCHANGE_SCOPE})|{SINGLE_EXCHANGE_SCOPE})"
  r"_(?P<kind>all_to_all|all_gather|permute|ragged)\b"
)
# Opcodes that pass an array on unchanged, except for its layout.
_VIEWS = ("bitcast", "copy", "get-tuple-element", "reshape", "transpose")


class Exchange(NamedTuple):
  """The fields `exchange` and `is_single` of a `ScheduledCollective`."""

  kind: str | None
  is_single: bool = False


class Reader(Protocol):
  """The questions about a program that this file asks."""

  module: Module

  def communicates(self, instruction: Instruction) -> str:
    """The opcode of a collective; "" for other instructions."""

  def is_attention(self, instruction: Instruction) -> bool:
    """Whether the instruction is attention, or calls a computation that contains attention."""


def named_exchange(instruction: Instruction) -> Exchange | None:
  """Recognizes an exchange by the named scope that it was traced in."""
  found = _SCOPE.search(instruction.op_name)
  return Exchange(found["kind"], not found["hidden"]) if found else None


def nameless_exchanges(
  reader: Reader, instructions: tuple[Instruction, ...]
) -> dict[str, Exchange]:
  """Finds ragged exchanges, and the all-gathers that XLA made for them, by instruction name.

  When XLA rewrites a ragged exchange, it drops the scope from the collective. But the operands
  after the rows, which are offsets and zeros, are computed in the same scope and keep it.
  """
  by_name = {instruction.name: instruction for instruction in instructions}
  found: dict[str, Exchange] = {}
  for instruction in instructions:
    if reader.communicates(instruction) != "ragged-all-to-all":
      continue
    rows, *tables = instruction.operands or ("",)
    names = (named_exchange(source) for source in _sources(reader, by_name, tables))
    exchange = next((name for name in names if name and name.kind == "ragged"), None)
    if exchange is None:
      continue
    found[instruction.name] = exchange
    if made := _collective_behind(reader, by_name, rows):
      found[made] = exchange
  return found


def _sources(
  reader: Reader, by_name: dict[str, Instruction], names: Iterable[str]
) -> Iterator[Instruction]:
  """Yields the instructions that values come from, those inside fusions included.

  The search ends at attention calls.
  """
  waiting, seen = list(names), set()
  while waiting:
    name = waiting.pop()
    if name in seen or name not in by_name or reader.is_attention(by_name[name]):
      continue
    seen.add(name)
    instruction = by_name[name]
    yield instruction
    if instruction.opcode == "fusion":
      for called in instruction.called:
        yield from reader.module.computations.get(called, ())
    waiting.extend(instruction.operands)


def _collective_behind(reader: Reader, by_name: dict[str, Instruction], name: str) -> str | None:
  """The name of the all-gather that an operand is the result of; None if there is none."""
  while name in by_name:
    instruction = by_name[name]
    if reader.communicates(instruction) == "all-gather":
      return name
    if instruction.opcode not in _VIEWS and not instruction.opcode.endswith(("-done", "-update")):
      return None
    name = instruction.operands[0]
  return None
