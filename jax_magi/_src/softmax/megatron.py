"""Fused scale + mask + softmax for code that comes from Megatron."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi._src.softmax.api import fused_scale_mask_softmax

_log = logging.getLogger("jax_magi")
_MASK_TYPES = ("causal", "padding", "padding_causal", "arbitrary", "no_mask")


@dataclasses.dataclass(frozen=True)
class FusedScaleMaskSoftmax:
  """`fused_scale_mask_softmax` with the options and conventions of Megatron, for ported code.

  Beware: here, a boolean mask is **True where a pair is masked out**. In JAX and in all other
  functions of this package, it is True where a pair is visible.

  These are the differences from Megatron. Any q_len, k_len, batch, heads and dtype run fused, also
  with an offset. Causal masks need not be square (the last row sees all columns), and combine with
  `mask`. Under a causal mask, `window_size` never shows columns after a row's own. Without
  `mask_func`, fully masked rows return zeros.

  Attributes:
    input_in_fp16: whether inputs are float16.
    input_in_bf16: whether inputs are bfloat16.
    attn_mask_type: "causal", "padding", "padding_causal", "arbitrary" or "no_mask", or an enum
      with these names.
    scaled_masked_softmax_fusion: whether to use fused kernels.
    mask_func: None hides masked pairs exactly. A function of (scaled float32 input, mask) is called
      before the kernel, and is not fused.
    softmax_in_fp32: as in `fused_scale_mask_softmax`.
    scale: a factor of the input. None means 1.
    window_size: (left, right), how many columns a row sees before and after its own. None means no
      window.

  >>> fused = FusedScaleMaskSoftmax(False, False, "padding", True, None, True, scale=None)
  >>> fused(jnp.zeros((1, 1, 1, 4)), jnp.array([True, False, False, True]))
  Array([[[[0. , 0.5, 0.5, 0. ]]]], dtype=float32)
  """

  input_in_fp16: bool
  input_in_bf16: bool
  attn_mask_type: Any
  scaled_masked_softmax_fusion: bool
  mask_func: Any
  softmax_in_fp32: bool
  scale: float | None
  window_size: tuple[int, int] | None = None

  def __post_init__(self) -> None:
    if self.input_in_fp16 and self.input_in_bf16:
      raise ValueError("input_in_fp16 and input_in_bf16 cannot both be set")
    if self._mask_type not in _MASK_TYPES:
      raise ValueError(f"attn_mask_type must be one of {_MASK_TYPES}, got {self.attn_mask_type!r}")
    if self.mask_func is not None and not callable(self.mask_func):
      raise ValueError(f"mask_func must be None or a function, got {self.mask_func!r}")

  @property
  def _mask_type(self) -> str:
    name: str = getattr(self.attn_mask_type, "name", self.attn_mask_type)
    return name

  def __call__(
    self, input: jax.Array, mask: jax.Array | None, softmax_offset: jax.Array | None = None
  ) -> jax.Array:
    """Probabilities of `[batch, heads, q_len, k_len]` scores; `softmax_offset` is `[heads]`."""
    if np.ndim(input) != 4:
      raise ValueError(f"input must be [batch, heads, q_len, k_len], got {list(np.shape(input))}")
    for flag, dtype in (("input_in_fp16", jnp.float16), ("input_in_bf16", jnp.bfloat16)):
      if getattr(self, flag) and input.dtype != dtype:
        raise ValueError(f"{flag} is set, so input must be {dtype.__name__}, got {input.dtype}")
    if mask is not None and not jnp.issubdtype(jnp.result_type(mask), bool):
      raise ValueError(
        f"mask must be boolean, True is masked out; got {jnp.result_type(mask)}; for integers, "
        "pass mask != 0 if 1 means masked out, or mask == 0 if 1 means visible"
      )
    x, scale = input, 1.0 if self.scale is None else self.scale
    if mask is not None and self.mask_func is not None:
      _log.debug("mask_func is arbitrary code: scale and mask are applied before the kernel")
      x = self.mask_func(x.astype(np.float32) * scale, mask)
      mask, scale = None, 1.0
    y = fused_scale_mask_softmax(
      x,
      None if mask is None else ~jnp.asarray(mask),
      scale=scale,
      is_causal="causal" in self._mask_type,
      window=self.window_size,
      offset=softmax_offset,
      softmax_in_fp32=self.softmax_in_fp32,
      implementation=None if self.scaled_masked_softmax_fusion else "xla",
    )
    return y.astype(input.dtype)
