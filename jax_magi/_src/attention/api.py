"""The public attention functions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jax_magi._src.arguments import check_flag
from jax_magi._src.attention import checks, ops
from jax_magi._src.masks.mask import AttentionMask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttnForwardMeta:
  """The statistics of attention that the kernel returns next to the output.

  Attributes:
    lse: float32 `[q_len, num_q_heads]`, the natural logarithm of the softmax denominator of each
      row, including the sink. It is -inf for fully masked rows, and differentiable.
    max_logits: float32 `[num_q_heads]`, the largest `softmax_scale * q.k` over visible pairs, with
      bias and ALiBi, before softcap and without sink. It is -inf for a head without visible pairs,
      and has no gradient. None unless `return_max_logits=True`.
  """

  lse: jax.Array
  max_logits: jax.Array | None = None


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: AttentionMask,
  *,
  softmax_scale: float | None = None,
  softcap: float = 0.0,
  sink: jax.Array | None = None,
  bias: jax.Array | None = None,
  alibi_slopes: jax.Array | None = None,
  return_max_logits: bool = False,
  deterministic: bool = False,
  sm_margin: int = 0,
  checkpoint_names: str | tuple[str, str] | None = None,
  implementation: str | None = None,
) -> tuple[jax.Array, AttnForwardMeta]:
  """Exact attention over a slice mask, for one (packed) sequence. Use `jax.vmap` for a batch.

  Args:
    q: `[q_len, num_q_heads, head_dim]`, float32 (CPU), bfloat16 or float16.
    k: `[k_len, num_kv_heads, head_dim]`. Query heads `g*G .. g*G+G-1` use kv head g.
    v: `[k_len, num_kv_heads, value_dim]`.
    mask: the keys that each query sees. A traced mask is not checked for slices that overlap.
    softmax_scale: static. None means `head_dim ** -0.5`.
    softcap: c > 0 turns each scaled logit s into `c * tanh(s / c)`. 0 turns it off.
    sink: float32, bfloat16 or float16 `[num_q_heads]` or `[num_sink, num_q_heads]`: logits in the
      softmax of every row that have no value. Differentiable.
    bias: broadcastable to `[num_q_heads, q_len, k_len]`, float32, bfloat16 or float16. It is added
      to the scaled logits of visible pairs, before softcap, and is never copied to the shape that
      it broadcasts to. -inf hides a pair. Differentiable; a gradient that you do not request is
      not computed.
    alibi_slopes: float32 `[num_q_heads]`. For query i and key j, `slope * (j - i)` is added to the
      logit, where i and j are indices into q and k. Differentiable.
    return_max_logits: whether to return `meta.max_logits`.
    deterministic: whether gradients must be bitwise equal from run to run. On CPUs they always are.
      On an H200, this slows the backward pass by 0-16% with head dims up to 128. With wider heads,
      it costs 2-6% for full and causal masks, and 42-121% for windows and packed documents.
    sm_margin: the number of streaming multiprocessors of a GPU to leave free.
    checkpoint_names: names of out and lse for `jax.checkpoint` policies, in place of
      `CHECKPOINT_NAMES`: a pair, or one name for both. With the name under which a trainer's policy
      saves attention, no forward kernel runs twice.
    implementation: "cpu", "cuda" or "blockwise" (plain JAX on any platform; "xla" means the same).
      None takes the native kernel of the platform that the program is compiled for, or
      "blockwise" where there is none. "cuda" takes the best kernels that the GPUs run; "cuda_sm90"
      and "cuda_sm80" name them. Second derivatives need "blockwise".

  Returns:
    out `[q_len, num_q_heads, value_dim]` in the dtype of q, and `AttnForwardMeta`. Fully masked
    rows of out are zero.
  """
  checks.check_qkv(q, k, v)
  checks.check_mask(mask, q, k)
  config = checks.make_config(
    q,
    v,
    softmax_scale=softmax_scale,
    softcap=softcap,
    deterministic=deterministic,
    sm_margin=sm_margin,
    checkpoint_names=checkpoint_names,
    implementation=implementation,
  )
  return_max_logits = check_flag("return_max_logits", return_max_logits)
  sink = checks.sink_logit(sink, q.shape[1])
  bias = checks.check_bias(bias, (q.shape[1], q.shape[0], k.shape[0]), q.dtype)
  slopes = checks.check_alibi_slopes(alibi_slopes, ((q.shape[1],),))
  q, k, v, sink = (x[None] for x in (q, k, v, sink))
  results = ops.attention(
    config,
    q,
    k,
    v,
    mask.slices[None],
    sink,
    bias=None if bias is None else bias[None],
    alibi_slopes=None if slopes is None else slopes[None],
  )
  out, lse, max_logits = (x[0] for x in results)
  return out, AttnForwardMeta(lse, max_logits if return_max_logits else None)


def flex_flash_attn_func(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_ranges: Any,
  k_ranges: Any,
  attn_type_map: Any = None,
  *,
  softmax_scale: float | None = None,
  softcap: float = 0.0,
  sink: jax.Array | None = None,
  bias: jax.Array | None = None,
  alibi_slopes: jax.Array | None = None,
  return_max_logits: bool = False,
  deterministic: bool = False,
  sm_margin: int = 0,
  checkpoint_names: str | tuple[str, str] | None = None,
  implementation: str | None = None,
) -> tuple[jax.Array, AttnForwardMeta]:
  """`attention` with the mask given as pairs of query and key ranges.

  Args:
    q: `[q_len, num_q_heads, head_dim]`.
    k: `[k_len, num_kv_heads, head_dim]`.
    v: `[k_len, num_kv_heads, value_dim]`.
    q_ranges: int32 `[n, 2]`, half open, numpy or traced.
    k_ranges: int32 `[n, 2]`, half open, numpy or traced.
    attn_type_map: int32 `[n]` of `MaskType`; None means FULL. No two ranges may cover the same
      pair. Known ranges are checked; for traced ones, the result would be undefined.
    softmax_scale: see `attention`.
    softcap: see `attention`.
    sink: see `attention`.
    bias: see `attention`.
    alibi_slopes: see `attention`.
    return_max_logits: see `attention`.
    deterministic: see `attention`.
    sm_margin: see `attention`.
    checkpoint_names: see `attention`.
    implementation: see `attention`.

  Returns:
    (out, meta), as `attention`.
  """
  checks.check_qkv(q, k, v)
  mask = AttentionMask.from_ranges(
    q_ranges, k_ranges, attn_type_map, q_len=q.shape[0], k_len=k.shape[0]
  )
  return attention(
    q,
    k,
    v,
    mask,
    softmax_scale=softmax_scale,
    softcap=softcap,
    sink=sink,
    bias=bias,
    alibi_slopes=alibi_slopes,
    return_max_logits=return_max_logits,
    deterministic=deterministic,
    sm_margin=sm_margin,
    checkpoint_names=checkpoint_names,
    implementation=implementation,
  )
