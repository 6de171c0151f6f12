"""What may run beside each collective of a compiled program, by the order XLA chose."""

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

# Nothing runs on the device for these.
_FREE = frozenset(
  "after-all add-dependency bitcast constant get-tuple-element opt-barrier parameter partition-id "
  "replica-id tuple".split()
)
# What takes long enough to hide something; other instructions between begin and end do not count.
_MATMULS = ("dot", "convolution")
_MATMUL_WORDS = ("__cublas", "__cudnn", "__triton_gemm", "__triton_nested_gemm", "__onednn")


@dataclasses.dataclass(frozen=True)
class ScheduledCollective:
  """One collective, and what stands between its begin and its end.

  Attributes:
    name: the instruction's.
    opcode: the kind of collective.
    computation: where it stands.
    times: how often that runs, as far as XLA knows.
    num_bytes: of its results, each time.
    exchange: "all_to_all", "all_gather", "permute" or "ragged": it moves keys, values or their
      gradients between the ranks of an attention, in that way. None for other collectives.
    is_single: an exchange without overlap: there is no kernel that could hide it.
    groups: the devices that it is among, in the mesh's order; of a permutation, (sender, receiver);
      none where the text names them in a way that is not known.
    is_async: False if XLA runs it to its end before anything after it.
    attention: instructions beside it that are attention, or loops and calls that hold some.
    matmuls: likewise, other heavy work.
    num_others: how many other instructions stand beside it.
    after: the last work that stands before it.
    before: the first that stands after it, and waits.
    independent_attention: attention of the same computation that neither needs the collective nor
      is needed by it: what it could run beside.
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
    """Its bytes, all in one place."""
    total = self.times * self.num_bytes
    if self.attention:
      return Overlap(attention=total)
    return Overlap(other=total) if self.matmuls else Overlap(exposed=total)


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The order of a compiled program.

  Attributes:
    module: the program's name.
    collectives: in the order in which computations are reached, and of each one's instructions.
    num_attention: how many attention calls there are.
  """

  module: str
  collectives: tuple[ScheduledCollective, ...]
  num_attention: int

  @property
  def overlap(self) -> Overlap:
    """Bytes of all collectives, divided."""
    return total_of(collective.overlap for collective in self.collectives)


def read_schedule(path: str | Path) -> Schedule:
  """Reads a file with the text of a compiled program, `compiled.as_text()`.

  Raises:
    ValueError: it is not that, or has no communication or no attention; it says what to give.
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
  """The same of the text itself."""
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
      "attention runs natively"
    )
  return Schedule(module.name, collectives, num_attention)


@dataclasses.dataclass(frozen=True)
class _Op:
  """An instruction, or a pair of start and done: what runs from position `begin` to `end`."""

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
  """A module, and what its computations hold."""

  def __init__(self, module: Module) -> None:
    self.module = module

  @functools.cache  # noqa: B019 (it lives as long as the reader)
  def holds(self, computation: str) -> frozenset[str]:
    """Opcodes of collectives, `attention` and `matmul`: what runs when a computation does."""
    found: set[str] = set()
    for instruction in self.module.computations.get(computation, ()):
      found |= self.does(instruction)
    return frozenset(found)

  def does(self, instruction: Instruction) -> frozenset[str]:
    """The same of an instruction, with what it calls."""
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
    """The collective that an instruction is; "" for loops and calls, whose insides tell more."""
    opcode = _without_start(instruction.opcode)
    if opcode in COLLECTIVES:
      return opcode
    if custom_call_kind(instruction.custom_call_target) is Kind.COMMUNICATION:
      return instruction.custom_call_target
    is_wrapped = instruction.opcode.endswith("-start")
    found = self.does(instruction) if is_wrapped else frozenset()
    return "" if "attention" in found else " ".join(sorted(found - {"matmul"}))

  def collective_in(self, instruction: Instruction) -> Instruction:
    """The collective itself, where an instruction only starts it."""
    for name in instruction.called:
      for inside in self.module.computations.get(name, ()):
        if _without_start(inside.opcode) in COLLECTIVES:
          return inside
    return instruction

  def is_attention(self, instruction: Instruction) -> bool:
    """Whether it is attention, or holds some."""
    return "attention" in self.does(instruction)

  def collectives(self) -> Iterator[ScheduledCollective]:
    """All, from the entry on."""
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
  """What runs, in the order in which it begins. Positions are doubled: an instruction has a length.

  A start whose done is not in this computation runs to its end.
  """
  dones: dict[str, tuple[int, Instruction]] = {}
  start_of: dict[str, str] = {}  # Of the steps of a chain: start, updates, done.
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
  """Names of all that `op` needs, and of all that need it, each through others."""
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
