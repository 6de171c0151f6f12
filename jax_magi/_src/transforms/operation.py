"""An operation over a batch, declared once. What JAX has to know of it follows from that.

its operands and results, by name, with their dimensions as letters
  -> under vmap, one call with a larger batch                (batching.py)
  -> on each platform, its kernel, or plain JAX              (platform.py)
  -> under plain jit, batch and heads stay split             (sharding.py)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax_magi._src.transforms.platform import by_platform
from jax_magi._src.transforms.sharding import keep_batch_and_heads


@dataclasses.dataclass(frozen=True)
class Operation:
  """What is known of an operation before it has operands.

  Attributes:
    operands: dimensions of all operands that there may be, as letters: b is the batch, h are the
      (query) heads, g the kv heads; others are never split. The first one has the whole batch and
      all heads; every call has it.
    results: likewise, in order.
    natives: from the operands to the platforms whose kernels take them, each with a function of
      `split` and the operands. `split(fun, operands)` is `fun(**operands)`, on whatever part of
      batch and heads a device has.
    plain: the same in plain JAX: a function of the operands, by name.
    plain_name: that `implementation` may have for it.
    implementation: the name of a platform or of the plain path, or None to choose.
    shared: operands that may be one for the whole batch, with a leading axis of 1.
    gradients: results that are gradients of operands which may be shared, too: then these are sums
      over the batch.
  """

  operands: Mapping[str, str]
  results: Mapping[str, str]
  natives: Callable[[dict[str, Any]], Mapping[str, Callable]]
  plain: Callable[..., tuple[Any, ...]]
  plain_name: str
  implementation: str | None = None
  shared: frozenset[str] = frozenset()
  gradients: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def function(self) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """From operands by name to the tuple of results; differentiable where plain JAX is taken."""

    def natives(operands: dict[str, Any]) -> dict[str, Callable]:
      return {
        platform: lambda operands, fun=fun: fun(self._split, operands)
        for platform, fun in self.natives(operands).items()
      }

    names = list(self.results)
    return by_platform(
      self.implementation,
      natives,
      lambda operands: self.plain(**operands),
      plain_name=self.plain_name,
      first=next(iter(self.operands)),
      shared=self.shared,
      summed={names.index(result): operand for result, operand in self.gradients.items()},
    )

  def _split(self, fun: Callable, operands: dict[str, Any]) -> tuple[Any, ...]:
    # In the order of the declaration, as dictionaries that JAX has seen are in another.
    given = {name: letters for name, letters in self.operands.items() if name in operands}
    split = keep_batch_and_heads(
      lambda *arrays: fun(**dict(zip(given, arrays, strict=True))),
      list(given.values()),
      list(self.results.values()),
    )
    return split(*(operands[name] for name in given))
