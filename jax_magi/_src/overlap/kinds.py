"""Sorts kernels and HLO operations into communication, attention and other work."""

from __future__ import annotations

import enum
import re

from jax_magi._src.native.attention import INSTRUCTION_NAME, TARGETS
from jax_magi._src.native.overlap import STAND_IN_TARGETS

COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-broadcast",
  "collective-permute",
  "ragged-all-to-all",
  "recv",
  "reduce-scatter",
  "send",
)


class Kind(enum.Enum):
  """What a kernel or an instruction does."""

  ATTENTION = "attention"
  COMMUNICATION = "communication"
  OTHER = "other"


# A kernel is named by its C++ declaration. The lookbehind excludes other kernels of this package,
# whose names have a prefix: those that prepare attention, and those of softmax.
_ATTENTION_KERNEL = re.compile(r"jax_magi.*?(?<![A-Za-z])(?:Forward|Backward)Kernel")
# Case matters: XLA may name a fusion `reduce_scatter_fusion` after an operation that it contains.
_COMMUNICATION_KERNEL = re.compile(
  r"nccl|nvshmem|MemcpyP2P|AllReduce|AllGather|ReduceScatter|AllToAll|CollectivePermute"
  r"|StandInCommunication"
)
# The name of a collective begins with its opcode, or with JAX's name of the operation. Names of
# fusions may contain such a word, but do not begin with it.
_JAX_NAMES = (*(name.replace("-", "_") for name in COLLECTIVES), "pmax", "pmin", "ppermute", "psum")
_COLLECTIVE_OP = re.compile(
  rf"(?:(?:{'|'.join(COLLECTIVES)})(?:-start|-done)?|(?:{'|'.join(_JAX_NAMES)})(?:_invariant)?)"
  r"(?:\.|$)"
)


def kernel_kind(kernel: str, hlo_op: str) -> Kind:
  """The kind of a GPU's kernel or copy, from its name and the HLO instruction that launched it."""
  if _ATTENTION_KERNEL.search(kernel):
    return Kind.ATTENTION
  if is_collective(hlo_op) or _COMMUNICATION_KERNEL.search(_function(kernel)):
    return Kind.COMMUNICATION
  return Kind.OTHER


def thunk_kind(hlo_op: str) -> Kind:
  """The kind of an event in a CPU's profile, which names only HLO instructions.

  The profile does not name the targets of custom calls, so each FFI call counts as attention.
  """
  if hlo_op.startswith(INSTRUCTION_NAME):
    return Kind.ATTENTION
  return Kind.COMMUNICATION if is_collective(hlo_op) else Kind.OTHER


def custom_call_kind(target: str) -> Kind:
  """The kind of a custom call in HLO."""
  if target in TARGETS:
    return Kind.ATTENTION
  return Kind.COMMUNICATION if target in STAND_IN_TARGETS else Kind.OTHER


def is_collective(hlo_op: str) -> bool:
  """Whether the name of an instruction is that of a collective."""
  return _COLLECTIVE_OP.match(hlo_op) is not None


def short_name(kernel: str) -> str:
  """The name of a kernel without namespaces: `void a::B<c>(d)` -> `B`."""
  return _function(kernel).rpartition("::")[2] or kernel


def _function(kernel: str) -> str:
  """The name without return type, arguments and template arguments: `a::B`."""
  name = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
  return re.split(r"[<(]", name, maxsplit=1)[0].strip()
