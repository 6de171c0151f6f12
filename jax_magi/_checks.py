"""What a caller can get wrong, said once and by name."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi import _ffi
from jax_magi._mask import AttentionMask
from jax_magi._ops import AttentionConfig
from jax_magi._slices import UNBOUNDED

_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
# float32 holds logits / softcap, and its inverse, well inside these.
_SMALLEST_SOFTCAP, _LARGEST_SOFTCAP = 1e-6, 1e6
_IMPLEMENTATIONS = (None, "cpu", "cuda", "blockwise")


def check_qkv(q: Any, k: Any, v: Any) -> None:
  """Shapes and dtypes of one sequence: `[length, heads, dim]` each."""
  for name, x in (("q", q), ("k", k), ("v", v)):
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
      raise ValueError(f"{name} must be an array, got {type(x).__name__}")
    if len(x.shape) != 3:
      raise ValueError(f"{name} must be [length, num_heads, head_dim], got {list(x.shape)}")
    if x.dtype != q.dtype:
      raise ValueError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
    if x.shape[0] >= UNBOUNDED:
      raise ValueError(f"{name} must be shorter than 2**30 rows, got {x.shape[0]}")
  if not jnp.issubdtype(q.dtype, jnp.floating):
    raise ValueError(f"q, k and v must hold floating point numbers, got {q.dtype}")
  if q.dtype not in _DTYPES:
    names = ", ".join(str(d) for d in _DTYPES)
    raise NotImplementedError(f"q, k and v must have one of the dtypes {names}, got {q.dtype}")

  k_len, num_kv_heads, head_dim = k.shape
  if q.shape[2] != head_dim:
    raise ValueError(f"q and k must have the same head_dim, got {q.shape[2]} and {head_dim}")
  if head_dim == 0 or v.shape[2] == 0:
    raise ValueError(f"head dims must be positive, got q {list(q.shape)} and v {list(v.shape)}")
  if v.shape[:2] != (k_len, num_kv_heads):
    raise ValueError(f"v must be [{k_len}, {num_kv_heads}, value_dim] like k, got {list(v.shape)}")
  if num_kv_heads == 0 or q.shape[1] == 0 or q.shape[1] % num_kv_heads:
    raise ValueError(
      "q's heads must be a multiple of k's (GQA: query heads g*G .. g*G+G-1 use kv head g), "
      f"got {q.shape[1]} and {num_kv_heads}"
    )


def check_mask(mask: Any, q_len: int, k_len: int) -> None:
  """The mask belongs to these lengths."""
  if not isinstance(mask, AttentionMask):
    raise ValueError(f"mask must be an AttentionMask, got {type(mask).__name__}")
  if np.ndim(mask.slices) != 2:
    raise ValueError(
      f"mask must have slices [num_slices, 6], got {list(np.shape(mask.slices))}; "
      "for a batch of masks, use jax.vmap"
    )
  if (mask.q_len, mask.k_len) != (q_len, k_len):
    raise ValueError(
      f"mask is for {mask.q_len} queries and {mask.k_len} keys, "
      f"but q has {q_len} rows and k has {k_len}"
    )


def check_sink(sink: Any, num_q_heads: int) -> jax.Array:
  """One logit per query head: the sinks' logsumexp; -inf for none.

  Sinks only ever appear as that sum, so the kernels need no more, and autodiff finds the
  gradient of each.
  """
  if sink is None:
    return jnp.full(num_q_heads, -jnp.inf, np.float32)
  shape = np.shape(sink)
  if len(shape) not in (1, 2) or shape[-1] != num_q_heads:
    raise ValueError(
      f"sink must be [{num_q_heads}] or [num_sink, {num_q_heads}], got {list(shape)}"
    )
  sink = jnp.asarray(sink)
  if sink.dtype != np.float32:
    raise ValueError(f"sink must be float32, got {sink.dtype}")
  if sink.ndim == 1:
    return sink
  if sink.shape[0] == 0:
    return jnp.full(num_q_heads, -jnp.inf, np.float32)
  # Written out: the derivative of jax.nn.logsumexp is NaN where all sinks are -inf.
  largest = jax.lax.stop_gradient(sink.max(axis=0))
  largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
  total = jnp.exp(sink - largest).sum(axis=0)
  is_none = total == 0.0
  return jnp.where(is_none, -jnp.inf, largest + jnp.log(jnp.where(is_none, 1.0, total)))


def make_config(
  q: Any,
  v: Any,
  *,
  softmax_scale: Any,
  softcap: Any,
  deterministic: Any,
  sm_margin: Any,
  implementation: Any,
) -> AttentionConfig:
  """The static arguments, checked."""
  scale = (
    q.shape[-1] ** -0.5 if softmax_scale is None else check_number("softmax_scale", softmax_scale)
  )
  cap = check_number("softcap", softcap)
  if cap < 0.0:
    raise ValueError(f"softcap must be positive, or 0 for none, got {softcap}")
  if cap and not _SMALLEST_SOFTCAP <= cap <= _LARGEST_SOFTCAP:
    raise ValueError(
      f"softcap must be 0 or in [{_SMALLEST_SOFTCAP}, {_LARGEST_SOFTCAP}], got {softcap}"
    )
  if isinstance(sm_margin, bool) or not isinstance(sm_margin, (int, np.integer)):
    raise ValueError(f"sm_margin must be an integer, got {sm_margin!r}")
  if sm_margin < 0:
    raise ValueError(f"sm_margin must not be negative, got {sm_margin}")
  if sm_margin >= 2**31:
    raise ValueError(f"sm_margin must fit in 32 bits, got {sm_margin}")
  if not isinstance(deterministic, (bool, np.bool_)):
    raise ValueError(f"deterministic must be True or False, got {deterministic!r}")
  if implementation not in _IMPLEMENTATIONS:
    raise ValueError(f"implementation must be one of {_IMPLEMENTATIONS}, got {implementation!r}")
  if implementation in ("cpu", "cuda") and implementation not in _ffi.PLATFORMS:
    raise NotImplementedError(
      f"implementation={implementation!r} is not in this build of jax_magi, which has "
      f"{_ffi.PLATFORMS}; install it where nvcc is found, or use implementation='blockwise'"
    )
  if implementation == "cuda" and not _ffi.supports("cuda", q, v):
    raise NotImplementedError(
      "implementation='cuda' takes bfloat16 or float16 and head dims up to 256, on Hopper GPUs; "
      f"got {q.dtype} and head dims {q.shape[-1]} and {v.shape[-1]}; "
      "implementation=None or 'blockwise' takes the rest"
    )
  return AttentionConfig(scale, cap, bool(deterministic), int(sm_margin), implementation)


def check_number(name: str, value: Any) -> float:
  """A static number that float32 holds; 0 where it underflows there."""
  if isinstance(value, jax.core.Tracer):
    raise ValueError(f"{name} must be a static number, got a traced value")
  if isinstance(value, (str, bytes)):
    raise ValueError(f"{name} must be a number, got {value!r}")
  try:
    number = float(value)
  except (TypeError, ValueError):
    raise ValueError(f"{name} must be a number, got {value!r}") from None
  with np.errstate(over="ignore"):
    rounded = np.float32(number)
  if not math.isfinite(rounded):
    raise ValueError(f"{name} must be finite in float32, got {number}")
  return number if rounded else 0.0
