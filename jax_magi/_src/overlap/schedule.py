"""Finds what may overlap with each collective of a compiled program, from XLA's schedule."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

from jax_magi._src.overlap.exchanges import Exchange, named_exchange, nameless_exchanges
from jax_magi._src.overlap.hlo_text import Instruction, Module, parse
from jax_magi._src.overlap.kinds import COLLECTIVES, Kind, custom_call_kind
from jax_magi._src.overlap.measure import Overlap, total_of
from jax_magi._src.overlap.replica_groups import Groups, groups_of

# Opcodes for which nothing runs on the device.
_FREE = frozenset(
  "after-all add-dependency bitcast constant get-tuple-element opt-barrier parameter partition-id "
  "replica-id tuple".split()
)
# Instructions that take long enough to hide a collective. Other instructions do not count.
_MATMULS = ("dot", "convolution")
_MATMUL_WORDS = ("__cublas", "__cudnn", "__triton_gemm", "__triton_nested_gemm", "__onednn")


@dataclasses.dataclass(frozen=True)
class ScheduledCollective:
  """One collective, and the instructions between its start and its end.

  Attributes:
    name: the name of the instruction.
    opcode: the kind of collective.
    computation: the computation that contains it.
    times: how often that computation runs, as far as XLA knows.
    num_bytes: the size of its results in bytes, each time that it runs.
    exchange: how it moves keys, values or their gradients between ranks: "all_to_all",
      "all_gather", "permute" or "ragged". None for collectives that are not ours.
    is_single: True for an exchange with `overlap_degree=0`, which no kernel could hide.
    groups: the groups of devices that communicate, in the order of the mesh; for a permutation,
      (sender, receiver) pairs. Empty if the format in the text is unknown.
    is_async: False if XLA runs it to its end before it starts the next instruction.
    attention: instructions that overlap with it and are attention, or loops and calls that contain
      attention.
    matmuls: instructions that overlap with it and are other heavy work.
    num_others: the number of other instructions that overlap with it.
    after: the last instruction with work before it.
    before: the first instruction with work after it.
    independent_attention: attention in the same computation that neither needs the collective nor
      is needed by it. The collective could overlap with it.
  """

  name: str
  opcode: str
  computation: str
  times: int
  num_bytes: int
  exchange: str | None
  is_single: bool
  groups: Groups
  is_async: bool
  attention: tuple[str, ...]
  matmuls: tuple[str, ...]
  num_others: int
  after: str
  before: str
  independent_attention: tuple[str, ...]

  @property
  def overlap(self) -> Overlap:
    """Its bytes, all counted as attention, other or exposed."""
    total = self.times * self.num_bytes
    if self.attention:
      return Overlap(attention=total)
    return Overlap(other=total) if self.matmuls else Overlap(exposed=total)


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The schedule of a compiled program.

  Attributes:
    module: the name of the program.
    collectives: the collectives by computation, in the order of instructions.
    num_attention: the number of attention calls.
  """

  module: str
  collectives: tuple[ScheduledCollective, ...]
  num_attention: int

  @property
  def overlap(self) -> Overlap:
    """The bytes of all collectives, divided."""
    return total_of(collective.overlap for collective in self.collectives)


def read_schedule(path: str | Path) -> Schedule:
  """Reads a file with the text of a compiled program, `compiled.as_text()`.

  Raises:
    ValueError: if the file is something else, or the program has no collectives or no attention.
      The message says what to pass instead.
  """
  try:
    text = Path(path).read_text()
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"{path} cannot be read as text: {error}") from error
  try:
    return schedule_of(text)
  except ValueError as error:
    raise ValueError(f"{path} cannot be used: {error}") from error


def schedule_of(text: str) -> Schedule:
  """Reads the text of a compiled program, `compiled.as_text()`.

  Raises:
    ValueError: as in `read_schedule`.
  """
  module = parse(text)
  reader = _Reader(module)
  collectives = tuple(reader.collectives())
  num_attention = sum(
    custom_call_kind(instruction.custom_call_target) is Kind.ATTENTION
    for instructions in module.computations.values()
    for instruction in instructions
  )
  if not collectives:
    raise ValueError(f"its module {module.name} has no collectives: compile for several devices")
  if not num_attention:
    raise ValueError(
      f"its module {module.name} has no attention calls of jax_magi: compile a step whose "
      "attention uses native kernels"
    )
  return Schedule(module.name, collectives, num_attention)


@dataclasses.dataclass(frozen=True)
class _Op:
  """An instruction, or a start with its done, that runs from position `begin` to `end`."""

  instruction: Instruction
  begin: int
  end: int
  is_async: bool
  num_bytes: int

  def is_beside(self, other: _Op) -> bool:
    return self.begin < other.end and other.begin < self.end

  @property
  def name(self) -> str:
    return self.instruction.name

  def __str__(self) -> str:
    target = self.instruction.custom_call_target.removeprefix("jax_magi_")
    return f"{self.name} ({target})" if target else self.name


class _Reader:
  """A module, with answers about the contents of its computations."""

  def __init__(self, module: Module) -> None:
    self.module = module

  @functools.cache  # noqa: B019 (it lives as long as the reader)
  def holds(self, computation: str) -> frozenset[str]:
    """What a computation runs: opcodes of collectives, "attention" and "matmul"."""
    found: set[str] = set()
    for instruction in self.module.computations.get(computation, ()):
      found |= self.does(instruction)
    return frozenset(found)

  def does(self, instruction: Instruction) -> frozenset[str]:
    """What an instruction runs, including the computations that it calls, as in `holds`."""
    found = set().union(*(self.holds(name) for name in instruction.called))
    opcode = _without_start(instruction.opcode)
    target = instruction.custom_call_target
    kind = custom_call_kind(target)
    if opcode in COLLECTIVES:
      found.add(opcode)
    elif kind is Kind.COMMUNICATION:
      found.add(target)
    elif kind is Kind.ATTENTION:
      found.add("attention")
    elif opcode in _MATMULS or any(
      word in text for word in _MATMUL_WORDS for text in (target, instruction.attributes)
    ):
      found.add("matmul")
    return frozenset(found)

  def communicates(self, instruction: Instruction) -> str:
    """The opcode of a collective; "" for loops and calls, whose contents are reported instead."""
    opcode = _without_start(instruction.opcode)
    if opcode in COLLECTIVES:
      return opcode
    if custom_call_kind(instruction.custom_call_target) is Kind.COMMUNICATION:
      return instruction.custom_call_target
    is_wrapped = instruction.opcode.endswith("-start")
    found = self.does(instruction) if is_wrapped else frozenset()
    return "" if "attention" in found else " ".join(sorted(found - {"matmul"}))

  def collective_in(self, instruction: Instruction) -> Instruction:
    """The collective itself, if `instruction` wraps one in a computation."""
    for name in instruction.called:
      for inside in self.module.computations.get(name, ()):
        if _without_start(inside.opcode) in COLLECTIVES:
          return inside
    return instruction

  def is_attention(self, instruction: Instruction) -> bool:
    """Whether the instruction is attention, or calls a computation that contains attention."""
    return "attention" in self.does(instruction)

  def collectives(self) -> Iterator[ScheduledCollective]:
    """All collectives of the computations that are reached from the entry."""
    times = {self.module.entry: 1}
    waiting = collections.deque([self.module.entry])
    while waiting:
      computation = waiting.popleft()
      instructions = self.module.computations.get(computation, ())
      yield from self._collectives_of(computation, instructions, times[computation])
      for instruction in instructions:
        if not self.communicates(instruction):
          for name in instruction.called:
            if name not in times:
              waiting.append(name)
              times[name] = times[computation] * instruction.trip_count

  def _collectives_of(
    self, computation: str, instructions: tuple[Instruction, ...], times: int
  ) -> Iterator[ScheduledCollective]:
    if not any(self.communicates(instruction) for instruction in instructions):
      return
    ops = list(_ops(instructions))
    is_collective = [bool(self.communicates(op.instruction)) for op in ops]
    work = [op for op, skip in zip(ops, is_collective, strict=True) if not skip]
    does = {op.name: self.does(op.instruction) for op in work}
    attention = [op for op in work if "attention" in does[op.name]]
    nameless = nameless_exchanges(self, instructions)
    for op in (op for op, found in zip(ops, is_collective, strict=True) if found):
      beside = [other for other in work if op.is_beside(other)]
      beside_attention = [other for other in beside if other in attention]
      matmuls = [o for o in beside if "matmul" in does[o.name] and o not in attention]
      earlier = [other for other in work if other.end <= op.begin]
      later = [other for other in work if other.begin >= op.end]
      related = _related(instructions, op)
      core = self.collective_in(op.instruction)
      exchange = named_exchange(core) or nameless.get(op.name, Exchange(None))
      yield ScheduledCollective(
        name=op.name,
        opcode=self.communicates(op.instruction),
        computation=computation,
        times=times,
        num_bytes=op.num_bytes,
        exchange=exchange.kind,
        is_single=exchange.is_single,
        groups=groups_of(core.attributes, self.module.num_devices),
        is_async=op.is_async,
        attention=tuple(map(str, beside_attention)),
        matmuls=tuple(map(str, matmuls)),
        num_others=len(beside) - len(beside_attention) - len(matmuls),
        after=str(max(earlier, key=lambda o: o.end)) if earlier else "the beginning",
        before=str(later[0]) if later else "the end",
        independent_attention=tuple(
          str(other) for other in attention if other.instruction.name not in related
        ),
      )


def _without_start(opcode: str) -> str:
  """`all-gather-start` -> `all-gather`."""
  return opcode.removesuffix("-start")


def _ops(instructions: tuple[Instruction, ...]) -> Iterator[_Op]:
  """The operations of a computation, in the order in which they begin.

  Positions are doubled, so that each instruction has a length. A start without a done in this
  computation lasts until the end of the computation.
  """
  dones: dict[str, tuple[int, Instruction]] = {}
  start_of: dict[str, str] = {}  # The start of each update and done in a chain.
  for index, instruction in enumerate(instructions):
    if instruction.opcode.endswith(("-update", "-done")) and instruction.operands:
      start = start_of.get(instruction.operands[0], instruction.operands[0])
      start_of[instruction.name] = start
      if instruction.opcode.endswith("-done"):
        dones[start] = (index, instruction)
  for index, instruction in enumerate(instructions):
    if instruction.opcode in _FREE or instruction.opcode.endswith(("-update", "-done")):
      continue
    end, result = dones.get(instruction.name, (len(instructions), instruction))
    is_start = instruction.opcode.endswith("-start") or instruction.opcode in ("send", "recv")
    is_async = is_start and not instruction.is_sync
    last = 2 * end if is_async else 2 * index + 1
    size = result.num_bytes if is_start else instruction.num_bytes
    yield _Op(instruction, 2 * index, last, is_async, size)


def _related(instructions: tuple[Instruction, ...], op: _Op) -> set[str]:
  """The names of all instructions that `op` depends on, or that depend on it."""
  order = {instruction.name: index for index, instruction in enumerate(instructions)}
  needed = {op.instruction.name}
  for instruction in reversed(instructions[: order[op.instruction.name] + 1]):
    if instruction.name in needed:
      needed.update(instruction.predecessors)
  needing = {op.instruction.name}
  for instruction in instructions[order[op.instruction.name] + 1 :]:
    if not needing.isdisjoint(instruction.predecessors):
      needing.add(instruction.name)
  return needed | needing
