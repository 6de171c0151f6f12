"""An operation over a batch. Its rules for JAX follow from one declaration.

The declaration names operands and results, with their dimensions as letters. It gives the operation
  - under vmap: one call with a larger batch                  (batching.py)
  - on each platform: the kernel of the platform or plain JAX (this file)
  - under plain jit: batch and heads that stay split          (sharding.py)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.export
from jax import lax

from jax_magi._src.transforms.batching import fold_batch
from jax_magi._src.transforms.sharding import keep_batch_and_heads

# The arrays of a call, or of one device's part of it, by name.
Operands = dict[str, Any]
Results = tuple[jax.Array, ...]
# Operands of a kernel by name, and its attributes.
Derived = tuple[Operands, dict[str, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class DerivedOperand:
  """An operand of a kernel that is computed from the other operands, such as a tile list.

  It cannot be the result of a separate operation. Its contents and even its length depend on the
  platform, and the derived operand of a part of the batch is not a part of that of the whole batch.
  So it is either planned for all devices when the call is traced, or each device makes its own from
  its part of the operands.

  Calls with the same `Operation.sources` may make their derived operands together: each call makes
  those of all calls, by the same operation, and takes its own. XLA merges equal operations.

  Attributes:
    plan: returns derived operands, and operands that replace others, from the operands on all
      devices. None if they cannot be known at trace time.
    serves: whether the plan for the operands (first argument) serves a part of them (second).
    make: does the same as `plan` for a device's part, by operations on the device.
  """

  plan: Callable[[Operands], Derived | None]
  serves: Callable[[Operands, Operands], bool]
  make: Callable[[Operands], Derived]


@dataclasses.dataclass(frozen=True, eq=False)
class Native:
  """The kernel of a platform.

  Attributes:
    kernel: a function of the operands by name. It works on any part of batch and heads.
    derived: the derived operands that it also takes.
    is_opaque: True if XLA needs a rule to split it. It needs none for plain JAX.
  """

  kernel: Callable[..., Results]
  derived: DerivedOperand | None = None
  is_opaque: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
  """The declaration of an operation.

  Attributes:
    operands: the dimensions of all possible operands as letters: b is the batch, h are the (query)
      heads, g are the kv heads. Other dimensions are never split. Every call has the first operand,
      with the whole batch and all heads.
    results: the dimensions of the results, in order.
    natives: a function of the operands that returns the kernels which take them, by platform,
      without those that `implementation` excludes.
    plain: the operation in plain JAX, a function of the operands by name.
    plain_name: the name of the plain path in `implementation`.
    implementation: the caller's argument: the name of kernels or of the plain path, or None to
      choose automatically.
    shared: operands that the whole batch may share, with a leading axis of 1.
    sources: operands that are only used to compute derived operands.
    gradients: a map from results to the operands of which they are the gradients. If the operand is
      shared, its gradient is a sum over the batch.
  """

  operands: Mapping[str, str]
  results: Mapping[str, str]
  natives: Callable[[Operands], Mapping[str, Native]]
  plain: Callable[..., Results]
  plain_name: str
  implementation: str | None = None
  shared: frozenset[str] = frozenset()
  sources: frozenset[str] = frozenset()
  gradients: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def function(self) -> Callable[[Operands], Results]:
    """Returns the operation as a function from operands by name to the tuple of results.

    Under vmap, it is called once with a larger batch. It has the derivatives of plain JAX if no
    kernel can be used, and no derivatives otherwise.
    """
    names = list(self.results)
    summed = {names.index(result): operand for result, operand in self.gradients.items()}
    first = next(iter(self.operands))
    op = jax.custom_jvp(fold_batch(self._on_platform, first, self.shared, summed))

    @op.defjvp
    def _(primals: tuple[Operands], tangents: tuple[Operands]) -> tuple[Results, Results]:
      if self._usable_natives(*primals):
        raise NotImplementedError(
          f"jax_magi's kernels have no second derivatives; "
          f'implementation="{self.plain_name}" supports them'
        )
      # The derivative of the plain function, not of the folded op: JAX handles its vmap.
      return jax.jvp(self._in_plain_jax, primals, tangents)

    return op

  def _on_platform(self, operands: Operands) -> Results:
    """The kernel of the platform that the program is compiled for, or plain JAX."""
    natives = self._usable_natives(operands)
    # A caller who names a platform gets its kernel or an error, never another path.
    if not natives and self.implementation not in (None, self.plain_name):
      raise NotImplementedError(
        f"implementation={self.implementation!r} cannot be used: the kernels do not take arrays of "
        f"shapes {', '.join(str(list(x.shape)) for x in operands.values())}; "
        f"implementation=None and implementation={self.plain_name!r} support all operands"
      )
    if not natives:
      return self._in_plain_jax(operands)
    default = {"default": self._in_plain_jax} if self.implementation is None else {}
    results: Results = lax.platform_dependent(operands, **natives, **default)
    return results

  def _usable_natives(self, operands: Operands) -> dict[str, Callable[[Operands], Results]]:
    # The workspace of a kernel is computed at trace time, which symbolic sizes do not allow.
    if any(jax.export.is_symbolic_dim(size) for x in operands.values() for size in x.shape):
      return {}
    return {
      platform: functools.partial(self._on_devices, native)
      for platform, native in self.natives(operands).items()
    }

  def _in_plain_jax(self, operands: Operands) -> Results:
    return self.plain(**self._without_sources(operands))

  def _without_sources(self, operands: Operands) -> Operands:
    return {name: x for name, x in operands.items() if name not in self.sources}

  def _on_devices(self, native: Native, operands: Operands) -> Results:
    """The kernel on each device's part of batch and heads."""
    derived = native.derived
    if derived is None:
      operands = self._without_sources(operands)
      return self._split(native.kernel, operands) if native.is_opaque else native.kernel(**operands)
    whole = {name: jax.typeof(x) for name, x in operands.items()}
    planned, attributes = derived.plan(operands) or ({}, None)

    def kernel(**parts: Any) -> Results:
      own = self._without_sources(parts)
      if attributes is not None and derived.serves(whole, parts):
        return native.kernel(**own, **attributes)
      made, own_attributes = derived.make(parts)
      return native.kernel(**own | made, **own_attributes)

    return self._split(kernel, operands | planned)

  def _split(self, fun: Callable[..., Results], operands: Operands) -> Results:
    # In the order of the declaration: JAX reorders dictionaries.
    given = {name: letters for name, letters in self.operands.items() if name in operands}
    split = keep_batch_and_heads(
      lambda *arrays: fun(**dict(zip(given, arrays, strict=True))),
      list(given.values()),
      list(self.results.values()),
    )
    return split(*(operands[name] for name in given))
