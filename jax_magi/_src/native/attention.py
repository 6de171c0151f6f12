"""The native attention kernels as JAX functions.

    b: batch, or 1 for `slices` and `bias` shared by the whole batch
    q, dout, dq     [b, q_len, num_q_heads, dim]    lse, delta            [b, q_len, num_q_heads]
    k, v, dk, dv    [b, k_len, num_kv_heads, dim]   sink, max_logits      [b, num_q_heads]
    slices          [b, num_slices, 6]              alibi_slopes, dslopes [b, num_q_heads]
    bias, dbias     [b, num_q_heads or 1, q_len or 1, k_len]    tile_list words, or none
    dq_sum          [b, num_q_heads, words], in an order of the backend's own

What an operand means is the same for every backend, and stands in `cc/attention.h`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi._src.arguments import has_symbols
from jax_magi._src.native.backends import Backend, candidates, num_multiprocessors
from jax_magi._src.native.call import call_on_whole_arrays, native_call

_FORWARD = "jax_magi_attention_forward"
_BACKWARD = "jax_magi_attention_backward"
_FINISH_DQ = "jax_magi_attention_finish_dq"
_TILE_LIST = "jax_magi_attention_tile_list"
_TILE_LISTS = "jax_magi_attention_tile_lists"  # The same for several calls.

# How others tell the calls: the text of a compiled program has the targets, a profile of CPUs only
# the instructions' names, that of JAX's primitive and a number.
TARGETS = (_FORWARD, _BACKWARD)
INSTRUCTION_NAME = "ffi_call"

# Operands that are added to the scaled logits.
_TERMS = ("bias", "alibi_slopes")


def plan_tiles(
  backend: Backend, operands: dict[str, Any], masks: list[np.ndarray], **options: Any
) -> tuple[np.ndarray, Any]:
  """What the kernels derive from a mask that is known when the call is traced.

  Args:
    backend: whose kernels are meant, with the architecture that was chosen.
    operands: of the call, by name.
    masks: slices `[num_slices, 6]` that show the same pairs, each in its own way.
    **options: of `_needs`.

  Returns:
    The slices that the kernels take the least time for, and what these need. Their `tile_list`
    serves any batch that shares them, and any number of kv heads. It may be empty: then the kernels
    need none.
  """
  names = operands.keys() & {"q", "k", "v", *_TERMS}
  arrays = {name: operands[name] for name in names}
  plans = [
    (x, _needs(backend, **arrays, slices=x[None], known=x.tobytes(), **options)) for x in masks
  ]
  return min(plans, key=lambda plan: plan[1].tile_cost)


def _needs(
  backend: Backend,
  q: Any,
  k: Any,
  v: Any,
  slices: Any,
  *,
  softcap: float,
  is_backward: bool,
  deterministic: bool = False,
  known: bytes | None = None,
  bias: jax.Array | None = None,
  alibi_slopes: jax.Array | None = None,
  wants: tuple[str, ...] = (),
  sums_dq: bool = False,
  has_float_grads: bool = False,
) -> Any:
  """`known` are the values of `slices`, where they are known and one list."""
  # Terms without elements are none, as handlers see them.
  bias, alibi_slopes = (x if x is not None and x.size > 0 else None for x in (bias, alibi_slopes))
  return backend.module.attention_needs(
    q_shape=q.shape,
    k_shape=k.shape,
    value_dim=v.shape[-1],
    slices_shape=slices.shape,
    dtype=q.dtype.name,
    has_softcap=softcap != 0.0,
    is_backward=is_backward,
    deterministic=deterministic,
    static_slices=known if slices.shape[0] == 1 else None,
    bias_shape=None if bias is None else bias.shape,
    bias_dtype="float32" if bias is None else bias.dtype.name,
    has_alibi=alibi_slopes is not None,
    wants_dbias="bias" in wants and bias is not None,
    wants_dslopes="alibi_slopes" in wants and alibi_slopes is not None,
    sums_dq=sums_dq,
    has_float_grads=has_float_grads,
    num_sms=num_multiprocessors() or 0,
    architecture=backend.architecture.name,
    shared_memory_bytes=backend.shared_memory_bytes(),
  )


def _bias_for(bias: jax.Array | None, backend: Backend) -> jax.Array | None:
  """In float32, where its rows are not what the backend's kernels take of 16-bit elements."""
  if bias is None or bias.dtype == np.float32 or bias.shape[2] == 1:
    return bias
  is_taken = bias.shape[3] % backend.architecture.bias_multiple == 0
  return bias if is_taken else bias.astype(np.float32)


def _terms(bias: jax.Array | None, alibi_slopes: jax.Array | None) -> tuple[Any, Any]:
  """Operands without elements where there is none."""
  # Made by an operation: custom_partitioning takes no constants.
  return (
    jnp.zeros((0, 0, 0, 0), np.float32) if bias is None else bias,
    jnp.zeros((0, 0), np.float32) if alibi_slopes is None else alibi_slopes,
  )


def make_tiles(
  backend: Backend, part: dict[str, Any], group: Any = None, **options: Any
) -> tuple[jax.Array, int]:
  """The tile list of a device's part of a call, made on the device, and its stamp.

  Args:
    backend: whose kernels are meant.
    part: the call's operands, by name.
    group: the `MaskGroup` of calls whose lists are made together; None if it is this one alone.
    **options: of `_needs`.
  """

  def as_kernels_take(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None) -> Any:
    q, k, v = (_pad_dim(x, backend) for x in (q, k, v))
    return {"q": q, "k": k, "v": v, "bias": _bias_for(bias, backend)}

  slices, q_len, k_len = part["slices"], part["q"].shape[1], part["k"].shape[1]
  sizes, index, all_slices = ((slices.shape[1], k_len),), 0, slices
  if group is not None:
    sizes, index, all_slices = group.sizes, group.index, part["all_slices"]
  assert sizes[index] == (slices.shape[1], k_len), (sizes, index, slices.shape, k_len)
  assert all_slices.shape[0] == slices.shape[0], (all_slices.shape, slices.shape)
  taken = jax.eval_shape(as_kernels_take, part["q"], part["k"], part["v"], part.get("bias"))
  needs = []
  for num_slices, length in sizes:
    keys = {
      name: jax.ShapeDtypeStruct((x.shape[0], length, *x.shape[2:]), x.dtype)
      for name, x in taken.items()
      if name in ("k", "v")
    }
    needs.append(
      _needs(
        backend,
        **taken | keys,
        slices=jax.ShapeDtypeStruct((slices.shape[0], num_slices, 6), np.int32),
        alibi_slopes=part.get("alibi_slopes"),
        sums_dq="running_dq" in part,
        **options,
      )
    )
  return list_tiles(all_slices, needs, q_len, sizes)[index], needs[index].tile_stamp


def list_tiles(
  slices: jax.Array, needs: Sequence[Any], q_len: int, sizes: Sequence[tuple[int, int]]
) -> tuple[jax.Array, ...]:
  """Tile lists that the device makes of slices at once. They are empty if kernels need none.

  No barriers here: to XLA, calls with the same slices are one. (In a loop over layers there is one
  in each turn: XLA for GPUs does not take custom calls out of it.)

  Args:
    slices: int32 `[batch or 1, num_slices of all lists, 6]`.
    needs: those of the call that each list is for.
    q_len: of all these calls.
    sizes: the number of slices, and of keys, of each of them.
  """
  if not all(x.tile_list_words for x in needs):
    return (jnp.zeros(0, np.int32),) * len(needs)
  results = [((x.tile_list_words,), np.int32) for x in needs]
  if len(needs) == 1:
    return native_call(
      _TILE_LIST,
      (slices,),
      results,
      q_len=np.int32(q_len),
      k_len=np.int32(sizes[0][1]),
      tile_stamp=np.int32(needs[0].tile_stamp),
    )
  num_slices, k_lens = zip(*sizes, strict=True)
  return native_call(
    _TILE_LISTS,
    (slices,),
    results,
    q_len=np.int32(q_len),
    k_lens=np.array(k_lens, np.int32),
    num_slices=np.array(num_slices, np.int32),
    tile_stamps=np.array([x.tile_stamp for x in needs], np.int32),
  )


def forward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  slices: jax.Array,
  sink: jax.Array,
  tile_list: jax.Array,
  bias: jax.Array | None = None,
  alibi_slopes: jax.Array | None = None,
  running_out: jax.Array | None = None,
  running_lse: jax.Array | None = None,
  running_max_logits: jax.Array | None = None,
  *,
  backend: Backend,
  softmax_scale: float,
  softcap: float,
  sm_margin: int,
  out_dtype: Any,
  tile_stamp: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns out in `out_dtype`, which is q's or float32; lse and max_logits.

  Running results are merged in place, except that an `out` that is rounded has memory of its own.
  `tile_stamp` is that of the tile list.
  """
  value_dim = v.shape[-1]
  q, k, v = (_pad_dim(x, backend) for x in (q, k, v))
  batch, q_len, num_q_heads, _ = q.shape
  bias = _bias_for(bias, backend)
  needs = _needs(
    backend,
    q,
    k,
    v,
    slices,
    softcap=softcap,
    is_backward=False,
    bias=bias,
    alibi_slopes=alibi_slopes,
  )
  operands = (q, k, v, slices, sink, *_terms(bias, alibi_slopes), tile_list)
  running: tuple[Any, ...] = ()
  if running_out is not None:
    running = (_pad_dim(running_out, backend), running_lse, running_max_logits)
  out, lse, max_logits, _ = call_on_whole_arrays(
    _FORWARD,
    (*operands, *running),
    [
      ((batch, q_len, num_q_heads, v.shape[-1]), out_dtype),
      ((batch, q_len, num_q_heads), np.float32),
      ((batch, num_q_heads), np.float32),
      ((needs.workspace_bytes,), np.uint8),
    ],
    aliases={
      len(operands) + i: i for i, x in enumerate(running) if i or x.dtype == np.dtype(out_dtype)
    },
    softmax_scale=np.float32(softmax_scale),
    softcap=np.float32(softcap),
    sm_margin=np.int32(sm_margin),
    tile_stamp=np.int32(tile_stamp),
    architecture=backend.architecture.name,
    shared_memory_bytes=np.int32(backend.shared_memory_bytes()),
  )
  return out[..., :value_dim], lse, max_logits


def backward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  dout: jax.Array,
  lse: jax.Array,
  delta: jax.Array,
  slices: jax.Array,
  tile_list: jax.Array,
  bias: jax.Array | None = None,
  alibi_slopes: jax.Array | None = None,
  running_dq: jax.Array | None = None,
  *,
  wants: tuple[str, ...] = (),
  backend: Backend,
  softmax_scale: float,
  softcap: float,
  deterministic: bool,
  sm_margin: int,
  known: bytes | None,
  grad_dtype: Any,
  tile_stamp: int,
) -> tuple[jax.Array, ...]:
  """Returns dq, dk and dv in `grad_dtype`, which is q's or float32; and then what `wants` names.

  That may be the gradient of "bias", in its dtype, and that of "alibi_slopes". With `running_dq`, a
  sum of dq over several calls, whose memory it takes, the first result is that sum. `tile_stamp` is
  as in `forward`.
  """
  dims = q.shape[-1], k.shape[-1], v.shape[-1]
  bias_dtype = None if bias is None else bias.dtype
  bias = _bias_for(bias, backend)
  q, k, v, dout = (_pad_dim(x, backend) for x in (q, k, v, dout))
  needs = _needs(
    backend,
    q,
    k,
    v,
    slices,
    softcap=softcap,
    is_backward=True,
    deterministic=deterministic,
    known=known,
    bias=bias,
    alibi_slopes=alibi_slopes,
    wants=wants,
    sums_dq=running_dq is not None,
    has_float_grads=grad_dtype == np.float32,
  )
  nothing: tuple[tuple[int, ...], Any] = (0,), np.float32
  dbias_type = dslopes_type = nothing
  if bias is not None and "bias" in wants:
    dbias_type = bias.shape, np.float32 if needs.is_dbias_summed else bias.dtype
  if alibi_slopes is not None and "alibi_slopes" in wants:
    dslopes_type = alibi_slopes.shape, np.float32
  operands = (q, k, v, dout, lse, delta, slices, *_terms(bias, alibi_slopes), tile_list)
  dq_type = q.shape, np.float32 if needs.is_dq_summed else grad_dtype
  running: tuple[Any, ...] = ()
  if running_dq is not None:
    running, dq_type = (running_dq,), (running_dq.shape, np.float32)
  dq, dk, dv, dbias, dslopes, _ = call_on_whole_arrays(
    _BACKWARD,
    (*operands, *running),
    [
      dq_type,
      (k.shape, grad_dtype),
      (v.shape, grad_dtype),
      dbias_type,
      dslopes_type,
      ((needs.workspace_bytes,), np.uint8),
    ],
    aliases={len(operands) + i: i for i in range(len(running))},
    softmax_scale=np.float32(softmax_scale),
    softcap=np.float32(softcap),
    deterministic=bool(deterministic),
    sm_margin=np.int32(sm_margin),
    tile_stamp=np.int32(tile_stamp),
    architecture=backend.architecture.name,
    shared_memory_bytes=np.int32(backend.shared_memory_bytes()),
    num_dkv_parts=np.int32(needs.num_dkv_parts),
  )
  if running_dq is not None:
    return dq, dk[..., : dims[1]], dv[..., : dims[2]]
  if needs.is_dq_summed:
    # XLA does this in whatever reads dq next.
    dq = (dq * np.float32(softmax_scale)).astype(grad_dtype)
  gradients = [x[..., :dim] for x, dim in zip((dq, dk, dv), dims, strict=True)]
  if "bias" in wants:
    gradients.append(dbias.astype(bias_dtype))
  if "alibi_slopes" in wants:
    gradients.append(dslopes)
  return tuple(gradients)


def dq_sum_words(q: Any, v: Any, implementation: str | None) -> int:
  """Of each batch row and head in a sum of dq: enough for any backend that a call may take."""
  plain: int = q.shape[1] * q.shape[3]
  if has_symbols(q.shape):  # Then no kernel is called.
    return plain
  slices = jax.ShapeDtypeStruct((1, 0, 6), np.int32)
  # Neither slices nor keys count: q stands for k.
  needs = [
    _needs(backend.for_attention(q, v), q, q, v, slices, softcap=0.0, is_backward=True)
    for backend in candidates(implementation).values()
    if backend.attention_obstacle(q, v) is None
  ]
  return max([plain, *(int(x.dq_sum_words) for x in needs)])


def finish_dq(
  dq_sum: jax.Array,
  *,
  backend: Backend,
  q_len: int,
  head_dim: int,
  softmax_scale: float,
  dtype: Any,
) -> tuple[jax.Array]:
  """dq `[b, q_len, num_q_heads, head_dim]` from its sum, where the backend orders that itself."""
  batch, num_q_heads, _ = dq_sum.shape
  padded = head_dim + -head_dim % backend.head_dim_multiple
  (dq,) = call_on_whole_arrays(
    _FINISH_DQ,
    (dq_sum,),
    [((batch, q_len, num_q_heads, padded), dtype)],
    softmax_scale=np.float32(softmax_scale),
  )
  return (dq[..., :head_dim],)


def _pad_dim(x: jax.Array, backend: Backend) -> jax.Array:
  """Pads the last axis with zeros to what the backend's kernels take."""
  missing = -x.shape[-1] % backend.head_dim_multiple
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
