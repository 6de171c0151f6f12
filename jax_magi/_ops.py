"""Attention as a differentiable JAX op over a batch: the layer between checks and kernels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_magi import _blockwise, _ffi
from jax_magi._dispatch import by_platform, fold_batch
from jax_magi._sharding import keep_batch_and_heads
from jax_magi._slices import grouped_by_keys

# Names of the saved residuals, for `jax.checkpoint` policies.
CHECKPOINT_NAMES = ("jax_magi_out", "jax_magi_lse")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
  """What is static about a call."""

  softmax_scale: float
  softcap: float
  deterministic: bool
  sm_margin: int
  implementation: str | None
  # The mask's slices, `[num_slices, 6]` as bytes, where they are known when the call is traced.
  static_slices: bytes | None = dataclasses.field(default=None, repr=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(config: AttentionConfig, q, k, v, slices, sink):
  """Attention over a batch.

  Args:
    config: see `AttentionConfig`.
    q: `[batch, q_len, num_q_heads, head_dim]`.
    k: `[batch, k_len, num_kv_heads, head_dim]`.
    v: `[batch, k_len, num_kv_heads, value_dim]`.
    slices: int32 `[batch or 1, num_slices, 6]`.
    sink: float32 `[batch, num_q_heads]`, one more logit in each row's softmax; -inf is none.

  Returns:
    out `[batch, q_len, num_q_heads, value_dim]`, lse `[batch, q_len, num_q_heads]` and max_logits
    `[batch, num_q_heads]`; the latter has no gradient.
  """
  return _forward(config)(q, k, v, slices, sink)


def _attention_fwd(config, q, k, v, slices, sink):
  out, lse, max_logits = _forward(config)(q, k, v, slices, sink)
  # Named before both uses, so that a policy that keeps them keeps what the caller sees.
  out, lse = map(checkpoint_name, (out, lse), CHECKPOINT_NAMES)
  return (out, lse, max_logits), (q, k, v, slices, sink, out, lse)


def _attention_bwd(config, residuals, cotangents):
  q, k, v, slices, sink, out, lse = residuals
  dout, dlse, _ = cotangents
  # With P = softmax(S), dS = P * (dP - delta); the gradient of lse adds P * dlse.
  delta = jnp.sum(out.astype(np.float32) * dout.astype(np.float32), axis=-1) - dlse
  # A row that sees nothing has no gradient, whatever the caller made of its lse.
  sees_nothing = lse == -jnp.inf
  delta = jnp.where(sees_nothing, 0.0, delta)
  sink_probability = jnp.where(sees_nothing, 0.0, jnp.exp(sink[:, None, :] - lse))
  dsink = -jnp.sum(sink_probability * delta, axis=1)
  rows_last = (0, 2, 1)
  config, slices = _grouped_by_keys(config, slices)
  dq, dk, dv = _backward(config, k.dtype)(
    q, k, v, dout, lse.transpose(rows_last), delta.transpose(rows_last), slices
  )
  return dq, dk, dv, None, dsink


attention.defvjp(_attention_fwd, _attention_bwd)


def _grouped_by_keys(config: AttentionConfig, slices):
  """The backward kernels walk keys, but for a deterministic dq: then slices as they are."""
  if config.static_slices is None or config.deterministic or slices.shape[0] != 1:
    return config, slices
  known = np.frombuffer(config.static_slices, np.int32).reshape(-1, 6)
  grouped = grouped_by_keys(known)
  if grouped is known:
    return config, slices
  return dataclasses.replace(config, static_slices=grouped.tobytes()), jnp.asarray(grouped)[None]


# --- The two kernel calls, each usable under vmap and jit with shardings ---


# Bounded, as each concrete mask has a config of its own.
_cache = functools.lru_cache(maxsize=256)


@_cache
def _forward(config: AttentionConfig) -> Callable:
  math: dict[str, Any] = {"softmax_scale": config.softmax_scale, "softcap": config.softcap}
  native = functools.partial(_ffi.attention_forward, **math, sm_margin=config.sm_margin)
  dims = ["bqhd", "bkgd", "bkge", "bnc", "bh"], ["bqhe", "bqh", "bh"]
  return fold_batch(
    by_platform(
      config.implementation,
      _supports,
      natives=_natives(config, native, dims, slices_index=3, is_backward=False),
      plain=functools.partial(_blockwise.attention_forward, **math),
    ),
    shared=(3,),
  )


@_cache
def _backward(config: AttentionConfig, dkv_dtype: Any) -> Callable:
  math: dict[str, Any] = {
    "softmax_scale": config.softmax_scale,
    "softcap": config.softcap,
    "dkv_dtype": dkv_dtype,
  }
  native = functools.partial(
    _ffi.attention_backward,
    **math,
    deterministic=config.deterministic,
    sm_margin=config.sm_margin,
  )
  dims = ["bqhd", "bkgd", "bkge", "bqhe", "bhq", "bhq", "bnc"], ["bqhd", "bkgd", "bkge"]
  return fold_batch(
    by_platform(
      config.implementation,
      _supports,
      natives=_natives(config, native, dims, slices_index=6, is_backward=True),
      plain=functools.partial(_blockwise.attention_backward, **math),
    ),
    shared=(6,),
  )


def _supports(platform: str, q: Any, _, v: Any, *rest: Any) -> bool:
  return _ffi.supports(platform, q, v)


def _natives(
  config: AttentionConfig,
  native: Callable,
  dims: tuple[list[str], list[str]],
  *,
  slices_index: int,
  is_backward: bool,
) -> dict[str, Callable]:
  """The native kernels by platform. `dims` name the dimensions of operands and results."""
  operands, results = dims
  operands = [*operands, "p"]  # The plan is one for all.
  on_cpu = keep_batch_and_heads(functools.partial(native, platform="cpu"), operands, results)
  on_cuda = keep_batch_and_heads(
    functools.partial(_with_padded_dims, functools.partial(native, platform="cuda"), dims),
    operands,
    results,
  )

  def cpu(*operands):
    return on_cpu(*operands, np.zeros(0, np.int32))

  def cuda(q, k, v, *rest):
    is_planned = not (is_backward and config.deterministic)
    plan = _ffi.make_plan(
      q,
      k,
      v,
      (q, k, v, *rest)[slices_index],
      softcap=config.softcap,
      static_slices=config.static_slices if is_planned else None,
      is_backward=is_backward,
    )
    return on_cuda(q, k, v, *rest, plan)

  return {"cpu": cpu, "cuda": cuda}


def _with_padded_dims(native: Callable, dims: tuple[list[str], list[str]], *operands):
  """For kernels that read rows in units of 16 bytes: pads head dims to multiples of 8."""
  sizes = {"d": operands[0].shape[-1], "e": operands[2].shape[-1]}
  *named, plan = operands
  padded = [
    jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 8)]) if letters[-1] in sizes else x
    for letters, x in zip(dims[0], named, strict=True)
  ]
  return [
    x[..., : sizes[letters[-1]]] if letters[-1] in sizes else x
    for letters, x in zip(dims[1], native(*padded, plan), strict=True)
  ]
