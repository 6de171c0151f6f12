"""The native attention kernels as JAX functions.

    b: batch size; 1 if the whole batch shares `slices` or `bias`
    q, dout, dq     [b, q_len, num_q_heads, dim]    lse, delta            [b, q_len, num_q_heads]
    k, v, dk, dv    [b, k_len, num_kv_heads, dim]   sink, max_logits      [b, num_q_heads]
    slices          [b, num_slices, 6]              alibi_slopes, dslopes [b, num_q_heads]
    bias, dbias     [b, num_q_heads or 1, q_len or 1, k_len]    tile_list words, or none
    dq_sum          [b, num_q_heads, words], in an order that the backend chooses

`cc/attention.h` defines the meaning of each operand. It is the same for all backends.
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

# How `overlap` recognizes the calls. The text of a compiled program has the targets. A profile of
# CPUs has only instruction names: the name of JAX's primitive and a number.
TARGETS = (_FORWARD, _BACKWARD)
INSTRUCTION_NAME = "ffi_call"

# Operands that are added to the scaled logits.
_TERMS = ("bias", "alibi_slopes")


def plan_tiles(
  backend: Backend, operands: dict[str, Any], masks: list[np.ndarray], **options: Any
) -> tuple[np.ndarray, Any]:
  """Plans the tiles of a mask that is known when the call is traced.

  Args:
    backend: the backend, with the chosen architecture.
    operands: the operands of the call, by name.
    masks: candidates: slices `[num_slices, 6]` that show the same pairs in different ways.
    **options: options of `_needs`.

  Returns:
    The candidate for which the kernels take the least time, and its needs. Their `tile_list` serves
    any batch that shares the slices, and any number of kv heads. It is empty if the kernels need
    none.
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
  """What the kernels need for a call. `known` are the values of `slices`, if known and shared."""
  # For the handlers, a term without elements is absent.
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
  """The bias, cast to float32 if the kernels do not take 16-bit rows of its length."""
  if bias is None or bias.dtype == np.float32 or bias.shape[2] == 1:
    return bias
  is_taken = bias.shape[3] % backend.architecture.bias_multiple == 0
  return bias if is_taken else bias.astype(np.float32)


def _terms(bias: jax.Array | None, alibi_slopes: jax.Array | None) -> tuple[Any, Any]:
  """The terms, with an array without elements for each that is None."""
  # `jnp.zeros`, because custom_partitioning accepts no constants.
  return (
    jnp.zeros((0, 0, 0, 0), np.float32) if bias is None else bias,
    jnp.zeros((0, 0), np.float32) if alibi_slopes is None else alibi_slopes,
  )


def make_tiles(
  backend: Backend, part: dict[str, Any], group: Any = None, **options: Any
) -> tuple[jax.Array, int]:
  """Makes the tile list of one device's part of a call on that device; returns it with its stamp.

  Args:
    backend: the backend, with the chosen architecture.
    part: the device's part of the operands, by name.
    group: the `MaskGroup` of calls whose lists are made together. None means this call alone.
    **options: options of `_needs`.
  """

  def as_kernels_take(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None) -> Any:
    q, k, v = (_pad_dim(x, backend) for x in (q, k, v))
    return {"q": q, "k": k, "v": v, "bias": _bias_for(bias, backend)}

  slices, q_len, k_len = part["slices"], part["q"].shape[1], part["k"].shape[1]
  sizes, index, all_slices = ((slices.shape[1], k_len),), 0, slices
  keeps_rows: Sequence[bool] = (False,)
  if group is not None:
    sizes, index, all_slices = group.sizes, group.index, part["all_slices"]
    keeps_rows = group.keeps_rows
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
  lists = list_tiles(all_slices, needs, q_len, sizes, keeps_rows)
  return lists[index], needs[index].tile_stamp


def list_tiles(
  slices: jax.Array,
  needs: Sequence[Any],
  q_len: int,
  sizes: Sequence[tuple[int, int]],
  keeps_rows: Sequence[bool] | None = None,
) -> tuple[jax.Array, ...]:
  """The tile lists that the device derives from slices at once, or empty ones if none are needed.

  This call has no barriers, so that XLA merges calls with the same slices. (A loop over layers has
  one call in each iteration, because XLA for GPUs does not move custom calls out of loops.)

  Args:
    slices: int32 `[batch or 1, num_slices of all lists, 6]`.
    needs: for each list, the needs of its call.
    q_len: the number of queries, the same for all calls.
    sizes: for each list, the number of slices and of keys of its call.
    keeps_rows: for each of several lists, whether its call leaves rows that see none of its keys to
      the other calls. The list then lacks tiles of such rows alone. But the first list has those
      with a row in a slice without keys. None means that no call does.
  """
  keeps_rows = keeps_rows or (False,) * len(needs)
  if not all(x.tile_list_words for x in needs):
    return (jnp.zeros(0, np.int32),) * len(needs)
  results = [((x.tile_list_words,), np.int32) for x in needs]
  if len(needs) == 1:
    assert not any(keeps_rows), "a call without others has no results to keep"
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
    lacks=np.array([x and (2 if i == 0 else 1) for i, x in enumerate(keeps_rows)], np.int32),
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
  """Returns out in `out_dtype` (the dtype of q, or float32), lse and max_logits.

  Running results are merged in place, except that a rounded `out` has its own memory.
  `tile_stamp` is the stamp of the tile list.
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
  """Returns dq, dk and dv in `grad_dtype` (the dtype of q, or float32), and further gradients.

  `wants` names the further gradients: "bias", in its dtype, and "alibi_slopes". With `running_dq`,
  the sum of dq over earlier calls, the first result is the new sum, in the same memory.
  `tile_stamp` is the stamp of the tile list.
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
    # XLA fuses this into the operation that reads dq next.
    dq = (dq * np.float32(softmax_scale)).astype(grad_dtype)
  gradients = [x[..., :dim] for x, dim in zip((dq, dk, dv), dims, strict=True)]
  if "bias" in wants:
    gradients.append(dbias.astype(bias_dtype))
  if "alibi_slopes" in wants:
    gradients.append(dslopes)
  return tuple(gradients)


def dq_sum_words(q: Any, v: Any, implementation: str | None) -> int:
  """The words of a dq sum for each batch row and head: enough for all backends of a call."""
  plain: int = q.shape[1] * q.shape[3]
  if has_symbols(q.shape):  # The plain path is used then.
    return plain
  slices = jax.ShapeDtypeStruct((1, 0, 6), np.int32)
  # The result does not depend on the slices or the number of keys, so q stands for k.
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
  """dq `[b, q_len, num_q_heads, head_dim]` from a sum in the backend's own order."""
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
  """Pads the last axis with zeros to a multiple that the backend's kernels take."""
  missing = -x.shape[-1] % backend.head_dim_multiple
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
