"""Times the CUDA kernels with a bias and with ALiBi slopes, against neither and against cuDNN.

The bias is bf16, `[heads, tokens, tokens]`, and its gradient is computed. The gradient of slopes is
not. With `--dims`, the plain path replaces cuDNN, because JAX's interface to cuDNN supports few
head dims.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

import jax_magi
from benchmarks import timing
from jax_magi import AttentionMask

HEAD_DIM, NUM_Q_HEADS, NUM_KV_HEADS = 128, 48, 8
_MASKS = {"full": AttentionMask.full, "causal": AttentionMask.causal}


def _ours(mask: AttentionMask, implementation: str = "cuda", **terms) -> Callable:
  def fun(q, k, v, bias=None):
    return jax_magi.attention(q, k, v, mask, bias=bias, implementation=implementation, **terms)[0]

  return fun


def _cudnn(is_causal: bool) -> Callable:
  def fun(q, k, v, bias):
    batch = (x[None] for x in (q, k, v, bias))
    return jax.nn.dot_product_attention(*batch, is_causal=is_causal, implementation="cudnn")[0]

  return fun


def _times(fun: Callable, operands: tuple) -> tuple[float, float]:
  """The seconds of a forward pass, and of only a backward pass."""
  forward = timing.seconds(jax.jit(fun), *operands, min_calls=3, budget=0.06)
  out, vjp = jax.jit(lambda *x: jax.vjp(fun, *x))(*operands)
  dout = jax.random.normal(jax.random.key(1), out.shape, out.dtype)
  backward = timing.seconds(jax.jit(lambda vjp, x: vjp(x)), vjp, dout, min_calls=3, budget=0.06)
  return forward, backward


def time_bias(lengths: list[int], dims: tuple[int, int] | None = None) -> list[dict]:
  head_dim, value_dim = dims or (HEAD_DIM, HEAD_DIM)
  rows = []
  for length in lengths:
    keys = jax.random.split(jax.random.key(length), 4)
    heads_and_dims = (NUM_Q_HEADS, head_dim), (NUM_KV_HEADS, head_dim), (NUM_KV_HEADS, value_dim)
    shapes = [(length, *both) for both in heads_and_dims]
    q, k, v, bias = (
      jax.random.normal(key, shape, jnp.bfloat16)
      for key, shape in zip(keys, [*shapes, (NUM_Q_HEADS, length, length)], strict=True)
    )
    slopes = jnp.exp2(-8.0 * jnp.arange(1, NUM_Q_HEADS + 1) / NUM_Q_HEADS)
    for name, make in _MASKS.items():
      mask = make(length)
      other = "plain_bias" if dims else "cudnn_bias"
      peer = _ours(mask, "blockwise") if dims else _cudnn(name == "causal")
      times = {
        "none": _times(_ours(mask), (q, k, v)),
        "bias": _times(_ours(mask), (q, k, v, bias)),
        "key_bias": _times(_ours(mask), (q, k, v, bias[:, :1])),
        "alibi": _times(_ours(mask, alibi_slopes=slopes), (q, k, v)),
        other: _times(peer, (q, k, v, bias)),
        "none_again": _times(_ours(mask), (q, k, v)),
      }
      for i, direction in enumerate(("forward", "backward")):
        row = {"head_dim": head_dim, "length": length, "mask": name, "pass": direction}
        row |= {f"{kind}_ms": 1e3 * pair[i] for kind, pair in times.items()}
        rows.append(row)
        base = (row["none_ms"] + row["none_again_ms"]) / 2
        ratios = "  ".join(f"{kind} {1e3 * pair[i] / base:5.2f}x" for kind, pair in times.items())
        print(f"  {length:6} {name:7} {direction:9} {base:7.3f} ms  {ratios}", flush=True)
  return rows
