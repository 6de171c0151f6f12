"""The choice among implementations of an op, made when a program is lowered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.export
from jax import lax

from jax_magi._src.transforms.batching import fold_batch


def by_platform(
  implementation: str | None,
  natives: Callable[[dict[str, Any]], Mapping[str, Callable]],
  plain: Callable,
  *,
  plain_name: str,
  first: str,
  shared: Set[str],
  summed: dict[int, str],
) -> Callable:
  """The native kernel where the platform that is compiled for has one; plain JAX elsewhere.

  It takes a dictionary of operands. Under vmap it is called once, with a larger batch. Where no
  native kernel can be chosen it has the derivatives of `plain`; otherwise it has none.

  Args:
    implementation: the name of a platform or of the plain path, or None to choose.
    natives: from the operands to the native kernels that take them, by platform.
    plain: the same op in plain JAX.
    plain_name: the name of the plain path.
    first: as in `fold_batch`, and so the next two.
    shared: see above.
    summed: see above.
  """

  def usable_natives(operands):
    # How much memory a kernel needs is asked when it is traced, and jax.export may know no numbers.
    if any(jax.export.is_symbolic_dim(size) for x in operands.values() for size in x.shape):
      return {}
    return {
      platform: fun
      for platform, fun in natives(operands).items()
      if implementation in (None, platform)
    }

  def call(operands):
    usable = usable_natives(operands)
    # A caller who names a platform wants its kernel, or an error, but never another path.
    if not usable and implementation not in (None, plain_name):
      raise NotImplementedError(
        f"implementation={implementation!r} cannot be used: the kernels do not take arrays of the "
        f"shapes {', '.join(str(list(x.shape)) for x in operands.values())}; "
        f"implementation=None or {plain_name!r} takes everything"
      )
    if not usable:
      return plain(operands)
    default = {"default": plain} if implementation is None else {}
    return lax.platform_dependent(operands, **usable, **default)

  op = jax.custom_jvp(fold_batch(call, first, shared, summed))

  @op.defjvp
  def _(primals, tangents):
    if usable_natives(*primals):
      raise NotImplementedError(
        f'jax_magi\'s kernels have no second derivative; implementation="{plain_name}" has'
      )
    # Not of the folded op: vmap of a derivative is left to JAX.
    return jax.jvp(plain, primals, tangents)

  return op
