"""The choice among implementations of an op, made when a program is lowered."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.export
from jax import lax

from jax_magi._src.transforms.batching import fold_batch


def by_platform(
  implementation: str | None,
  natives: Callable[..., Mapping[str, Callable]],
  plain: Callable,
  *,
  plain_name: str,
  shared: tuple[int, ...],
  summed: dict[int, int] | None = None,
) -> Callable:
  """The native kernel where the platform that is compiled for has one; plain JAX elsewhere.

  Under vmap it is called once, with a larger batch (`fold_batch`). Where no native kernel can be
  chosen it has the derivatives of `plain`; otherwise it has none.

  Args:
    implementation: the name of a platform or of the plain path, or None to choose.
    natives: from the operands to the native kernels that take them, by platform.
    plain: the same op in plain JAX.
    plain_name: the name of the plain path.
    shared: operands, by index, that may be one for the whole batch.
    summed: gradients of such operands among the results, as in `fold_batch`.
  """

  def usable_natives(operands):
    # How much memory a kernel needs is asked when it is traced, and jax.export may know no numbers.
    if any(jax.export.is_symbolic_dim(size) for x in operands for size in x.shape):
      return {}
    return {
      platform: fun
      for platform, fun in natives(*operands).items()
      if implementation in (None, platform)
    }

  def call(*operands):
    usable = usable_natives(operands)
    # A caller who names a platform wants its kernel, or an error, but never another path.
    if not usable and implementation not in (None, plain_name):
      raise NotImplementedError(
        f"implementation={implementation!r} cannot be used: the kernels do not take arrays of the "
        f"shapes {', '.join(str(list(x.shape)) for x in operands)}; "
        f"implementation=None or {plain_name!r} takes everything"
      )
    if not usable:
      return plain(*operands)
    default = {"default": plain} if implementation is None else {}
    return lax.platform_dependent(*operands, **usable, **default)

  op = jax.custom_jvp(fold_batch(call, shared, summed))

  @op.defjvp
  def _(primals, tangents):
    if usable_natives(primals):
      raise NotImplementedError(
        f'jax_magi\'s kernels have no second derivative; implementation="{plain_name}" has'
      )
    # Not of the folded op: vmap of a derivative is left to JAX.
    return jax.jvp(plain, primals, tangents)

  return op
