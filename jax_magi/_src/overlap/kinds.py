"""Which kernels and HLO operations are communication, and which are attention."""

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
  """What something on the device does."""

  ATTENTION = "attention"
  COMMUNICATION = "communication"
  OTHER = "other"


# A kernel is named by its C++ declaration. The letters before keep other kernels of this package
# out, which prepare an attention kernel's run, or compute softmax.
_ATTENTION_KERNEL = re.compile(r"jax_magi.*?(?<![A-Za-z])(?:Forward|Backward)Kernel")
# In the case of C++ names: a fusion of XLA may be called `reduce_scatter_fusion` for what it fuses.
_COMMUNICATION_KERNEL = re.compile(
  r"nccl|nvshmem|MemcpyP2P|AllReduce|AllGather|ReduceScatter|AllToAll|CollectivePermute"
  r"|StandInCommunication"
)
# The instruction's name begins with its opcode, or with JAX's name of it. Fusions that only hold
# such a word do not.
_JAX_NAMES = (*(name.replace("-", "_") for name in COLLECTIVES), "pmax", "pmin", "ppermute", "psum")
_COLLECTIVE_OP = re.compile(
  rf"(?:(?:{'|'.join(COLLECTIVES)})(?:-start|-done)?|(?:{'|'.join(_JAX_NAMES)})(?:_invariant)?)"
  r"(?:\.|$)"
)


def kernel_kind(kernel: str, hlo_op: str) -> Kind:
  """The kind of a GPU's kernel or copy, by its name and the HLO instruction it was launched for."""
  if _ATTENTION_KERNEL.search(kernel):
    return Kind.ATTENTION
  if is_collective(hlo_op) or _COMMUNICATION_KERNEL.search(_function(kernel)):
    return Kind.COMMUNICATION
  return Kind.OTHER


def thunk_kind(hlo_op: str) -> Kind:
  """The kind of what a CPU runs, whose profile names HLO instructions only.

  It does not say what a custom call calls: each one of the FFI is taken for attention.
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
  """Whether an instruction's name is that of a collective."""
  return _COLLECTIVE_OP.match(hlo_op) is not None


def short_name(kernel: str) -> str:
  """`void a::B<c>(d)` -> `B`."""
  return _function(kernel).rpartition("::")[2] or kernel


def _function(kernel: str) -> str:
  """The name without return type, arguments and those of the template: `a::B`."""
  name = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
  return re.split(r"[<(]", name, maxsplit=1)[0].strip()
