"""The choice among implementations of an op, made when a program is lowered."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jax import lax


def by_platform(
  implementation: str | None, natives: Callable[..., Mapping[str, Callable]], plain: Callable
) -> Callable:
  """The native kernel where the platform that is compiled for has one; plain JAX elsewhere.

  Args:
    implementation: the name of a platform or of the plain path, or None to choose.
    natives: from the operands to the native kernels that take them, by platform.
    plain: the same op in plain JAX.
  """

  def call(*operands):
    usable = {
      platform: fun
      for platform, fun in natives(*operands).items()
      if implementation in (None, platform)
    }
    if not usable:
      return plain(*operands)
    # A caller who names a platform wants its kernel, or an error, but never another path.
    default = {"default": plain} if implementation is None else {}
    return lax.platform_dependent(*operands, **usable, **default)

  return call
