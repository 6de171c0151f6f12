"""Times the passes of a rank with everything but the collectives.

Collectives are replaced by arrays of the shapes that arrive. Kernels, tile lists, and the gathers
that pack and unpack rows are those of a rank's program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.rank_kernels import Kernels
from benchmarks.timing import seconds
from jax_magi import DistAttnKey
from jax_magi._src.context_parallel import ops
from jax_magi._src.context_parallel.exchange import Transfer
from jax_magi._src.context_parallel.hops import block_begins

# The transfer, its hop, and whether gradients return.
Arrivals = dict[tuple[int, int, bool], Any]


def time_programs(kernels: Kernels, key: DistAttnKey, rank: int) -> dict[str, float]:
  """The seconds of the forward and the backward pass of a rank."""
  part = jax.tree.map(lambda x: jnp.asarray(x[rank : rank + 1]), key)
  q, dout, k, v = (x[0] for x in kernels.operands(kernels.local, kernels.local))
  config = ops.RankConfig(kernels.config, kernels.config, "cp")
  sink = np.full(q.shape[1], -np.inf, np.float32)
  gathered = _gathered(part, 2 * k.shape[1] * k.shape[2], k.dtype)

  def forward(q, k, v, part, gathered):
    with _without_collectives(gathered) as sent:
      results, _ = ops._forward(config, q, (k, v), (), part, sink)
    return results, sent

  def backward(q, k, v, part, gathered, out, lse, dout):
    with _without_collectives(gathered) as sent:
      residuals = (q, (k, v), (), part, sink, out, lse, None)
      results = ops._backward(config, *residuals, dout, jnp.zeros_like(lse))
    return results, sent

  operands = (q, k, v, part, gathered)
  # The values of out and lse do not matter.
  calls: dict[str, tuple[Callable, tuple[Any, ...]]] = {
    "forward": (forward, operands),
    "backward": (backward, (*operands, dout, jnp.full(q.shape[:2], 9.0, np.float32), dout)),
  }
  # Traced one after the other, because the replacement of collectives is global.
  lowered = [jax.jit(fun).lower(*arguments) for fun, arguments in calls.values()]
  with ThreadPoolExecutor() as pool:
    programs = dict(zip(calls, pool.map(lambda x: x.compile(), lowered), strict=True))
  return {
    name: seconds(programs[name], *arguments, budget=0.02, repeats=3)
    for name, (_, arguments) in calls.items()
  }


def _gathered(key: DistAttnKey, width: int, dtype: Any) -> Arrivals:
  """Random results of all-gathers and reduce-scatters. Others have the shape of their operands."""
  arrivals = {}
  for number, hops in enumerate(key.capacities.hops):
    for hop, this in enumerate(hops):
      if this.kind == "all_gather":
        num_rows = int(block_begins(this, key.spec.ranks)[-1])
        shapes = ((num_rows, width), dtype), ((this.rows[0], width), np.float32)
        for is_back, shape in enumerate(shapes):
          arrivals[number, hop, bool(is_back)] = jax.random.normal(jax.random.key(1), *shape)
  return arrivals


@contextlib.contextmanager
def _without_collectives(gathered: Arrivals) -> Iterator[list[Any]]:
  """Replaces the collectives while a program is traced. Yields what would be sent otherwise."""
  sent: list[Any] = []

  def stand_in(is_back: bool) -> Callable:
    def move(self: Transfer, hop: int, rows: Any, **options: Any) -> Any:
      del options
      if not rows.shape[0] or self.hops[hop].kind != "all_gather":
        return lax.optimization_barrier(rows)
      sent.append(rows)
      return gathered[self.number, hop, is_back]

    return move

  with (
    mock.patch.object(Transfer, "move", stand_in(False)),
    mock.patch.object(Transfer, "move_back", stand_in(True)),
  ):
    yield sent
