"""Checks of the arguments of attention. Each error names the argument."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_magi._src.arguments import (
  MAX_LENGTH,
  check_array,
  check_flag,
  check_no_symbols,
  check_number,
)
from jax_magi._src.attention.kernel_call import CHECKPOINT_NAMES, PLAIN, AttentionConfig
from jax_magi._src.masks.mask import AttentionMask
from jax_magi._src.native.backends import check_implementation, num_multiprocessors
from jax_magi._src.softmax_lse import softmax_lse

_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
# Between these, float32 can represent logits / softcap and its inverse.
_SMALLEST_SOFTCAP, _LARGEST_SOFTCAP = 1e-6, 1e6


def check_qkv(q: Any, k: Any, v: Any, names: tuple[str, str, str] = ("q", "k", "v")) -> None:
  """Checks q, k and v of one sequence, `[length, heads, dim]` each, under the caller's names."""
  q_name, k_name, v_name = names
  all_names = f"{q_name}, {k_name} and {v_name}"
  for name, x in zip(names, (q, k, v), strict=True):
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
      raise ValueError(f"{name} must be an array, got {type(x).__name__}")
    if len(x.shape) != 3:
      raise ValueError(f"{name} must be [length, num_heads, head_dim], got {list(x.shape)}")
    check_no_symbols(name, x.shape)
    if x.dtype != q.dtype:
      raise ValueError(f"{name} must have {q_name}'s dtype {q.dtype}, got {x.dtype}")
    if x.shape[0] >= MAX_LENGTH:
      raise ValueError(f"{name} must be shorter than 2**30 rows, got {x.shape[0]}")
  if not jnp.issubdtype(q.dtype, jnp.floating):
    raise ValueError(f"{all_names} must hold floating point numbers, got {q.dtype}")
  if q.dtype not in _DTYPES:
    dtypes = ", ".join(str(d) for d in _DTYPES)
    raise NotImplementedError(
      f"{all_names} must have one of the dtypes {dtypes}, got {q.dtype}; cast them, for example "
      f"with {q_name}.astype(jnp.float32)"
    )

  k_len, num_kv_heads, head_dim = k.shape
  if q.shape[2] != head_dim:
    raise ValueError(
      f"{q_name} and {k_name} must have the same head_dim, got {q.shape[2]} and {head_dim}"
    )
  if head_dim == 0 or v.shape[2] == 0:
    raise ValueError(
      f"head dims must be positive, got {q_name} {list(q.shape)} and {v_name} {list(v.shape)}"
    )
  if v.shape[:2] != (k_len, num_kv_heads):
    raise ValueError(
      f"{v_name} must be [{k_len}, {num_kv_heads}, value_dim] like {k_name}, got {list(v.shape)}"
    )
  if num_kv_heads == 0 or q.shape[1] == 0 or q.shape[1] % num_kv_heads:
    raise ValueError(
      f"{q_name}'s heads must be a multiple of {k_name}'s (GQA: query heads g*G .. g*G+G-1 use kv "
      f"head g), got {q.shape[1]} and {num_kv_heads}"
    )


def check_mask(mask: Any, q: Any, k: Any) -> None:
  """Checks that the mask fits the lengths of q and k, `[length, heads, dim]`."""
  if not isinstance(mask, AttentionMask):
    raise ValueError(f"mask must be an AttentionMask, got {type(mask).__name__}")
  if np.ndim(mask.slices) != 2:
    raise ValueError(
      f"mask must have slices [num_slices, 6], got {list(np.shape(mask.slices))}; "
      "for a batch of masks, use jax.vmap or dot_product_attention"
    )
  lengths = (mask.q_len, mask.k_len)
  if (q.shape[1], k.shape[1]) == lengths != (q.shape[0], k.shape[0]):
    raise ValueError(
      f"q must be [length, num_heads, head_dim], but {list(q.shape)} looks like [num_heads, "
      f"length, head_dim]: the mask is for {mask.q_len} queries and {mask.k_len} keys; try "
      "q.swapaxes(0, 1), and the same for k and v"
    )
  _check_lengths(mask, q.shape[0], k.shape[0], "q", "k")


def slices_of_batch(mask: AttentionMask, batch: int, q_len: int, k_len: int) -> Any:
  """int32 `[batch or 1, num_slices, 6]` of one mask for the batch, or of one mask for each row."""
  _check_lengths(mask, q_len, k_len, "query", "key")
  slices = mask.slices
  shape = tuple(np.shape(slices))
  if len(shape) == 2:
    return slices[None]
  if len(shape) != 3 or shape[0] != batch or shape[2] != 6:
    raise ValueError(
      f"mask must have slices [num_slices, 6], or [{batch}, num_slices, 6] for one mask per row of "
      f"the batch, got {list(shape)}"
    )
  if not isinstance(slices, np.ndarray):
    return slices
  # If tree_map made this mask, its slices are unchecked.
  rows = [AttentionMask(row, q_len, k_len).slices for row in slices]
  return np.array(rows, np.int32).reshape(shape)


def _check_lengths(mask: AttentionMask, q_len: int, k_len: int, q_name: str, k_name: str) -> None:
  if (mask.q_len, mask.k_len) != (q_len, k_len):
    raise ValueError(
      f"mask is for {mask.q_len} queries and {mask.k_len} keys, "
      f"but {q_name} has {q_len} rows and {k_name} has {k_len}"
    )


def sink_logit(sink: Any, num_q_heads: int) -> Any:
  """Checks sinks, and returns one logit per query head: their logsumexp, or -inf for no sink.

  The softmax depends on sinks only through this sum. The kernels need nothing else, and autodiff
  derives the gradient of each sink.
  """
  if sink is None:
    # Computed by numpy, because jax_debug_infs checks what JAX computes.
    return np.full(num_q_heads, -np.inf, np.float32)
  shape = check_array("sink", sink)
  if len(shape) not in (1, 2) or shape[-1] != num_q_heads:
    raise ValueError(
      f"sink must be [{num_q_heads}] or [num_sink, {num_q_heads}], got {list(shape)}"
    )
  sink = jnp.asarray(sink)
  if sink.dtype not in _DTYPES:
    raise ValueError(f"sink must be float32, bfloat16 or float16, got {sink.dtype}")
  sink = sink.astype(np.float32)  # Its gradient comes back in the caller's dtype.
  if sink.ndim == 1:
    return sink
  return softmax_lse(sink)[1]


def check_broadcastable(name: str, x: Any, shape: tuple[Any, ...]) -> None:
  """Checks that `x` can be broadcast to `shape`, `[..., num_q_heads, q_len, k_len]`."""
  sizes = tuple(np.shape(x))
  fits = len(sizes) <= len(shape) and all(
    size in (1, full) for size, full in zip(sizes[::-1], shape[::-1], strict=False)
  )
  if not fits:
    names = ", ".join(("batch", "num_q_heads", "q_len", "k_len")[-len(shape) :])
    raise ValueError(
      f"{name} must be broadcastable to [{names}] = {list(shape)}, got {list(sizes)}"
    )


def check_bias(bias: Any, shape: tuple[Any, ...], dtype: Any) -> Any:
  """Checks the bias, and returns it in the shape that the kernels take; None stays None.

  Args:
    bias: the caller's argument, broadcastable to `shape`. Shared dimensions keep size 1.
    shape: `[..., num_q_heads, q_len, k_len]`.
    dtype: the dtype of q.
  """
  if bias is None:
    return None
  check_array("bias", bias)
  check_broadcastable("bias", bias, shape)
  bias = jnp.asarray(bias)
  if bias.dtype not in _DTYPES:
    hint = "; a boolean mask is no bias, but an argument of its own" if bias.dtype == bool else ""
    raise ValueError(f"bias must be float32, bfloat16 or float16, got {bias.dtype}{hint}")
  if bias.dtype != dtype:
    bias = bias.astype(np.float32)  # Its gradient comes back in the caller's dtype.
  bias = bias.reshape((1,) * (len(shape) - bias.ndim) + bias.shape)
  # The key axis must be contiguous, even if all keys share one bias.
  return jnp.broadcast_to(bias, (*bias.shape[:-1], shape[-1]))


def check_alibi_slopes(slopes: Any, shapes: tuple[tuple[Any, ...], ...]) -> Any:
  """Checks slopes of one of these shapes, and broadcasts them to the last one; None stays None."""
  if slopes is None:
    return None
  sizes = check_array("alibi_slopes", slopes)
  if sizes not in shapes:
    expected = " or ".join(str(list(shape)) for shape in shapes)
    raise ValueError(f"alibi_slopes must be {expected}, got {list(sizes)}")
  slopes = jnp.asarray(slopes)
  if slopes.dtype not in _DTYPES:
    raise ValueError(f"alibi_slopes must be float32, bfloat16 or float16, got {slopes.dtype}")
  slopes = slopes.astype(np.float32)
  return jnp.broadcast_to(slopes.reshape((1,) * (len(shapes[-1]) - len(sizes)) + sizes), shapes[-1])


def make_config(
  q: Any,
  v: Any,
  *,
  softmax_scale: Any,
  softcap: Any,
  deterministic: Any,
  sm_margin: Any,
  implementation: Any,
  checkpoint_names: Any = None,
  scale_name: str = "softmax_scale",
) -> AttentionConfig:
  """Checks the static arguments. `scale_name` is the caller's name of the scale."""
  scale = q.shape[-1] ** -0.5 if softmax_scale is None else check_number(scale_name, softmax_scale)
  cap = check_number("softcap", softcap)
  if cap < 0.0:
    raise ValueError(f"softcap must be positive, or 0 for none, got {softcap}")
  if cap and not _SMALLEST_SOFTCAP <= cap <= _LARGEST_SOFTCAP:
    raise ValueError(
      f"softcap must be 0 or in [{_SMALLEST_SOFTCAP}, {_LARGEST_SOFTCAP}], got {softcap}"
    )
  sm_margin = check_sm_margin("sm_margin", sm_margin)
  implementation = plain_as(implementation)
  check_implementation(
    implementation, PLAIN, lambda b: b.attention_obstacle(q, v), has_architectures=True
  )
  deterministic = check_flag("deterministic", deterministic)
  names = check_checkpoint_names(checkpoint_names)
  return AttentionConfig(scale, cap, deterministic, sm_margin, implementation, names)


def check_checkpoint_names(names: Any) -> tuple[str, str]:
  """Checks the checkpoint names: a pair for out and lse, one for both, or None for ours."""
  if names is None:
    return CHECKPOINT_NAMES
  both = (names, names) if isinstance(names, str) else names
  is_pair = isinstance(both, (tuple, list)) and len(both) == 2
  if not is_pair or not all(isinstance(name, str) and name for name in both):
    raise ValueError(f"checkpoint_names must be a name, or those of out and lse, got {names!r}")
  return both[0], both[1]


def plain_as(implementation: Any) -> Any:
  """`implementation`, with our name of the plain path for "xla", which `jax.nn` calls it."""
  return PLAIN if isinstance(implementation, str) and implementation == "xla" else implementation


def check_sm_margin(name: str, sm_margin: Any) -> int:
  """Checks the number of SMs to leave free, which must be smaller than the GPU's number of SMs."""
  if isinstance(sm_margin, bool) or not isinstance(sm_margin, (int, np.integer)):
    raise ValueError(f"{name} must be an integer, got {sm_margin!r}")
  if sm_margin < 0:
    raise ValueError(f"{name} must not be negative, got {sm_margin}")
  if sm_margin >= 2**31:
    raise ValueError(f"{name} must fit in 32 bits, got {sm_margin}")
  count = num_multiprocessors() if sm_margin else None
  if count is not None and sm_margin >= count:
    raise ValueError(
      f"{name} must be less than the GPU's {count} streaming multiprocessors, got {sm_margin}"
    )
  return int(sm_margin)
