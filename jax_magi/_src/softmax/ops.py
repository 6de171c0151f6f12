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
from jax_magi._src.native.backends import BACKENDS
from jax_magi._src.transforms.explicit import spec_of, with_auto_axes
from jax_magi._src.transforms.platform import by_platform
from jax_magi._src.transforms.sharding import keep_batch_and_heads

# The name of the path in plain JAX.
PLAIN = "xla"


@dataclasses.dataclass(frozen=True)
class SoftmaxConfig:
  """What is static about a call. Row i sees columns i + lo .. i + hi."""

  scale: float
  lo: int
  hi: int
  donate: bool
  implementation: str | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def softmax(config: SoftmaxConfig, x, mask, offset):
  """Softmax over the last axis of `scale * x + mask`, over what band and mask show.

  Args:
    config: see `SoftmaxConfig`.
    x: `[batch, heads, q_len, k_len]`.
    mask: bool (True is visible) or floats to add, x's shape with any dimension 1; or None.
    offset: float32 `[batch or 1, heads]`, one more logit in each row; or None.

  Returns:
    Probabilities like x; rows that see nothing are zero.
  """
  return _softmax_fwd(config, x, mask, offset)[0]


def _softmax_fwd(config, x, mask, offset):
  operands = tuple(a for a in (x, mask, offset) if a is not None)

  def out_specs():
    batch, heads, *_ = spec_of(x)
    y = P(batch, heads, None, None)
    return (y,) if offset is None else (y, P(batch, heads, None))

  fun = _forward(config, mask is not None, offset is not None)
  y, *rest = with_auto_axes(fun, operands, out_specs)(*operands)
  offset_probability = rest[0] if rest else None
  return y, (y, mask, offset, offset_probability)


def _softmax_bwd(config, residuals, dy):
  def fun(y, mask, offset, offset_probability, dy):
    dx, *rest = _backward(config, offset is not None)(y, dy)
    doffset, against_offset = None, None
    if offset is not None:
      against_offset = offset_probability * rest[0]  # What a row's scores gain together.
      doffset = _sum_to(-jnp.sum(against_offset, axis=-1), offset.shape)
    return dx, _mask_gradient(config, mask, y, dy, against_offset), doffset

  def out_specs():
    y, mask, offset, _ = residuals
    has_gradient = mask is not None and mask.dtype != bool
    return (
      spec_of(y),
      spec_of(mask) if has_gradient else None,
      None if offset is None else spec_of(offset),
    )

  operands = (*residuals, dy)
  return with_auto_axes(fun, operands, out_specs)(*operands)


def _mask_gradient(config, mask, y, dy, against_offset):
  """Outside the kernel, and from the same operands: where nobody asks for it, XLA drops it."""
  if mask is None or mask.dtype == bool:
    return None
  if mask.shape[-1] == 1:
    # Added to a whole row, it only weighs against the offset; a sum over the row would be that of
    # the probabilities' rounding.
    if against_offset is None:
      return jnp.zeros_like(mask)
    return _sum_to(against_offset[..., None], mask.shape).astype(mask.dtype)
  dtype = np.promote_types(y.dtype, np.float32)
  band = {"lo": config.lo, "hi": config.hi}
  ds = _plain_backward(y.astype(dtype), dy.astype(dtype), scale=1.0, **band)[0]
  return _sum_to(ds, mask.shape).astype(mask.dtype)


softmax.defvjp(_softmax_fwd, _softmax_bwd)


def _sum_to(x, shape):
  """Sums over what was broadcast."""
  axes = tuple(i for i, size in enumerate(shape) if size == 1)
  return jnp.sum(x, axis=axes, keepdims=True)


# --- The two kernel calls, each usable under vmap and jit with shardings ---

_X, _OFFSET, _ROWS = "bhqk", "bh", "bhq"

# Bounded, as each shape has a band of its own.
_cache = functools.lru_cache(maxsize=256)


@_cache
def _forward(config: SoftmaxConfig, has_mask: bool, has_offset: bool) -> Callable:
  """(x, mask?, offset?) -> (y, offset_probability?)."""

  def with_all(fun, *operands):
    x, *rest = operands
    mask = rest.pop(0) if has_mask else None
    y, offset_probability = fun(x, mask, rest[0] if has_offset else None)
    return (y, offset_probability) if has_offset else (y,)

  options: dict[str, Any] = {"scale": config.scale, "lo": config.lo, "hi": config.hi}
  native = functools.partial(native_softmax.forward, **options, donate=config.donate)
  plain = functools.partial(_plain_forward, **options)
  operands = [_X, *[_X] * has_mask, *[_OFFSET] * has_offset]
  return _wrap(
    config,
    native=functools.partial(with_all, native),
    plain=functools.partial(with_all, plain),
    operands=operands,
    results=[_X, *[_ROWS] * has_offset],
    shared=tuple(range(1, len(operands))),
  )


@_cache
def _backward(config: SoftmaxConfig, with_dot: bool) -> Callable:
  """(y, dy) -> (dx, dot?)."""

  def asked_for(fun, y, dy):
    dx, dot = fun(y, dy)
    return (dx, dot) if with_dot else (dx,)

  band: dict[str, Any] = {"lo": config.lo, "hi": config.hi}
  native = functools.partial(
    native_softmax.backward, scale=config.scale, **band, donate=config.donate, with_dot=with_dot
  )
  plain = functools.partial(_plain_backward, scale=config.scale, **band)
  return _wrap(
    config,
    native=functools.partial(asked_for, native),
    plain=functools.partial(asked_for, plain),
    operands=[_X, _X],
    results=[_X, *[_ROWS] * with_dot],
    shared=(),
  )


def _wrap(
  config: SoftmaxConfig,
  *,
  native: Callable,
  plain: Callable,
  operands: list[str],
  results: list[str],
  shared: tuple[int, ...],
) -> Callable:
  split = keep_batch_and_heads(native, operands, results)

  def usable(x, *_):
    return {p: split for p, backend in BACKENDS.items() if backend.softmax_obstacle(x) is None}

  return by_platform(config.implementation, usable, plain, plain_name=PLAIN, shared=shared)


# --- The same in plain JAX, in float32 at least ---


def _plain_forward(x, mask, offset, *, scale: float, lo: int, hi: int):
  dtype = np.promote_types(x.dtype, np.float32)
  logits = x.astype(dtype) * scale
  in_band = _in_band(x.shape, lo, hi)
  if mask is not None and mask.dtype != bool:
    logits = logits + mask.astype(dtype)
  visible = in_band & mask if mask is not None and mask.dtype == bool else in_band
  logits = jnp.where(visible, logits, -jnp.inf)
  extra = jnp.array(-jnp.inf, dtype) if offset is None else offset.astype(dtype)[:, :, None, None]
  largest = jnp.maximum(logits.max(axis=-1, keepdims=True, initial=-jnp.inf), extra)
  largest = jnp.where(largest == -jnp.inf, 0.0, largest)
  weights = jnp.exp(logits - largest)
  extra_weight = jnp.exp(extra - largest)
  total = weights.sum(axis=-1, keepdims=True) + extra_weight
  inverse = jnp.where(total == 0.0, 0.0, 1.0 / jnp.where(total == 0.0, 1.0, total))
  y = jnp.where(in_band, weights * inverse, 0.0).astype(x.dtype)
  return y, (extra_weight * inverse)[..., 0].astype(np.float32)


def _plain_backward(y, dy, *, scale: float, lo: int, hi: int):
  dtype = np.promote_types(y.dtype, np.float32)
  wide_y = y.astype(dtype)
  wide_dy = jnp.where(_in_band(y.shape, lo, hi), dy.astype(dtype), 0.0)
  dot = jnp.sum(wide_y * wide_dy, axis=-1)
  dx = scale * wide_y * (wide_dy - dot[..., None])
  return dx.astype(y.dtype), dot.astype(np.float32)


def _in_band(shape: tuple[int, ...], lo: int, hi: int):
  """bool `[1, 1, q_len, k_len]` for a shape of four dimensions."""
  shape = (1, 1, *shape[-2:])
  row = jax.lax.broadcasted_iota(np.int32, shape, 2)
  column = jax.lax.broadcasted_iota(np.int32, shape, 3)
  return (column - row >= lo) & (column - row <= hi)
