"""Explains which implementation a call uses, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_magi._src.native.backends import (
  Backend,
  candidates,
  check_implementation,
  default_platform,
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Explanation:
  """The implementation that a call uses, and the reasons. Print it to read both.

  Attributes:
    operation: a description of the computation.
    implementation: the implementation on JAX's default platform. Native kernels are "cpu",
      "cuda_sm90" and "cuda_sm80" for attention, and "cpu" and "cuda" for softmax. Plain JAX is
      "blockwise" for attention, and "xla" for softmax.
    native: the platforms that have a kernel for this call. On others, XLA compiles plain JAX.
    notes: the reasons, and other remarks.
  """

  operation: str
  implementation: str
  native: tuple[str, ...]
  notes: tuple[str, ...]

  def __str__(self) -> str:
    where = " and ".join(self.native) or "no platform"
    return "; ".join([f"{self.operation}: native kernels on {where}", *self.notes])


def explain(
  operation: str,
  implementation: Any,
  plain: str,
  obstacle: Callable[[Backend], str | None],
  notes: Sequence[str] = (),
  *,
  kernels_of: Callable[[Backend], Backend] | None = None,
) -> Explanation:
  """Explains a call. Raises an error if the caller names an implementation that cannot be used.

  Args:
    operation: a description of the operation.
    implementation: the caller's argument.
    plain: the name of the plain path.
    obstacle: why a backend cannot be used; None if it can.
    notes: remarks on the operation itself.
    kernels_of: selects the architecture of a backend whose kernels the call uses. None if the
      kernels do not depend on the architecture.
  """
  check_implementation(implementation, plain, obstacle, has_architectures=kernels_of is not None)
  backends = candidates(implementation)
  obstacles = {platform: obstacle(backend) for platform, backend in backends.items()}
  reasons = [f"not on {p}: {reason}" for p, reason in obstacles.items() if reason is not None]
  if implementation == plain:
    reasons.append(f"the caller chose implementation={plain!r}")
  native = tuple(p for p, reason in obstacles.items() if reason is None)
  chosen = {p: kernels_of(backends[p]) if kernels_of else backends[p] for p in native}
  reasons += [
    chosen[p].why_this_architecture()
    for p in native
    if len(chosen[p].architectures) < len(backends[p].architectures)
  ]
  # A caller who names kernels means their platform, even if it is not the default one.
  platform = default_platform() if implementation is None else next(iter(backends), None)
  taken = chosen[platform].kernels if platform in chosen else plain
  return Explanation(operation, taken, native, (*reasons, *notes))
