"""The native kernels as JAX functions. Only this file knows the FFI's target names.

Each op has one target name; each platform registers its handler under it.

    b: batch, or 1 for `slices` shared by the whole batch
    q, dout     [b, q_len, num_q_heads, dim]        lse, delta (backward) [b, num_q_heads, q_len]
    k, v        [b, k_len, num_kv_heads, dim]       lse (forward)         [b, q_len, num_q_heads]
    slices      [b, num_slices, 6]                  sink, max_logits      [b, num_q_heads]

    x, y, dy, dx [b, heads, q_len, k_len]           mask: the same, each may be 1
    offset_probability, dot [b, heads, q_len]       offset [b or 1, heads]
"""

from __future__ import annotations

import functools
import operator
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi import _cpu
from jax_magi._varying import vary_together

try:
  from jax_magi import _cuda
except ImportError:  # Built without nvcc.
  _cuda = None  # type: ignore[assignment]

_FORWARD = "jax_magi_attention_forward"
_BACKWARD = "jax_magi_attention_backward"
_SOFTMAX_FORWARD = "jax_magi_softmax_forward"
_SOFTMAX_BACKWARD = "jax_magi_softmax_backward"

# JAX's lowering platform -> its native kernels' module.
_MODULES: dict[str, Any] = {"cpu": _cpu} | ({"cuda": _cuda} if _cuda else {})

PLATFORMS = tuple(_MODULES)

for _platform, _module in _MODULES.items():
  for _name, _handler in _module.handlers().items():
    # The FFI's own name for the platform that lowering calls "cuda".
    _where = {"cuda": "CUDA"}.get(_platform, _platform)
    jax.ffi.register_ffi_target(_name, _handler, platform=_where)

_MAX_CUDA_HEAD_DIM = 256


def supports(platform: str, q: Any, v: Any) -> bool:
  """Whether the platform's kernels take these operands on the devices that are there."""
  if platform not in PLATFORMS:
    return False
  if platform != "cuda":
    return True
  is_16_bit = q.dtype in (jnp.bfloat16, jnp.float16)
  return is_16_bit and max(q.shape[-1], v.shape[-1]) <= _MAX_CUDA_HEAD_DIM and _has_hopper()


@functools.cache
def _has_hopper() -> bool:
  """False where there are CUDA devices of another generation. Without any, we may be exporting."""
  try:
    devices = jax.devices("cuda")
  except RuntimeError:
    return True
  others = {d.compute_capability for d in devices} - {"9.0"}
  if others:
    warnings.warn(
      f"jax_magi's CUDA kernels are for Hopper GPUs (compute capability 9.0), and there are "
      f"{sorted(others)}: using plain JAX, which is slower",
      stacklevel=2,
    )
  return not others


_SOFTMAX_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def softmax_obstacle(platform: str, x: Any) -> str | None:
  """Why the platform's softmax kernels do not take `x`; None if they do."""
  if x.dtype not in _SOFTMAX_DTYPES:
    return f"the kernels take float32, bfloat16 and float16, not {x.dtype}"
  if platform not in PLATFORMS:
    return "this build of jax_magi has no kernels for it"
  if platform == "cuda":
    if not _has_hopper():
      return "the kernels are for Hopper GPUs (compute capability 9.0)"
    if x.size // max(x.shape[-1], 1) >= 2**31:
      return f"the kernels take fewer than 2**31 rows, not {x.size // x.shape[-1]}"
  return None


def _call(
  name: str,
  operands: tuple[Any, ...],
  results: Any,
  aliases: dict[int, int] | None = None,
  **attributes: Any,
) -> Any:
  # Results vary over the mesh axes of the operands; a bare ShapeDtypeStruct would claim that they
  # are replicated.
  operands = vary_together(*operands)
  like = jax.typeof(operands[0])
  types = [
    like.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False) for shape, dtype in results
  ]
  return jax.ffi.ffi_call(name, types, input_output_aliases=aliases)(*operands, **attributes)


def make_plan(
  q, k, v, slices, *, softcap: float, static_slices: bytes | None, is_backward: bool
) -> np.ndarray:
  """What a CUDA kernel derives from a mask that is known when the call is traced.

  `static_slices` are the values of `slices`, of one list. The plan serves any batch that shares it,
  and any number of kv heads. Without one (empty), the device makes it in each call.
  """
  if static_slices is None or slices.shape[0] != 1:
    return np.zeros(0, np.int32)
  options: dict[str, Any] = {"softcap": softcap, "is_backward": is_backward}
  return np.frombuffer(_cuda_needs(q, k, v, slices, **options, values=static_slices)[2], np.int32)


def _cuda_needs(
  q, k, v, slices, *, softcap: float, is_backward: bool, values: bytes | None, deterministic=False
) -> tuple[int, int, bytes]:
  shapes = (q.shape, k.shape, v.shape[-1], slices.shape)
  is_bf16 = q.dtype == jnp.bfloat16
  return _cuda.needs(*shapes, is_bf16, softcap != 0.0, is_backward, deterministic, values)


def attention_forward(
  q,
  k,
  v,
  slices,
  sink,
  plan,
  *,
  platform: str,
  softmax_scale: float,
  softcap: float,
  sm_margin: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns out, lse, max_logits."""
  batch, q_len, num_q_heads, _ = q.shape
  num_bytes = 0
  if platform == "cuda":
    options: dict[str, Any] = {"softcap": softcap, "is_backward": False}
    num_bytes = _cuda_needs(q, k, v, slices, **options, values=None)[0]
  out, lse, max_logits, _ = _call(
    _FORWARD,
    (q, k, v, slices, sink, plan),
    [
      ((batch, q_len, num_q_heads, v.shape[-1]), q.dtype),
      ((batch, q_len, num_q_heads), np.float32),
      ((batch, num_q_heads), np.float32),
      ((num_bytes,), np.uint8),  # Workspace.
    ],
    # Attributes are typed strictly.
    softmax_scale=np.float32(softmax_scale),
    softcap=np.float32(softcap),
    sm_margin=np.int32(sm_margin),
  )
  return out, lse, max_logits


def attention_backward(
  q,
  k,
  v,
  dout,
  lse,
  delta,
  slices,
  plan,
  *,
  platform: str,
  softmax_scale: float,
  softcap: float,
  deterministic: bool,
  sm_margin: int,
  dkv_dtype: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns dq in q's dtype, dk and dv in `dkv_dtype`."""
  num_bytes, num_splits = 0, 1
  if platform == "cuda":
    options: dict[str, Any] = {
      "softcap": softcap,
      "is_backward": True,
      "deterministic": deterministic,
    }
    num_bytes, num_splits, _ = _cuda_needs(q, k, v, slices, **options, values=None)
    # As the CUDA kernels read it: -lse, in units of scores or of exponents of 2, and no probability
    # for rows that see nothing.
    factor = -1 / softmax_scale if deterministic and not softcap else -np.log2(np.e)
    lse = jnp.where(lse == -jnp.inf, -jnp.inf, lse * np.float32(factor))
  is_dq_summed = platform == "cpu" or not deterministic  # In memory, and so in float32.
  part_dtype = dkv_dtype if num_splits == 1 else np.float32
  dq, *parts, _ = _call(
    _BACKWARD,
    (q, k, v, dout, lse, delta, slices, plan),
    [
      (q.shape, np.float32 if is_dq_summed else q.dtype),
      ((num_splits * k.shape[0], *k.shape[1:]), part_dtype),
      ((num_splits * v.shape[0], *v.shape[1:]), part_dtype),
      ((num_bytes,), np.uint8),  # Workspace.
    ],
    softmax_scale=np.float32(softmax_scale),
    softcap=np.float32(softcap),
    deterministic=bool(deterministic),
    sm_margin=np.int32(sm_margin),
  )
  if num_splits > 1:
    # One after the other: XLA would choose the order of a sum anew for each program.
    sums = (functools.reduce(operator.add, jnp.split(x, num_splits)) for x in parts)
    parts = [x.astype(dkv_dtype) for x in sums]
  dk, dv = parts
  if platform == "cuda" and is_dq_summed:
    dq *= np.float32(softmax_scale)  # Left to whatever reads dq next.
  return dq.astype(q.dtype), dk, dv


def _band(lo: int, hi: int) -> dict[str, np.int32]:
  return {"lo": np.int32(lo), "hi": np.int32(hi)}


def softmax_forward(
  x, mask, offset, *, scale: float, lo: int, hi: int, donate: bool
) -> tuple[jax.Array, jax.Array | None]:
  """Returns y, and the offset's probability in each row. `mask` and `offset` may be None."""
  rows = x.shape[:-1] if offset is not None else (0,)
  y, offset_probability = _call(
    _SOFTMAX_FORWARD,
    (
      x,
      # Made by an operation: custom_partitioning takes no constants.
      jnp.zeros((0, 0, 0, 0), bool) if mask is None else mask,
      jnp.zeros((0, 0), np.float32) if offset is None else offset,
    ),
    [(x.shape, x.dtype), (rows, np.float32)],
    aliases={0: 0} if donate else None,
    scale=np.float32(scale),
    **_band(lo, hi),
  )
  return y, None if offset is None else offset_probability


def softmax_backward(
  y, dy, *, scale: float, lo: int, hi: int, donate: bool, with_dot: bool
) -> tuple[jax.Array, jax.Array | None]:
  """Returns dx, and each row's sum of y * dy if asked for."""
  dx, dot = _call(
    _SOFTMAX_BACKWARD,
    (y, dy),
    [(y.shape, y.dtype), (y.shape[:-1] if with_dot else (0,), np.float32)],
    aliases={1: 0} if donate else None,
    scale=np.float32(scale),
    **_band(lo, hi),
  )
  return dx, dot if with_dot else None
