"""Fused scale + mask + softmax: the public functions."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_magi._src.arguments import MAX_LENGTH, check_flag, check_no_symbols, check_number
from jax_magi._src.masks.mask import AttentionMask
from jax_magi._src.masks.windows import band_around, window_band
from jax_magi._src.native.backends import check_implementation, log_fallback
from jax_magi._src.native.explanation import Explanation, explain
from jax_magi._src.softmax.ops import PLAIN, SoftmaxConfig, softmax
from jax_magi._src.transforms.explicit import fold_leading, reshaped, spec_of
from jax_magi._src.transforms.varying import vary_together


def scaled_softmax(x: jax.Array, scale: float = 1.0) -> jax.Array:
  """Softmax of `scale * x` over the last axis.

  Args:
    x: `[..., q_len, k_len]`, float32, bfloat16 or float16.
    scale: static.

  Returns:
    Probabilities, in the shape and dtype of x. They are computed in float32 and rounded once.

  >>> scaled_softmax(jnp.array([[1.0, 1.0, 1.0, 1.0]]), 0.5)
  Array([[0.25, 0.25, 0.25, 0.25]], dtype=float32)
  """
  return fused_scale_mask_softmax(x, scale=scale)


def scaled_masked_softmax(x: jax.Array, mask: jax.Array, scale: float = 1.0) -> jax.Array:
  """Softmax of `scale * x` over what a boolean mask shows, or of `scale * x + mask`.

  Args:
    x: `[..., q_len, k_len]`, float32, bfloat16 or float16.
    mask: boolean, **True where a pair is visible**, or floats to add. It may broadcast over batch,
      heads, rows or columns, and is then never written out in x's shape.
    scale: static.

  Returns:
    Probabilities, in the shape and dtype of x. Fully masked rows are zero.

  >>> scaled_masked_softmax(jnp.zeros((2, 4)), jnp.array([True, True, False, False]))
  Array([[0.5, 0.5, 0. , 0. ],
         [0.5, 0.5, 0. , 0. ]], dtype=float32)
  """
  return fused_scale_mask_softmax(x, mask, scale=scale)


def scaled_upper_triang_masked_softmax(x: jax.Array, scale: float = 1.0) -> jax.Array:
  """Causal softmax of `scale * x`: the last row sees all columns, each row above sees one fewer.

  Args:
    x: `[..., q_len, k_len]`, float32, bfloat16 or float16. Columns that are not visible are not
      read.
    scale: static.

  Returns:
    Probabilities, in the shape and dtype of x. Fully masked rows (if `q_len > k_len`) are zero.

  >>> scaled_upper_triang_masked_softmax(jnp.zeros((2, 4)))
  Array([[0.33333334, 0.33333334, 0.33333334, 0.        ],
         [0.25      , 0.25      , 0.25      , 0.25      ]], dtype=float32)
  """
  return fused_scale_mask_softmax(x, scale=scale, is_causal=True)


def fused_scale_mask_softmax(
  x: jax.Array,
  mask: jax.Array | None = None,
  *,
  scale: float = 1.0,
  is_causal: bool = False,
  window: int | tuple[int | None, int | None] | None = None,
  offset: jax.Array | str | None = None,
  softmax_in_fp32: bool = True,
  donate: bool = False,
  implementation: str | None = None,
) -> jax.Array:
  """Softmax over the last axis of `scale * x + mask`, over visible columns.

  A column is visible if `mask`, `is_causal` and `window` all allow it. The kernels do not read
  columns that the latter two hide, neither forward nor backward.

  Args:
    x: `[..., heads, q_len, k_len]`, or `[q_len, k_len]`: float32, bfloat16 or float16.
    mask: boolean, **True where a pair is visible**, or floats to add, which have a gradient. It
      may broadcast over batch, heads, rows or columns, and is then never written out in x's shape.
    scale: static.
    is_causal: whether to hide columns after the row's own. The last row's own column is the last.
    window: (left, right), how many columns a row sees before and after its own. An int sets both.
      None means no limit.
    offset: an additional logit in the softmax of each row, which has no column: `[heads]`, or one
      number for all, differentiable; or "off-by-one" for a logit of 0, which gives
      `exp(s) / (1 + sum(exp(s)))`.
    softmax_in_fp32: accepted for compatibility. Arithmetic is always float32, which is not slower,
      because memory bandwidth is the limit.
    donate: whether the result may take the memory of x. Inside `jit`, that saves an array of the
      size of x if nothing else uses x. If something does, XLA copies x first. The same is true of
      gradients.
    implementation: "cpu", "cuda" or "xla" (plain JAX). None takes the native kernel of the platform
      that the program is compiled for, or "xla" where there is none. Second derivatives need "xla"
      or float64.

  Returns:
    Probabilities, in the shape and dtype of x. Fully masked rows, and rows of -inf, are zero.

  >>> x = jnp.zeros((1, 3, 3))
  >>> fused_scale_mask_softmax(x, is_causal=True, window=(1, 0), offset="off-by-one")
  Array([[[0.5       , 0.        , 0.        ],
          [0.33333334, 0.33333334, 0.        ],
          [0.        , 0.33333334, 0.33333334]]], dtype=float32)
  """
  x = _check_x(x)
  mask = _check_mask(mask, x)
  offset = _check_offset(offset, x)
  scale = _check_scale(scale)
  check_flag("softmax_in_fp32", softmax_in_fp32)
  donate = check_flag("donate", donate)
  lo, hi = _band(x, check_flag("is_causal", is_causal), window)
  check_implementation(implementation, PLAIN, lambda backend: backend.softmax_obstacle(x))
  if implementation is None:
    log_fallback("softmax", PLAIN, lambda backend: backend.softmax_obstacle(x))
  return _call(SoftmaxConfig(scale, lo, hi, donate, implementation), x, mask, offset)


def explain_softmax(
  x: Any,
  mask: Any = None,
  *,
  is_causal: bool = False,
  window: int | tuple[int | None, int | None] | None = None,
  offset: Any = None,
  softmax_in_fp32: bool = True,
  implementation: str | None = None,
) -> Explanation:
  """Reports which implementation a call of `fused_scale_mask_softmax` would take, and why.

  Nothing is computed, so arrays may be `jax.ShapeDtypeStruct`s. If a call takes plain JAX although
  JAX's default platform has kernels, the function itself logs that under "jax_magi", once for each
  reason.

  Args:
    x: `[..., heads, q_len, k_len]`, or `[q_len, k_len]`.
    mask: boolean or floats, in the shape of x, in which any dimension may be 1.
    is_causal: as in `fused_scale_mask_softmax`.
    window: as in `fused_scale_mask_softmax`.
    offset: as in `fused_scale_mask_softmax`.
    softmax_in_fp32: as in `fused_scale_mask_softmax`.
    implementation: as in `fused_scale_mask_softmax`.
  """

  def explained(x: Any, mask: Any, offset: Any) -> Explanation:
    x = _check_x(x)
    mask = _check_mask(mask, x)
    offset = _check_offset(word if offset is None else offset, x)
    _band(x, check_flag("is_causal", is_causal), window)
    parts = {
      "scale": True,
      "boolean mask": mask is not None and mask.dtype == bool,
      "additive mask": mask is not None and mask.dtype != bool,
      "causal mask": is_causal,
      "window": window is not None,
      "offset": offset is not None,
    }
    notes = []
    if not check_flag("softmax_in_fp32", softmax_in_fp32):
      notes.append("softmax_in_fp32=False changes nothing: arithmetic is float32, at no cost")
    if mask is not None and _batch_of_mask(mask, x) not in (1, math.prod(mask.shape[:-3])):
      notes.append("the mask is repeated for those leading axes of x that it does not have")
    operation = " + ".join([name for name, is_there in parts.items() if is_there] + ["softmax"])
    obstacle = lambda backend: backend.softmax_obstacle(x)  # noqa: E731
    return explain(operation, implementation, PLAIN, obstacle, notes)

  word, offset = (offset, None) if isinstance(offset, str) else (None, offset)
  found: Explanation = jax.eval_shape(explained, x, mask, offset)
  return found


# --- Checks of the arguments ---


def _check_x(x: Any) -> Any:
  if not hasattr(x, "shape") or not hasattr(x, "dtype"):
    raise ValueError(f"x must be an array, got {type(x).__name__}")
  if len(x.shape) < 2:
    raise ValueError(f"x must be [..., heads, q_len, k_len] or [q_len, k_len], got {list(x.shape)}")
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(f"x must hold floating point numbers, got {x.dtype}")
  check_no_symbols("x's last two axes", x.shape[-2:])
  if max(x.shape[-2:]) >= MAX_LENGTH:
    raise ValueError(f"x must have fewer than 2**30 rows and columns, got {list(x.shape[-2:])}")
  if jnp.finfo(x.dtype).bits < 16:
    raise NotImplementedError(f"x must be float32, bfloat16, float16 or float64, got {x.dtype}")
  return jnp.asarray(x)


def _check_mask(mask: Any, x: Any) -> Any:
  """Checks a mask; returns it with as many dimensions as x, in a dtype that kernels take."""
  if mask is None:
    return None
  if isinstance(mask, AttentionMask):
    raise ValueError("mask must be an array, got an AttentionMask; pass mask.to_dense()")
  mask = jnp.asarray(mask)
  if mask.dtype != bool and not jnp.issubdtype(mask.dtype, jnp.floating):
    raise ValueError(
      f"mask must be boolean (True is visible) or floats to add, got {mask.dtype}; "
      "for integers, pass mask != 0 if 1 means visible, or mask == 0 if 1 means masked out, as it "
      "does in Megatron and TransformerEngine"
    )
  sizes = zip(mask.shape[::-1], x.shape[::-1], strict=False)
  if mask.ndim > x.ndim or any(size not in (1, n) for size, n in sizes):
    raise ValueError(f"mask must broadcast to x's {list(x.shape)}, got {list(mask.shape)}")
  if mask.dtype not in (np.dtype(bool), x.dtype, np.dtype(np.float32)):
    mask = mask.astype(np.promote_types(x.dtype, np.float32))
  return mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape)


def _num_heads(x: Any) -> int:
  return x.shape[-3] if x.ndim > 2 else 1


def _check_offset(offset: Any, x: Any) -> Any:
  """Checks the offset; returns float32 `[heads]`."""
  if offset is None:
    return None
  heads = _num_heads(x)
  if isinstance(offset, str):
    if offset != "off-by-one":
      raise ValueError(f'offset must be None, "off-by-one" or an array, got {offset!r}')
    return jnp.zeros(heads, np.float32)
  offset = jnp.asarray(offset)
  if not jnp.issubdtype(offset.dtype, jnp.floating):
    raise ValueError(f"offset must hold floating point numbers, got {offset.dtype}")
  if offset.shape not in ((), (1,), (heads,)):
    raise ValueError(f"offset must be [{heads}], a logit for each head, got {list(offset.shape)}")
  return jnp.broadcast_to(offset.astype(np.float32), (heads,))


def _check_scale(scale: Any) -> float:
  if isinstance(scale, jax.core.Tracer):
    raise ValueError(
      "scale must be a static number, got a traced value; multiply x by it, and leave scale at 1.0"
    )
  return check_number("scale", scale)


def _band(x: Any, is_causal: bool, window: Any) -> tuple[int, int]:
  """The band (lo, hi): row i sees columns i + lo .. i + hi."""
  q_len, k_len = x.shape[-2:]
  lo, hi = band_around(k_len - q_len, window_band("window", window, is_causal=is_causal))
  return int(lo), int(hi)


# --- Reshaping to the four dimensions of the op ---


def _batch_of_mask(mask: Any, x: Any) -> int:
  """The batch size of the folded mask: 1 if all leading axes of x share it, or else all of them."""
  return 1 if math.prod(mask.shape[:-3]) == 1 else math.prod(x.shape[:-3])


def _call(config: SoftmaxConfig, x: Any, mask: Any, offset: Any) -> jax.Array:
  rows = P(*spec_of(x)[:-2], None, None)  # Of which the kernels take whole ones.
  operands = {"x": reshaped(x, x.shape, rows), "mask": mask, "offset": offset}
  operands = {name: a for name, a in operands.items() if a is not None}

  def fold(name: str, a: jax.Array) -> jax.Array:
    if name == "offset":
      return a[None]
    if a.ndim == 2:
      return a[None, None]
    if name == "mask" and _batch_of_mask(a, x) != 1:
      a = jnp.broadcast_to(a, x.shape[:-3] + a.shape[-3:])
    return fold_leading(a, a.ndim - 3)

  # Before the custom derivative, so that the gradient of a replicated operand is summed.
  arrays = zip(operands, vary_together(*operands.values()), strict=True)
  folded = {name: fold(name, a) for name, a in arrays}
  y = softmax(config, folded["x"], folded.get("mask"), folded.get("offset"))
  return reshaped(y, x.shape, rows)
