"""Times passes of attention in PyTorch, by events on the GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks.peers import Attention, Cell, Peer


def inputs(cell: Cell, peer: Peer) -> list[torch.Tensor]:
  """q, k and v in the form that `peer` takes."""
  generator = torch.Generator("cuda").manual_seed(cell.length)
  heads = (cell.num_q_heads, cell.num_kv_heads, cell.num_kv_heads)
  options = {"device": "cuda", "dtype": getattr(torch, peer.dtype or cell.dtype)}
  q, k, v = (
    torch.randn((cell.length, h, dim), generator=generator, **options)
    for h, dim in zip(heads, (cell.head_dim, *cell.dims), strict=True)
  )
  return [q if peer.scales else q * cell.head_dim**-0.5, k, v]


def from_numpy(arrays, dtype: str) -> list[torch.Tensor]:
  return [torch.tensor(x, device="cuda", dtype=getattr(torch, dtype)) for x in arrays]


def to_numpy(attention: Attention, operands):
  """The result of a way, in float32."""
  return attention(*operands).float().cpu().numpy()


def seconds(attention: Attention, cell: Cell, peer: Peer) -> float:
  """The seconds of one pass."""
  try:
    return _seconds(attention, cell, *inputs(cell, peer))
  finally:
    torch.cuda.empty_cache()  # JAX has most of the memory: what is left is for the next cell.


def _seconds(attention: Attention, cell: Cell, q, k, v) -> float:
  if cell.direction == "forward":
    with torch.no_grad():
      return _time(lambda: attention(q, k, v))
  operands = [x.requires_grad_() for x in (q, k, v)]
  if cell.direction == "both":
    dout = q.detach()[..., : v.shape[-1]]
    return _time(lambda: _backward(attention(*operands), operands, dout, keep=False))
  out = attention(*operands)
  dout = torch.randn_like(out)
  return _time(lambda: _backward(out, operands, dout, keep=True))


def _backward(out, operands, dout, *, keep: bool):
  return torch.autograd.grad(out, operands, dout, retain_graph=keep)


def _time(call: Callable, budget: float = 0.06, repeats: int = 5) -> float:
  """The median over `repeats` of the mean time of calls: as many as fit in `budget`, or 3."""
  call()
  count = max(3, int(budget / max(_elapsed(call, 1), 1e-6)))
  return statistics.median(_elapsed(call, count) / count for _ in range(repeats))


def _elapsed(call: Callable, count: int) -> float:
  """The seconds of `count` calls on the GPU."""
  begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
  torch.cuda.synchronize()
  begin.record()
  for _ in range(count):
    call()
  end.record()
  torch.cuda.synchronize()
  return begin.elapsed_time(end) / 1e3
