"""Times passes of attention in JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.peers import Attention, Cell, Peer

# Up to this length, the host may take longer to start a call than a GPU to run it. Such calls are
# timed by eight in a program, as in a model.
SHORT = 4096


def inputs(cell: Cell, peer: Peer | None = None) -> list[jax.Array]:
  """q, k and v in the form that `peer` takes; None means ours."""
  keys = jax.random.split(jax.random.key(cell.length), 3)
  heads = (cell.num_q_heads, cell.num_kv_heads, cell.num_kv_heads)
  dtype = jnp.dtype(peer.dtype if peer and peer.dtype else cell.dtype)
  dims = (cell.head_dim, *cell.dims)
  q, k, v = (
    jax.random.normal(key, (cell.length, h, dim), dtype)
    for key, h, dim in zip(keys, heads, dims, strict=True)
  )
  scale = 1.0 if peer is None or peer.scales else cell.head_dim**-0.5
  return [q * scale if scale != 1.0 else q, k, v]


def from_numpy(arrays, dtype: str) -> list[jax.Array]:
  return [jnp.asarray(x, dtype) for x in arrays]


def to_numpy(attention: Attention, operands):
  """The result of a way, in float32."""
  return jax.device_get(jax.jit(attention)(*operands).astype(jnp.float32))


def seconds(attention: Attention, cell: Cell, peer: Peer | None = None) -> float:
  """The seconds of one pass."""
  passes = {"forward": _forward, "backward": _backward, "both": _both}
  return passes[cell.direction](attention, cell, *inputs(cell, peer))


def _count(cell: Cell) -> int:
  is_short = cell.length <= SHORT and jax.default_backend() == "gpu"
  return 8 if is_short and not cell.is_single else 1


def _time(fun, *operands) -> float:
  # A few launches in a row, whatever they take: one alone would show the host's part too.
  options = {"min_calls": 3, "budget": 0.06} if jax.default_backend() == "gpu" else {}
  return timing.seconds(jax.jit(fun), *operands, **options)


def _forward(attention: Attention, cell: Cell, q, k, v) -> float:
  queries = [jnp.roll(q, i, axis=0) for i in range(_count(cell))]  # Equal calls are made once.
  time = _time(lambda queries, k, v: [attention(q, k, v) for q in queries], queries, k, v)
  return time / len(queries)


def _backward(attention: Attention, cell: Cell, q, k, v) -> float:
  """The backward pass alone, from the residuals of one forward pass."""
  out, vjp = jax.jit(functools.partial(jax.vjp, attention))(q, k, v)
  keys = jax.random.split(jax.random.key(1), _count(cell))
  douts = [jax.random.normal(key, out.shape, out.dtype) for key in keys]
  return _time(lambda vjp, douts: [vjp(dout) for dout in douts], vjp, douts) / len(douts)


def _both(attention: Attention, cell: Cell, q, k, v) -> float:
  del cell
  return _time(forward_and_backward(attention), q, k, v, jnp.flip(q[..., : v.shape[-1]], axis=0))


def forward_and_backward(attention: Attention):
  def both(q, k, v, dout):
    out, vjp = jax.vjp(attention, q, k, v)
    return out, vjp(dout)

  return both
