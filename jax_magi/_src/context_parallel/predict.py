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
    kernels: of the kernels of both, if nothing had to move, on the slowest rank.
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

  if ranks.count == 1:
    hops, overlap_degree = ((),), 0
  if not overlap_degree:
    # One after the other: keys come, all of them are computed with, and gradients return.
    path = [(1, hop) for hop in range(len(hops[0]))]
    fetch = [Step(-1, 0, casts=(move,)) for move in path]
    back = [Step(-1, 0, reduces=(move,)) for move in reversed(path)]
    kernel = [Step(0, 0)]
    passes = fetch + kernel, ([] if keep_remote_kv else fetch) + kernel + back
  else:
    counts = [len(path) for path in hops]
    passes = (
      steps_of(counts),
      steps_of(counts, is_fetching=not keep_remote_kv, is_backward=True),
    )
  results = []
  for number, steps in enumerate(passes):
    timeline = _Timeline(ranks, hops, cast, reduce)
    for step in steps:
      timeline.add(step, _kernel_seconds(steps, step, kernels[:, :, number], links, number))
    results.append((timeline.end(), float(timeline.kernels.max())))
  (forward, forward_kernels), (backward, backward_kernels) = results
  return Prediction(forward, backward, forward_kernels + backward_kernels)


def _kernel_seconds(
  steps: Sequence[Step], step: Step, kernels: np.ndarray, links: Links, number: int
) -> np.ndarray:
  """`[ranks]`: the kernel of a step; each part of one that is cut takes a little besides."""
  if step.stage < 0:
    return np.zeros(len(kernels))
  num_parts = num_parts_of(steps, step.stage)
  besides = links.stage_seconds[number]
  kernel = kernels[:, step.stage]
  return np.where(kernel > 0, np.maximum(kernel - besides, 0.0) / num_parts + besides, 0.0)


class _Timeline:
  """When each rank is done with the steps so far. A transfer begins when all of its group do."""

  def __init__(self, ranks: Ranks, hops: Sequence[Sequence[Hop]], cast: Callable, reduce: Callable):
    self._ranks, self._hops = ranks, hops
    self._seconds = {"cast": cast, "reduce": reduce}
    self._now = np.zeros(ranks.count)
    self.kernels = np.zeros(ranks.count)

  def add(self, step: Step, kernel: np.ndarray) -> None:
    """One more step: it is done when its kernel and its transfers are."""
    end = self._now + kernel
    links: dict[str, np.ndarray] = {}  # When each level is free again.
    for kind, moves in (("cast", step.casts), ("reduce", step.reduces)):
      for stage, hop in moves:
        level = self._hops[stage - 1][hop].level
        begin = self._of_group(level, links.get(level, self._now))
        links[level] = begin + self._seconds[kind](stage, hop)
    self._now = np.max([end, *links.values()], axis=0)
    self.kernels += kernel

  def _of_group(self, level: str, times: np.ndarray) -> np.ndarray:
    """The latest of each rank's group."""
    groups = np.array(self._ranks.groups(level) or [list(range(self._ranks.count))])
    latest = np.empty_like(times)
    latest[groups] = times[groups].max(axis=1, keepdims=True)
    return latest

  def end(self) -> float:
    """When the last rank is done."""
    return float(self._now.max())


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
