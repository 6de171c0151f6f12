"""Attention in plain JAX, block by block. Runs on any platform, in the memory of one block.

Operands and results are those of the native kernels.

Queries, keys and values that are in no visible pair are never used, so NaN in them has no effect.
NaN in a token that is visible to some queries reaches other queries of its block, as 0 * NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_magi._src.attention.block_terms import Terms
from jax_magi._src.masks.slices import clamped, shown_keys, shown_queries, touches, visible
from jax_magi._src.transforms.varying import vary_like, vary_together

# Large enough to keep matrix units busy, small enough that a block of scores fits in cache.
_BLOCK = 512


def forward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  slices: jax.Array,
  sink: jax.Array,
  running_out: jax.Array | None = None,
  running_lse: jax.Array | None = None,
  running_max_logits: jax.Array | None = None,
  *,
  softmax_scale: float,
  softcap: float,
  out_dtype: Any,
  **terms: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns out in `out_dtype`, lse and max_logits, merged with running results if given."""
  slices = clamped(slices, q.shape[1], k.shape[1])

  def one(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slices: jax.Array,
    sink: jax.Array,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    max_logits: jax.Array | None = None,
    **terms: jax.Array,
  ) -> Any:
    q, k, v = _only_shown(slices, [q], [k, v])
    if out is None or lse is None or max_logits is None:
      # Each row starts with the sink, whose value vector is 0.
      lse = jnp.broadcast_to(sink[None], q.shape[:2])
      out = vary_like(jnp.zeros((*q.shape[:2], v.shape[2]), np.float32), q)
      max_logits = vary_like(jnp.full(sink.shape, -jnp.inf, np.float32), q)
    running = (out, lse, max_logits)
    of_row = Terms(v.shape[1], **terms)
    return _forward(q, k, v, slices, running, of_row, softmax_scale, softcap, out_dtype)

  operands: dict[str, Any] = {"q": q, "k": k, "v": v, "slices": slices, "sink": sink, **terms}
  operands |= {"out": running_out, "lse": running_lse, "max_logits": running_max_logits}
  out, lse, max_logits = _over_batch(one, operands)
  return out, lse, max_logits


def backward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  dout: jax.Array,
  lse: jax.Array,
  delta: jax.Array,
  slices: jax.Array,
  running_dq: jax.Array | None = None,
  *,
  softmax_scale: float,
  softcap: float,
  grad_dtype: Any,
  wants: tuple[str, ...] = (),
  **terms: jax.Array,
) -> tuple[jax.Array, ...]:
  """Returns dq, dk and dv in `grad_dtype`, and the gradients that `wants` names, like the kernels.

  With `running_dq`, the first result is that sum of dq plus the dq of this call.
  """
  slices = clamped(slices, q.shape[1], k.shape[1])

  def one(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    slices: jax.Array,
    **terms: jax.Array,
  ) -> Any:
    q, dout, k, v = _only_shown(slices, [q, dout], [k, v])
    of_row = Terms(v.shape[1], **terms)
    return _backward(q, k, v, dout, lse, delta, slices, of_row, softmax_scale, softcap, wants)

  operands: dict[str, Any] = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta}
  operands |= {"slices": slices, **terms}
  is_sum = "bias" in wants and terms["bias"].shape[0] == 1 and q.shape[0] != 1
  results = (_over_batch_summed if is_sum else _over_batch)(one, operands)
  (dq, *gradients), dterms = results[0], dict(results[1])
  if running_dq is not None:
    size = q.shape[1] * q.shape[3]
    dq = running_dq.at[:, :, :size].add(jnp.moveaxis(dq, 1, 2).reshape(*running_dq.shape[:2], size))
  else:
    dq = (dq * np.float32(softmax_scale)).astype(grad_dtype)
  if "bias" in wants:
    dterms["bias"] = dterms["bias"].astype(terms["bias"].dtype)
  return (dq, *(x.astype(grad_dtype) for x in gradients), *(dterms[name] for name in wants))


def finish_dq(
  dq_sum: jax.Array, *, q_len: int, head_dim: int, softmax_scale: float, dtype: Any
) -> tuple[jax.Array]:
  """dq `[batch, q_len, num_q_heads, head_dim]` from its sum over several calls of `backward`."""
  dq = dq_sum[:, :, : q_len * head_dim].reshape(*dq_sum.shape[:2], q_len, head_dim)
  return ((jnp.moveaxis(dq, 2, 1) * np.float32(softmax_scale)).astype(dtype),)


def _parted(operands: dict[str, Any]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
  """Divides operands into those that the batch shares, without batch axis, and all others.

  If slices are shared, the condition that skips a block stays a branch under vmap.
  """
  operands = {name: x for name, x in operands.items() if x is not None}
  operands = dict(zip(operands, vary_together(*operands.values()), strict=True))
  is_shared = {name: name in ("slices", "bias") and x.shape[0] == 1 for name, x in operands.items()}
  shared = {name: x[0] for name, x in operands.items() if is_shared[name]}
  return shared, {name: x for name, x in operands.items() if not is_shared[name]}


def _over_batch(fun: Callable[..., Any], operands: dict[str, Any]) -> Any:
  """Applies vmap over the leading axis of the operands that the batch does not share.

  A single row needs no vmap. Tracing then takes half the time, and a `cond` remains a branch.
  """
  shared, own = _parted(operands)
  if own["q"].shape[0] != 1:
    return jax.vmap(lambda own: fun(**shared, **own))(own)
  results = fun(**shared, **{name: lax.squeeze(x, (0,)) for name, x in own.items()})
  return jax.tree.map(lambda x: lax.expand_dims(x, (0,)), results)


def _over_batch_summed(fun: Callable[..., Any], operands: dict[str, Any]) -> Any:
  """Processes one batch row after another, so that only one bias gradient is in memory."""
  shared, own = _parted(operands)

  def step(dbias: jax.Array, own: dict[str, jax.Array]) -> Any:
    gradients, dterms = fun(**shared, **own)
    return dbias + dterms.pop("bias")[None], (gradients, dterms)

  start = vary_like(jnp.zeros((1, *shared["bias"].shape), np.float32), own["q"])
  dbias, (gradients, dterms) = lax.scan(step, start, own)
  return gradients, {**dterms, "bias": dbias}


def _only_shown(
  slices: jax.Array, of_queries: list[jax.Array], of_keys: list[jax.Array]
) -> list[jax.Array]:
  """The arrays `[length, heads, dim]`, with zeros for tokens that are in no visible pair."""
  is_query = shown_queries(slices, of_queries[0].shape[0])[:, None, None]
  is_key = shown_keys(slices, of_keys[0].shape[0])[:, None, None]
  pairs = [(is_query, x) for x in of_queries] + [(is_key, x) for x in of_keys]
  return [jnp.where(is_shown, x, 0.0) for is_shown, x in pairs]


def _precision(dtype: Any) -> Any:
  """The precision of products: float32 inputs are not rounded, even if the hardware prefers it."""
  return lax.Precision.HIGHEST if dtype == np.float32 else None


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """A matrix product with both operands in the narrower dtype of the two, summed in float32."""
  dtype = min(a.dtype, b.dtype, key=lambda d: d.itemsize)
  return jnp.einsum(
    spec,
    a.astype(dtype),
    b.astype(dtype),
    precision=_precision(dtype),
    preferred_element_type=np.float32,
  )


def _blocks(x: jax.Array) -> jax.Array:
  """Splits the first axis into (num_blocks, block), padding with zeros."""
  length = x.shape[0]
  block = min(_BLOCK, max(length, 1))
  x = jnp.pad(x, [(0, -length % block)] + [(0, 0)] * (x.ndim - 1))
  return x.reshape(x.shape[0] // block, block, *x.shape[1:])


def _unblock(x: jax.Array, length: int) -> jax.Array:
  """Undoes `_blocks`."""
  return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])[:length]


def _group_heads(x: jax.Array, num_kv_heads: int) -> jax.Array:
  """[length, num_q_heads, ...] -> [length, num_kv_heads, group, ...]."""
  return x.reshape(x.shape[0], num_kv_heads, x.shape[1] // max(num_kv_heads, 1), *x.shape[2:])


def _begins(blocks: jax.Array) -> jax.Array:
  # Varying like the blocks: in JAX's vmap of a cond with a mapped predicate, operands must match.
  return vary_like(jnp.arange(blocks.shape[0], dtype=np.int32) * blocks.shape[1], blocks)


def _block_mask(
  slices: jax.Array, q_begin: jax.Array, k_begin: jax.Array, num_rows: int, num_keys: int
) -> jax.Array:
  """The mask of a block, bool `[1, 1, num_rows, num_keys]`."""
  rows, keys = (jnp.arange(n, dtype=np.int32) for n in (num_rows, num_keys))
  return visible(slices, q_begin + rows, k_begin + keys)[None, None]


def _cap(logits: jax.Array, softcap: float) -> jax.Array:
  return softcap * jnp.tanh(logits / softcap) if softcap else logits


def _forward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  slices: jax.Array,
  running: tuple[jax.Array, jax.Array, jax.Array],
  terms: Terms,
  softmax_scale: float,
  softcap: float,
  out_dtype: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`running` acts like one more key, whose logit is its lse and whose value is its output."""
  q_len, num_q_heads, _ = q.shape
  num_kv_heads, value_dim = v.shape[1], v.shape[2]
  q_blocks = _blocks(_group_heads(q, num_kv_heads))
  k_blocks, v_blocks = _blocks(k), _blocks(v)
  num_rows, num_keys = q_blocks.shape[1], k_blocks.shape[1]
  heads = (num_kv_heads, num_q_heads // max(num_kv_heads, 1))
  # A block of it is [*heads, rows] and [*heads, rows, value_dim], like the sums.
  running_out, running_lse = (
    jnp.moveaxis(_blocks(_group_heads(x, num_kv_heads)), 1, 3) for x in running[:2]
  )
  block_terms = terms.in_blocks(num_rows, num_keys)

  def q_block(args: Any) -> Any:
    q_begin, q, out, lse = args

    def k_block(carry: Any, args: Any) -> Any:
      k_begin, k, v = args

      def visit(carry: Any) -> Any:
        row_max, row_sum, acc, max_logits = carry
        logits = softmax_scale * _einsum("qhgd,khd->hgqk", q, k)
        mask = _block_mask(slices, q_begin, k_begin, num_rows, num_keys)
        logits, mask = block_terms.added(logits, mask, q_begin, k_begin)
        logits = jnp.where(mask, logits, -jnp.inf)
        max_logits = jnp.maximum(max_logits, logits.max(axis=(-2, -1)))
        logits = jnp.where(mask, _cap(logits, softcap), -jnp.inf)
        new_max = jnp.maximum(row_max, logits.max(axis=-1))
        # If a row has seen nothing, subtract 0: -inf - -inf would be NaN.
        reference = jnp.where(new_max == -jnp.inf, 0.0, new_max)
        correction = jnp.exp(row_max - reference)
        p = jnp.exp(logits - reference[..., None])
        acc = acc * correction[..., None] + _einsum("hgqk,khd->hgqd", p, v)
        return new_max, row_sum * correction + p.sum(axis=-1), acc, max_logits

      hit = touches(slices, q_begin, q_begin + num_rows, k_begin, k_begin + num_keys)
      return lax.cond(hit, visit, lambda carry: carry, carry), None

    start = (
      lse,
      (lse != -jnp.inf).astype(np.float32),
      out.astype(np.float32),
      vary_like(jnp.full(heads, -jnp.inf, np.float32), q),
    )
    xs = (_begins(k_blocks), k_blocks, v_blocks)
    (row_max, row_sum, acc, max_logits), _ = lax.scan(k_block, start, xs)
    empty = row_sum == 0.0
    out = acc / jnp.where(empty, 1.0, row_sum)[..., None]
    lse = jnp.where(empty, -jnp.inf, row_max + jnp.log(jnp.where(empty, 1.0, row_sum)))
    return jnp.moveaxis(out, 2, 0).astype(out_dtype), jnp.moveaxis(lse, 2, 0), max_logits

  xs = (_begins(q_blocks), q_blocks, running_out, running_lse)
  out, lse, max_logits = lax.map(q_block, xs)
  lse = _unblock(lse, q_len).reshape(q_len, num_q_heads)
  max_logits = max_logits.max(axis=0, initial=-jnp.inf).reshape(num_q_heads)
  max_logits = jnp.maximum(max_logits, running[2])
  # XLA's maximum may drop NaN. A NaN logit must not look like a healthy head.
  max_logits = jnp.where(jnp.isnan(lse).any(axis=0), jnp.nan, max_logits)
  return _unblock(out, q_len).reshape(q_len, num_q_heads, value_dim), lse, max_logits


def _backward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  dout: jax.Array,
  lse: jax.Array,
  delta: jax.Array,
  slices: jax.Array,
  terms: Terms,
  softmax_scale: float,
  softcap: float,
  wants: tuple[str, ...],
) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
  q_len, num_q_heads, head_dim = q.shape
  k_len, num_kv_heads, _ = k.shape
  q_blocks = _blocks(_group_heads(q, num_kv_heads))
  dout_blocks = _blocks(_group_heads(dout, num_kv_heads))
  # A block of statistics is [num_kv_heads, group, rows], like the leading axes of its scores.
  lse_blocks, delta_blocks = (
    jnp.moveaxis(_blocks(_group_heads(x, num_kv_heads)), 1, 3) for x in (lse, delta)
  )
  k_blocks, v_blocks = _blocks(k), _blocks(v)
  num_rows, num_keys = q_blocks.shape[1], k_blocks.shape[1]
  block_terms = terms.in_blocks(num_rows, num_keys)

  def k_block(dq_blocks: jax.Array, args: Any) -> Any:
    k_begin, k, v = args

    def q_block(carry: Any, args: Any) -> Any:
      q_begin, q, dout, lse, delta, dq = args

      def visit(operands: Any) -> Any:
        dk, dv, dq, _ = operands
        logits = softmax_scale * _einsum("qhgd,khd->hgqk", q, k)
        mask = _block_mask(slices, q_begin, k_begin, num_rows, num_keys)
        logits, mask = block_terms.added(logits, mask, q_begin, k_begin)
        capped = _cap(logits, softcap)
        p = jnp.where(mask, jnp.exp(jnp.where(mask, capped - lse[..., None], 0.0)), 0.0)
        dp = _einsum("qhgd,khd->hgqk", dout, v)
        ds = jnp.where(mask, p * (dp - delta[..., None]), 0.0)
        if softcap:
          ds = ds * jnp.where(mask, 1.0 - (capped / softcap) ** 2, 0.0)
        dterms = block_terms.gradients(ds, q_begin, k_begin, wants)
        dv = dv + _einsum("hgqk,qhgd->khd", p, dout)
        dk = dk + _einsum("hgqk,qhgd->khd", ds * softmax_scale, q)
        dq = dq + _einsum("hgqk,khd->qhgd", ds, k)  # Without softmax_scale.
        return dk, dv, dq, dterms

      hit = touches(slices, q_begin, q_begin + num_rows, k_begin, k_begin + num_keys)
      nothing = block_terms.no_gradients(wants, q)
      *carry, dq, dterms = lax.cond(hit, visit, lambda operands: operands, (*carry, dq, nothing))
      return tuple(carry), (dq, dterms)

    start = tuple(vary_like(jnp.zeros(x.shape, np.float32), x) for x in (k, v))
    xs = (_begins(q_blocks), q_blocks, dout_blocks, lse_blocks, delta_blocks, dq_blocks)
    dkv, (dq_blocks, dterms) = lax.scan(q_block, start, xs)
    return dq_blocks, (*dkv, dterms)

  start = vary_like(jnp.zeros(q_blocks.shape, np.float32), q)
  dq, (dk, dv, dterms) = lax.scan(k_block, start, (_begins(k_blocks), k_blocks, v_blocks))
  dq = _unblock(dq, q_len).reshape(q_len, num_q_heads, head_dim)
  return (dq, _unblock(dk, k_len), _unblock(dv, k_len)), block_terms.joined(dterms)
