"""An operation over a batch, declared once. What JAX has to know of it follows from that.

its operands and results, by name, with their dimensions as letters
  -> under vmap, one call with a larger batch                (batching.py)
  -> on each platform, its kernel, or plain JAX              (here)
  -> under plain jit, batch and heads stay split             (sharding.py)
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

# By name: arrays of a call, or one of its parts.
Operands = dict[str, Any]
Results = tuple[jax.Array, ...]
# Operands that a kernel takes by name, and its attributes.
Derived = tuple[Operands, dict[str, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class DerivedOperand:
  """What a kernel takes and no caller gives, as it follows from the other operands.

  It is not the result of an operation of its own: what it is, even how long, differs by platform,
  and that of one part of the batch is no part of that of the batch. So it is either planned as the
  call is traced, and one for all devices, or each device makes its own of its part.

  Calls that take the same `Operation.sources` may make theirs together: each of them makes those of
  all, by one operation that is the same for all of them, and takes its own. XLA keeps one of equal
  operations.

  Attributes:
    plan: from the operands on all devices to those that are derived, or take the place of others;
      None if they are not known.
    serves: whether the plan for the operands (first) serves a part of them (second).
    make: the same as `plan` from a device's part, by operations.
  """

  plan: Callable[[Operands], Derived | None]
  serves: Callable[[Operands, Operands], bool]
  make: Callable[[Operands], Derived]


@dataclasses.dataclass(frozen=True, eq=False)
class Native:
  """The kernel of a platform.

  Attributes:
    kernel: a function of the operands, by name, on whatever part of batch and heads a device has.
    derived: operands that it takes besides.
    is_opaque: whether XLA has to be told how to split it; it knows that of plain JAX.
  """

  kernel: Callable[..., Results]
  derived: DerivedOperand | None = None
  is_opaque: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
  """What is known of an operation before it has operands.

  Attributes:
    operands: dimensions of all operands that there may be, as letters: b is the batch, h are the
      (query) heads, g the kv heads; others are never split. The first one has the whole batch and
      all heads; every call has it.
    results: likewise, in order.
    natives: from the operands to the platforms whose kernels take them and are not excluded by
      `implementation`, each with its kernel.
    plain: the same in plain JAX: a function of the operands, by name.
    plain_name: that `implementation` may have for it.
    implementation: the caller's argument: the name of kernels or of the plain path, or None to
      choose.
    shared: operands that may be one for the whole batch, with a leading axis of 1.
    sources: operands that derived ones are made of and nothing else takes.
    gradients: results that are gradients of operands which may be shared, too: then these are sums
      over the batch.
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
    """From operands by name to the tuple of results.

    Under vmap it is called once, with a larger batch. Where no kernel can be chosen it has the
    derivatives of plain JAX; otherwise it has none.
    """
    names = list(self.results)
    summed = {names.index(result): operand for result, operand in self.gradients.items()}
    first = next(iter(self.operands))
    op = jax.custom_jvp(fold_batch(self._on_platform, first, self.shared, summed))

    @op.defjvp
    def _(primals: tuple[Operands], tangents: tuple[Operands]) -> tuple[Results, Results]:
      if self._usable_natives(*primals):
        raise NotImplementedError(
          f'jax_magi\'s kernels have no second derivative; implementation="{self.plain_name}" has'
        )
      # Not of the folded op: vmap of a derivative is left to JAX.
      return jax.jvp(self._in_plain_jax, primals, tangents)

    return op

  def _on_platform(self, operands: Operands) -> Results:
    """The kernel where the platform that is compiled for has one; plain JAX elsewhere."""
    natives = self._usable_natives(operands)
    # A caller who names a platform wants its kernel, or an error, but never another path.
    if not natives and self.implementation not in (None, self.plain_name):
      raise NotImplementedError(
        f"implementation={self.implementation!r} cannot be used: the kernels do not take arrays of "
        f"the shapes {', '.join(str(list(x.shape)) for x in operands.values())}; "
        f"implementation=None or {self.plain_name!r} takes everything"
      )
    if not natives:
      return self._in_plain_jax(operands)
    default = {"default": self._in_plain_jax} if self.implementation is None else {}
    results: Results = lax.platform_dependent(operands, **natives, **default)
    return results

  def _usable_natives(self, operands: Operands) -> dict[str, Callable[[Operands], Results]]:
    # How much memory a kernel needs is asked when it is traced, and jax.export may know no numbers.
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
    # In the order of the declaration, as dictionaries that JAX has seen are in another.
    given = {name: letters for name, letters in self.operands.items() if name in operands}
    split = keep_batch_and_heads(
      lambda *arrays: fun(**dict(zip(given, arrays, strict=True))),
      list(given.values()),
      list(self.results.values()),
    )
    return split(*(operands[name] for name in given))
