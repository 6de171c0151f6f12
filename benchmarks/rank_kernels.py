"""Times the kernel calls of a rank, stage by stage, with masks as data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

# The number of tokens of a rank, and the heads of the model.
LOCAL = 8192
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 48, 8, 128


class Kernels:
  """Times kernel calls, with masks as data. `dims` are the head dims of q and k, and of v."""

  def __init__(self, heads=(NUM_Q_HEADS, NUM_KV_HEADS), dims=(HEAD_DIM, HEAD_DIM)):
    import jax
    import jax.numpy as jnp

    from jax_magi._src.attention import dq_sum, ops

    self.jax, self.jnp, self.ops, self.dq_sum = jax, jnp, ops, dq_sum
    self.config, self.heads, self.dims = ops.AttentionConfig(dims[0] ** -0.5), heads, dims
    self._jitted: dict[str, Callable] = {}

  def alone(self, slices: np.ndarray, length: int) -> tuple[float, float]:
    """The seconds of one call over everything, forward and backward, with 16-bit results."""

    def forward(q, k, v, table):
      return self.ops.forward(self.config, q, k, v, table, self._sink())

    def backward(q, k, v, lse, delta, table):
      return self.ops.backward(self.config, q, k, v, self._dout(q), lse, delta, table)

    q, k, v = self._operands(length, length)
    table = self.jnp.asarray(slices[None])
    lse = self._call("alone_forward", forward, q, k, v, table)[1]
    return (
      self._seconds("alone_forward", forward, q, k, v, table),
      self._seconds("alone_backward", backward, q, k, v, lse, lse * 0.0, table),
    )

  def forward_stage(
    self, slices: np.ndarray, k_len: int, number: int, count: int, *, is_whole: bool
  ) -> float:
    """The seconds of one of `count` stages, which continues with the results of others.

    If results are merged, the last stage rounds them. If queries are whole, each stage does.
    """
    is_first, is_rounded = number == 0, is_whole or number + 1 == count

    def forward(q, k, v, table, running):
      dtype = None if is_rounded else np.float32
      return self.ops.forward(
        self.config, q, k, v, table, self._sink(), out_dtype=dtype, running=running
      )

    q, k, v = self._operands(LOCAL, k_len)
    lse, running, copies = self._lse(), None, 0.0
    if not is_first:
      out = self.jnp.zeros((*lse.shape, self.dims[1]), q.dtype if is_whole else np.float32)
      running = out, lse, lse[:, 0]
      # Here they are arguments, which a call may not write to: it begins with a copy.
      copies = self._copy_seconds(running if is_whole or not is_rounded else running[1:])
    table = self.jnp.asarray(slices[None])
    kind = f"forward{is_first}{is_rounded}{is_whole}"
    return self._seconds(kind, forward, q, k, v, table, running) - copies

  def backward_stage(self, slices: np.ndarray, k_len: int, number: int, count: int) -> float:
    """The same for the backward pass. The last stage finishes dq."""
    is_first, is_last = number == 0, number + 1 == count

    def backward(q, k, v, lse, delta, table, dq):
      dq = self.dq_sum.empty_dq_sum(q, v) if is_first else dq
      dq, dk, dv = self.ops.backward(
        self.config, q, k, v, self._dout(q), lse, delta, table, grad_dtype=np.float32, running_dq=dq
      )
      return (self.dq_sum.finished_dq(self.config, dq, q, v, q.dtype) if is_last else dq), dk, dv

    q, k, v = self._operands(LOCAL, k_len)
    table, lse = self.jnp.asarray(slices[None]), self._lse()
    dq = None if is_first else self.dq_sum.empty_dq_sum(q, v)
    copies = 0.0 if is_first else self._copy_seconds(dq)
    kind = f"backward{is_first}{is_last}"
    return self._seconds(kind, backward, q, k, v, lse, lse * 0.0, table, dq) - copies

  def forget_operands(self) -> None:
    """Frees the operands. Those of many keys take gigabytes."""
    self._operands.cache_clear()

  def _lse(self):
    return self.jnp.full((1, LOCAL, self.heads[0]), 9.0, np.float32)

  def _copy_seconds(self, arrays: Any) -> float:
    return self._seconds("copy", lambda x: self.jax.tree.map(self.jnp.copy, x), arrays)

  def _sink(self):
    return np.full((1, self.heads[0]), -np.inf, np.float32)

  def _dout(self, q):
    return q[..., : self.dims[1]]

  def _call(self, name: str, fun: Callable, *arguments: Any):
    return self._jitted.setdefault(name, self.jax.jit(fun))(*arguments)

  def _seconds(self, name: str, fun: Callable, *arguments: Any) -> float:
    from benchmarks.timing import seconds

    jitted = self._jitted.setdefault(name, self.jax.jit(fun))
    return seconds(jitted, *arguments, budget=0.02, repeats=2)

  @functools.cache  # noqa: B019 (it lives as long as the program)
  def _operands(self, q_len: int, k_len: int):
    keys = self.jax.random.split(self.jax.random.key(0), 3)
    (q_heads, kv_heads), (dim, value_dim) = self.heads, self.dims
    shapes = [(q_len, q_heads, dim), (k_len, kv_heads, dim), (k_len, kv_heads, value_dim)]
    return [
      self.jax.random.normal(key, (1, *shape), self.jnp.bfloat16)
      for key, shape in zip(keys, shapes, strict=True)
    ]
