"""How long a plan takes, by the speeds of links and kernels, in the order of its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jax_magi._src.context_parallel.hops import Hop, Ranks, rows_by_link
from jax_magi._src.context_parallel.links import FORWARD_SHARE, Links
from jax_magi._src.context_parallel.schedule import Step, num_parts_of, steps_of


@dataclasses.dataclass(frozen=True)
class Prediction:
  """Seconds of one attention layer, until the last rank is done.

  Attributes:
    forward: of the forward pass.
    backward: of the backward pass.
    kernels: of the kernels of both, if nothing had to move: of the slowest rank in each step.
  """

  forward: float
  backward: float
  kernels: float

  @property
  def total(self) -> float:
    """Of both passes."""
    return self.forward + self.backward

  @property
  def exposed(self) -> float:
    """What transfers add to the kernels."""
    return self.total - self.kernels


def predict(
  hops: Sequence[Sequence[Hop]],
  ranks: Ranks,
  overlap_degree: int,
  kernels: np.ndarray,
  links: Links,
  *,
  keep_remote_kv: bool = False,
) -> Prediction:
  """The time of a plan.

  Args:
    hops: of each transfer.
    ranks: of the axis.
    overlap_degree: as in the key.
    kernels: float64 `[ranks, stages, 2]`, seconds of each stage of ranks, forward and backward.
    links: speeds.
    keep_remote_kv: whether the backward pass fetches nothing.
  """

  def cast(stage: int, hop: int) -> float:
    return hop_seconds(hops[stage - 1][hop], ranks, links, links.row_bytes)

  def reduce(stage: int, hop: int) -> float:
    return hop_seconds(hops[stage - 1][hop], ranks, links, links.grad_row_bytes)

  slowest = kernels.max(axis=0)  # A step waits for the slowest rank, whose rows others need.
  is_alone = ranks.count == 1
  if not overlap_degree or is_alone:
    path = [] if is_alone else list(range(len(hops[0])))
    fetch = sum(cast(1, hop) for hop in path)
    back = sum(reduce(1, hop) for hop in path)
    forward, backward = slowest.sum(axis=0)
    fetch_again = 0.0 if keep_remote_kv else fetch
    return Prediction(forward + fetch, backward + fetch_again + back, forward + backward)
  counts = [len(path) for path in hops]
  forward_steps = steps_of(counts)
  backward_steps = steps_of(counts, is_fetching=not keep_remote_kv, is_backward=True)
  timed = [
    _seconds(steps, slowest[:, number], links.stage_seconds[number], cast, reduce, hops)
    for number, steps in enumerate((forward_steps, backward_steps))
  ]
  (forward, forward_kernels), (backward, backward_kernels) = timed
  return Prediction(forward, backward, forward_kernels + backward_kernels)


def stage_seconds(area: np.ndarray, links: Links) -> np.ndarray:
  """float64 `[ranks, stages, 2]` for `predict`, from visible pairs `[ranks, stages]`."""
  shares = np.array([FORWARD_SHARE, 1.0 - FORWARD_SHARE])
  besides = np.array(links.stage_seconds)
  seconds = area[..., None] * links.pair_seconds * shares
  return np.where(area[..., None] > 0, seconds + besides, 0.0)


def hop_seconds(hop: Hop, ranks: Ranks, links: Links, row_bytes: int) -> float:
  """Of one hop: rows between nodes and inside them move at the same time."""
  far, near = rows_by_link(hop, ranks)
  if not far and not near:
    return 0.0
  return max(far * row_bytes / links.far, near * row_bytes / links.near) + links.latency


def _seconds(
  steps: Sequence[Step],
  kernels: np.ndarray,
  besides: float,
  cast: Callable[[int, int], float],
  reduce: Callable[[int, int], float],
  hops: Sequence[Sequence[Hop]],
) -> tuple[float, float]:
  """Of steps, and of their kernels alone. A step takes as long as the longest of what runs in it.

  A kernel in parts takes `besides` once more for each.
  """
  total = alone = 0.0
  for step in steps:
    num_parts = num_parts_of(steps, step.stage)
    kernel = kernels[step.stage]
    if num_parts > 1 and kernel > 0:
      kernel = (kernel - besides) / num_parts + besides
    lanes: dict[str, float] = {}
    for moves, seconds in ((step.casts, cast), (step.reduces, reduce)):
      for stage, hop in moves:
        level = hops[stage - 1][hop].level
        lanes[level] = lanes.get(level, 0.0) + seconds(stage, hop)
    total += max(kernel, *lanes.values(), 0.0)
    alone += kernel
  return float(total), float(alone)
