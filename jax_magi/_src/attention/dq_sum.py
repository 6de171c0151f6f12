"""The gradient of queries as a sum over several calls of `ops.backward`, in one array.

Kernels add to the array in their own memory layout, and without softmax_scale, so that no call
needs another pass over it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi._src.attention import blockwise
from jax_magi._src.attention.kernel_call import PLAIN, AttentionConfig
from jax_magi._src.native import attention as native
from jax_magi._src.native.backends import Backend, candidates
from jax_magi._src.transforms.operation import Native, Operands, Operation, Results
from jax_magi._src.transforms.varying import vary_like


def empty_dq_sum(q: jax.Array, v: jax.Array, implementation: str | None = None) -> jax.Array:
  """A sum of zeros, float32 `[batch, num_q_heads, words]`.

  Args:
    q: `[batch, q_len, num_q_heads, head_dim]`.
    v: `[batch, k_len, num_kv_heads, value_dim]`. Only its last dimension matters.
    implementation: the implementation of the calls.
  """
  words = native.dq_sum_words(q, v, implementation)
  return vary_like(jnp.zeros((q.shape[0], q.shape[2], words), np.float32), q)


def finished_dq(
  config: AttentionConfig, dq_sum: jax.Array, q: jax.Array, v: jax.Array, dtype: Any
) -> jax.Array:
  """The gradient of q, from the sum of all calls.

  Args:
    config: the configuration of the calls.
    dq_sum: the sum that the last call returned.
    q: `[batch, q_len, num_q_heads, head_dim]`, for its shape and dtype.
    v: `[batch, k_len, num_kv_heads, value_dim]`, for its shape and dtype.
    dtype: the dtype of the result.

  Returns:
    `[batch, q_len, num_q_heads, head_dim]`.
  """
  finish = _finish_dq(
    config.implementation,
    config.softmax_scale,
    q.shape[1],
    (q.shape[-1], v.shape[-1]),
    q.dtype,
    np.dtype(dtype),
  )
  return finish({"dq_sum": dq_sum})[0]


@functools.lru_cache(maxsize=256)
def _finish_dq(
  implementation: str | None,
  softmax_scale: float,
  q_len: int,
  dims: tuple[int, int],
  q_dtype: Any,
  dtype: Any,
) -> Callable[[Operands], Results]:
  options: dict[str, Any] = {
    "q_len": q_len,
    "head_dim": dims[0],
    "softmax_scale": softmax_scale,
    "dtype": dtype,
  }
  plain = functools.partial(blockwise.finish_dq, **options)

  def on_backend(backend: Backend) -> Native:
    if not backend.orders_dq_itself:
      return Native(plain, is_opaque=False)
    return Native(functools.partial(native.finish_dq, backend=backend, **options))

  def natives(operands: Operands) -> dict[str, Native]:
    """The kernels for the platforms on which the calls of `backward` had one."""
    batch, num_q_heads, _ = operands["dq_sum"].shape
    q, v = (jax.ShapeDtypeStruct((batch, q_len, num_q_heads, dim), q_dtype) for dim in dims)
    return {
      platform: on_backend(backend)
      for platform, backend in candidates(implementation).items()
      if backend.attention_obstacle(q, v) is None
    }

  return Operation(
    operands={"dq_sum": "bhw"},
    results={"dq": "bqhd"},
    natives=natives,
    plain=plain,
    plain_name=PLAIN,
    implementation=implementation,
  ).function()
