"""Fused scale + mask + softmax as a differentiable JAX op over a batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_magi._src.native import softmax as native_softmax
from jax_magi._src.native.backends import candidates
from jax_magi._src.softmax import plain
from jax_magi._src.transforms.explicit import spec_of, with_auto_axes
from jax_magi._src.transforms.operation import Native, Operands, Operation, Results

# The name of the path in plain JAX.
PLAIN = "xla"

# y, mask, offset, offset_probability; and the gradients of x, mask, offset. Each may be None if the
# call does not have it.
Residuals = tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]
Gradients = tuple[jax.Array, jax.Array | None, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class SoftmaxConfig:
  """The static arguments of a call. Row i sees columns i + lo .. i + hi."""

  scale: float
  lo: int
  hi: int
  donate: bool
  implementation: str | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def softmax(
  config: SoftmaxConfig, x: jax.Array, mask: jax.Array | None, offset: jax.Array | None
) -> jax.Array:
  """Softmax over the last axis of `scale * x + mask`, over columns that band and mask make visible.

  Args:
    config: the static arguments.
    x: `[batch, heads, q_len, k_len]`.
    mask: bool (True where visible) or floats to add, in the shape of x, in which any dimension may
      be 1; or None.
    offset: float32 `[batch or 1, heads]`, one more logit in each row; or None.

  Returns:
    Probabilities, in the shape and dtype of x. Fully masked rows are zero.
  """
  return _softmax_fwd(config, x, mask, offset)[0]


def _softmax_fwd(
  config: SoftmaxConfig, x: jax.Array, mask: jax.Array | None, offset: jax.Array | None
) -> tuple[jax.Array, Residuals]:
  operands = {"x": x, "mask": mask, "offset": offset}
  operands = {name: a for name, a in operands.items() if a is not None}

  def out_specs() -> tuple[P | None, ...]:
    batch, heads, *_ = spec_of(x)
    y = P(batch, heads, None, None)
    return (y,) if offset is None else (y, P(batch, heads, None))

  fun = _forward(config, offset is not None)
  y, *rest = with_auto_axes(fun, (operands,), out_specs)(operands)
  offset_probability = rest[0] if rest else None
  return y, (y, mask, offset, offset_probability)


def _softmax_bwd(config: SoftmaxConfig, residuals: Residuals, dy: jax.Array) -> Gradients:
  def fun(
    y: jax.Array,
    mask: jax.Array | None,
    offset: jax.Array | None,
    offset_probability: jax.Array | None,
    dy: jax.Array,
  ) -> Gradients:
    dx, *rest = _backward(config, offset is not None)({"y": y, "dy": dy})
    doffset, against_offset = None, None
    if offset is not None and offset_probability is not None:
      # The sum of the gradients of a row's scores.
      against_offset = offset_probability * rest[0]
      doffset = _sum_to(-jnp.sum(against_offset, axis=-1), offset.shape)
    return dx, _mask_gradient(config, mask, y, dy, against_offset), doffset

  def out_specs() -> tuple[P | None, ...]:
    y, mask, offset, _ = residuals
    has_gradient = mask is not None and mask.dtype != bool
    return (
      spec_of(y),
      spec_of(mask) if has_gradient else None,
      None if offset is None else spec_of(offset),
    )

  operands = (*residuals, dy)
  return with_auto_axes(fun, operands, out_specs)(*operands)


def _mask_gradient(
  config: SoftmaxConfig,
  mask: jax.Array | None,
  y: jax.Array,
  dy: jax.Array,
  against_offset: jax.Array | None,
) -> jax.Array | None:
  """The gradient of the mask, computed outside the kernel, so that XLA drops it if it is unused."""
  if mask is None or mask.dtype == bool:
    return None
  if mask.shape[-1] == 1:
    # Added to a whole row, it only weighs against the offset; a sum over the row would be that of
    # the probabilities' rounding.
    if against_offset is None:
      return jnp.zeros_like(mask)
    return _sum_to(against_offset[..., None], mask.shape).astype(mask.dtype)
  dtype = np.promote_types(y.dtype, np.float32)
  wide_y, wide_dy = y.astype(dtype), dy.astype(dtype)
  ds, _ = plain.backward(wide_y, wide_dy, scale=1.0, lo=config.lo, hi=config.hi)
  return _sum_to(ds, mask.shape).astype(mask.dtype)


softmax.defvjp(_softmax_fwd, _softmax_bwd)


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Sums over the dimensions that were broadcast."""
  axes = tuple(i for i, size in enumerate(shape) if size == 1)
  return jnp.sum(x, axis=axes, keepdims=True)


# --- The two operations ---

_X, _ROWS = "bhqk", "bhq"

# Bounded, as each shape has a band of its own.
_cache = functools.lru_cache(maxsize=256)


@_cache
def _forward(config: SoftmaxConfig, has_offset: bool) -> Callable[[Operands], Results]:
  """(x, mask?, offset?) -> (y, offset_probability?)."""
  options: dict[str, Any] = {"scale": config.scale, "lo": config.lo, "hi": config.hi}
  native = functools.partial(native_softmax.forward, **options, donate=config.donate)
  return Operation(
    operands={"x": _X, "mask": _X, "offset": "bh"},
    results={"y": _X} | ({"offset_probability": _ROWS} if has_offset else {}),
    natives=functools.partial(_natives, native, "x", config.implementation),
    plain=functools.partial(_asked_for, functools.partial(plain.forward, **options)),
    plain_name=PLAIN,
    implementation=config.implementation,
    shared=frozenset({"mask", "offset"}),
  ).function()


@_cache
def _backward(config: SoftmaxConfig, with_dot: bool) -> Callable[[Operands], Results]:
  """(y, dy) -> (dx, dot?)."""
  options: dict[str, Any] = {"scale": config.scale, "lo": config.lo, "hi": config.hi}
  options |= {"with_dot": with_dot}
  native = functools.partial(native_softmax.backward, **options, donate=config.donate)
  return Operation(
    operands={"y": _X, "dy": _X},
    results={"dx": _X} | ({"dot": _ROWS} if with_dot else {}),
    natives=functools.partial(_natives, native, "y", config.implementation),
    plain=functools.partial(_asked_for, functools.partial(plain.backward, **options)),
    plain_name=PLAIN,
    implementation=config.implementation,
  ).function()


def _natives(
  native: Callable[..., Any], first: str, implementation: str | None, operands: Operands
) -> dict[str, Native]:
  """The platforms whose kernels take the operands."""
  return {
    platform: Native(functools.partial(_asked_for, native))
    for platform, backend in candidates(implementation).items()
    if backend.softmax_obstacle(operands[first]) is None
  }


def _asked_for(fun: Callable[..., Any], **operands: Any) -> Results:
  """The results that are not None."""
  return tuple(x for x in fun(**operands) if x is not None)
