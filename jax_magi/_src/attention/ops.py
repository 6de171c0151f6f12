"""Attention over a batch: forward, backward, delta, and the differentiable op that uses them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from jax_magi._src.attention import blockwise
from jax_magi._src.attention.kernel_call import (
  OPERANDS,
  PLAIN,
  SHARED,
  SOURCES,
  TERMS,
  AttentionConfig,
  KernelCall,
  given_terms,
  natives,
)
from jax_magi._src.attention.mask_operand import MaskGroup, MaskOperand
from jax_magi._src.native import attention as native
from jax_magi._src.transforms.explicit import spec_of, with_auto_axes
from jax_magi._src.transforms.operation import Operands, Operation, Results
from jax_magi._src.transforms.varying import vary_like, vary_together

# Operands that hold results of earlier calls over other keys.
_RUNNING = ("running_out", "running_lse", "running_max_logits")


def attention(
  config: AttentionConfig,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  slices: Any,
  sink: jax.Array,
  **terms: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`forward` with gradients, for any softmax_scale and mesh axes of any type.

  Slices may be numpy. out and lse are differentiable with respect to all operands except slices.
  """
  q, config = config.with_positive_scale(q)
  mask = MaskOperand.of_call(slices, q, k, v)
  # Before the custom derivative, so that the gradient of a replicated operand is summed.
  leaves, treedef = jax.tree.flatten((q, k, v, mask, sink, given_terms(terms)))
  operands = jax.tree.unflatten(treedef, vary_together(*leaves))
  out, lse, max_logits = _attention(config, *operands)
  return out, lse, lax.stop_gradient(max_logits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
  config: AttentionConfig,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: MaskOperand,
  sink: jax.Array,
  terms: Operands,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`terms` are the optional operands that are not None, by name."""
  return _forward_on_mesh(config, None, q, k, v, mask, sink, terms)


def _forward_on_mesh(
  config: AttentionConfig, out_dtype: Any, *operands: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`forward` for operands that may be on Explicit axes."""

  def fun(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: MaskOperand, sink: jax.Array, terms: Operands
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    return forward(config, q, k, v, mask, sink, **terms, out_dtype=out_dtype)

  def out_specs() -> tuple[P, ...]:
    batch, _, heads, _ = spec_of(*operands[:3])
    return P(batch, None, heads, None), P(batch, None, heads), P(batch, heads)

  return with_auto_axes(fun, operands, out_specs)(*operands)


def _attention_fwd(
  config: AttentionConfig, *operands: Any
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[Any, ...]]:
  terms = operands[-1]
  # The terms whose gradients are requested. Others are not computed. Dictionary keys are static.
  wanted: dict[str, tuple[()]] = {name: () for name, x in terms.items() if x.perturbed}
  q, k, v, mask, sink, terms = jax.tree.map(lambda x: x.value, operands)
  # The gradient of slopes multiplies an error of delta by the distance between a query and the keys
  # that matter to it. Delta is therefore computed from an `out` that is not rounded.
  needs_float32 = "alibi_slopes" in wanted and q.dtype.itemsize < 4
  out_dtype = np.float32 if needs_float32 else None
  out, lse, max_logits = _forward_on_mesh(config, out_dtype, q, k, v, mask, sink, terms)
  # Named before both uses, so that a policy that keeps them keeps what the caller sees.
  out, lse = map(checkpoint_name, (out, lse), config.checkpoint_names)
  residuals = (q, k, v, mask, sink, terms, wanted, out, lse)
  return (out.astype(q.dtype), lse, max_logits), residuals


def _attention_bwd(
  config: AttentionConfig, residuals: tuple[Any, ...], cotangents: tuple[Any, ...]
) -> tuple[Any, ...]:
  q, k, v, mask, sink, terms, wanted, out, lse = residuals
  dout, dlse, _ = map(_instantiated, cotangents, (out, lse, lse))
  mask = mask.for_backward()
  wants = tuple(name for name in TERMS if name in wanted)

  def fun(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: MaskOperand,
    sink: jax.Array,
    terms: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
  ) -> Results:
    row_delta = delta(out, lse, dout, dlse)
    dsink = -jnp.sum(sink_probability(sink, lse) * row_delta, axis=1)
    gradients = backward(config, q, k, v, dout, lse, row_delta, mask, **terms, wants=wants)
    return (dsink, *gradients)

  def out_specs() -> tuple[P, ...]:
    return tuple(map(spec_of, (sink, q, k, v, *(terms[name] for name in wants))))

  operands = (q, k, v, mask, sink, terms, out, lse, dout, dlse)
  dsink, dq, dk, dv, *dterms = with_auto_axes(fun, operands, out_specs)(*operands)
  gradients = dict(zip(wants, dterms, strict=True))
  return dq, dk, dv, None, dsink, {name: gradients.get(name) for name in terms}


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


def _instantiated(cotangent: Any, like: jax.Array) -> Any:
  """A gradient as an array, also if JAX represents it as a symbolic zero."""
  if not isinstance(cotangent, SymbolicZero):
    return cotangent
  return vary_like(jnp.zeros(cotangent.shape, cotangent.dtype), like)


def forward(
  config: AttentionConfig,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  slices: MaskOperand | jax.Array,
  sink: jax.Array,
  *,
  out_dtype: Any = None,
  running: tuple[Any, Any, Any] | None = None,
  **terms: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Attention over a batch.

  Args:
    config: see `AttentionConfig`.
    q: `[batch, q_len, num_q_heads, head_dim]`.
    k: `[batch, k_len, num_kv_heads, head_dim]`.
    v: `[batch, k_len, num_kv_heads, value_dim]`.
    slices: int32 `[batch or 1, num_slices, 6]`, or a `MaskOperand` of them.
    sink: float32 `[batch, num_q_heads]`, one more logit in the softmax of each row; -inf for none.
    out_dtype: float32 for an `out` that later calls merge before it is rounded. None means the
      dtype of q.
    running: the results of earlier calls over other keys. This call reuses their memory if nothing
      else needs it, and query tiles that see none of its keys cost nothing. With a float32 `out`,
      results are merged; omit `out_dtype` in the last call, which rounds them; and only the first
      call uses the sink. With a 16-bit `out`, each query must see keys in only one of the calls.
      That call computes the query, with the sink, and the other calls leave it unchanged. Terms are
      not supported together with `running`.
    **terms: terms by their names in `TERMS`. None means no term.

  Returns:
    out `[batch, q_len, num_q_heads, value_dim]`, lse `[batch, q_len, num_q_heads]` and max_logits
    `[batch, num_q_heads]`.
  """
  dtype = q.dtype if out_dtype is None else np.dtype(out_dtype)
  mask = MaskOperand.of(slices)
  is_first = mask.group is not None and mask.group.index == 0
  assert running is not None or is_first or not mask.keeps_rows, "there are no results to keep"
  operands = {"q": q, "k": k, "v": v, **mask.operands(), "sink": sink} | given_terms(terms)
  if running is not None:
    assert operands.keys().isdisjoint(TERMS), "terms and running results are not taken together"
    assert running[0].dtype in (np.float32, dtype), running[0].dtype
    assert not mask.keeps_rows or running[0].dtype == dtype, "all rows are rounded"
    operands |= dict(zip(_RUNNING, running, strict=True))
  out, lse, max_logits = _forward(config, mask.known, mask.group, dtype)(operands)
  return out, lse, max_logits


def delta(out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array) -> jax.Array:
  """delta = rowsum(dout * out) - dlse, float32 `[batch, q_len, num_q_heads]`, for `backward`.

  With P = softmax(S), dS = P * (dP - rowsum(dout * out)), to which the gradient of lse adds
  P * dlse. So dS = P * (dP - delta).
  """
  # A fully masked row has no gradient, whatever the caller computed from its lse. The condition is
  # inside the sum, so that XLA compiles one kernel for all this if lse has no gradient.
  is_seeing = lse != -jnp.inf
  products = out.astype(np.float32) * dout.astype(np.float32)
  row_sum = jnp.sum(jnp.where(is_seeing[..., None], products, 0.0), axis=-1)
  return row_sum - jnp.where(is_seeing, dlse, 0.0)


def backward(
  config: AttentionConfig,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  dout: jax.Array,
  lse: jax.Array,
  delta: jax.Array,
  slices: MaskOperand | jax.Array,
  *,
  wants: tuple[str, ...] = (),
  grad_dtype: Any = None,
  running_dq: jax.Array | None = None,
  **terms: jax.Array | None,
) -> Results:
  """The gradients of `forward`. The statistics may cover more keys than this call.

  Args:
    config: see `AttentionConfig`.
    q: `[batch, q_len, num_q_heads, head_dim]`.
    k: `[batch, k_len, num_kv_heads, head_dim]`.
    v: `[batch, k_len, num_kv_heads, value_dim]`.
    dout: `[batch, q_len, num_q_heads, value_dim]`, the gradient of out, in the dtype of q.
    lse: float32 `[batch, q_len, num_q_heads]`, over all keys, of which k and v may be a part.
    delta: float32 `[batch, q_len, num_q_heads]`, as `delta` returns it, over all keys.
    slices: int32 `[batch or 1, num_slices, 6]`, or a `MaskOperand` of them.
    wants: the names in `TERMS` whose gradients are requested, in their order.
    grad_dtype: float32 for gradients that are summed before they are rounded. None means the dtype
      of q.
    running_dq: a sum of dq over calls with other keys of the same queries, made by `empty_dq_sum`
      and read by `finished_dq` (dq_sum.py). Terms are not supported together with it.
    **terms: as in `forward`.

  Returns:
    dq, dk, dv, and the requested gradients, each like its operand. With `running_dq`, the first
    result is the new sum, in the memory of the old one if nothing else needs it.
  """
  dtype = q.dtype if grad_dtype is None else np.dtype(grad_dtype)
  mask = MaskOperand.of(slices)
  operands = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta}
  operands |= mask.operands() | given_terms(terms)
  if running_dq is not None:
    assert operands.keys().isdisjoint(TERMS), "terms and a running dq are not taken together"
    operands["running_dq"] = running_dq
  sums_dq = running_dq is not None
  return _backward(config, mask.known, mask.group, dtype, wants, sums_dq)(operands)


def sink_probability(sink: jax.Array, lse: jax.Array) -> jax.Array:
  """The probability of the sink in each row's softmax, `[batch, q_len, num_q_heads]`."""
  sink = sink[:, None, :]
  has_sink = sink != -jnp.inf
  # No intermediate value is NaN or infinite, which jax_debug_nans and jax_debug_infs would report.
  lse = jnp.where(lse == -jnp.inf, 0.0, lse)
  return jnp.where(has_sink, jnp.exp(jnp.where(has_sink, sink, lse) - lse), 0.0)


# --- The two operations ---

# Bounded: each known mask adds an entry.
_cache = functools.lru_cache(maxsize=256)


@_cache
def _forward(
  config: AttentionConfig, known: bytes | None, group: MaskGroup | None, out_dtype: Any
) -> Callable[[Operands], Results]:
  options: dict[str, Any] = {
    "softmax_scale": config.softmax_scale,
    "softcap": config.softcap,
    "out_dtype": out_dtype,
  }
  kernel = functools.partial(native.forward, **options, sm_margin=config.sm_margin)
  return Operation(
    operands=OPERANDS,
    results={"out": "bqhe", "lse": "bqh", "max_logits": "bh"},
    natives=functools.partial(natives, KernelCall(config, known, group, kernel)),
    plain=functools.partial(blockwise.forward, **options),
    plain_name=PLAIN,
    implementation=config.implementation,
    shared=SHARED,
    sources=SOURCES,
  ).function()


@_cache
def _backward(
  config: AttentionConfig,
  known: bytes | None,
  group: MaskGroup | None,
  grad_dtype: Any,
  wants: tuple[str, ...],
  sums_dq: bool,
) -> Callable[[Operands], Results]:
  options: dict[str, Any] = {
    "softmax_scale": config.softmax_scale,
    "softcap": config.softcap,
    "grad_dtype": grad_dtype,
    "wants": wants,
  }
  kernel = functools.partial(
    native.backward,
    **options,
    deterministic=config.deterministic,
    sm_margin=config.sm_margin,
    known=known,
  )
  has_float_grads = grad_dtype == np.float32
  call = KernelCall(
    config, known, group, kernel, wants, is_backward=True, has_float_grads=has_float_grads
  )
  # Each result is like an operand.
  like = {"dq": "running_dq" if sums_dq else "q", "dk": "k", "dv": "v"}
  gradients = {f"d{name}": name for name in wants}
  return Operation(
    operands=OPERANDS,
    results={name: OPERANDS[operand] for name, operand in (like | gradients).items()},
    natives=functools.partial(natives, call),
    plain=functools.partial(blockwise.backward, **options),
    plain_name=PLAIN,
    implementation=config.implementation,
    # Each mapped element has its own gradient, so these operands must not be shared.
    shared=SHARED.difference(wants),
    sources=SOURCES,
    gradients=gradients,
  ).function()
