"""How long a plan takes, by the speeds of links and kernels, in the order of its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jax_magi._src.context_parallel.hops import ALL, NODE, Hop, Ranks, rows_by_link
from jax_magi._src.context_parallel.links import FORWARD_SHARE, Links
from jax_magi._src.context_parallel.schedule import (
  Order,
  Step,
  num_parts_of,
  orders_of,
  steps_of,
)

# An order other than the default must be at least 2% faster: fewer programs are worth more.
_WORTH_AN_ORDER = 0.98


@dataclasses.dataclass(frozen=True)
class Prediction:
  """Seconds of one attention layer, until the last rank is done.

  Attributes:
    forward: of the forward pass.
    backward: of the backward pass.
    kernels: of the kernels of both, and of `expand`, if nothing had to move, on the slowest rank.
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
  orders: tuple[Order | None, Order | None] = (None, None),
  *,
  keep_remote_kv: bool = False,
  expansion: np.ndarray | None = None,
) -> Prediction:
  """The time of a plan.

  Args:
    hops: of each transfer.
    ranks: of the axis.
    overlap_degree: as in the key.
    kernels: float64 `[ranks, stages, 2]`, seconds of each stage of ranks, forward and backward.
    links: speeds.
    orders: of the steps, forward and backward.
    keep_remote_kv: whether the backward pass fetches nothing.
    expansion: float64 `[stages, 2]`, seconds of `expand` of the rows of each stage; None is none.
  """
  is_staged = overlap_degree and ranks.count > 1
  results = []
  for number, order in enumerate(orders):
    if is_staged:
      counts = [len(path) for path in hops]
      is_fetching = not (number and keep_remote_kv)
      steps = steps_of(counts, order, is_fetching=is_fetching, is_backward=bool(number))
    else:
      steps = _steps_of_one_call(hops[0] if ranks.count > 1 else (), number, keep_remote_kv)
    own = None if expansion is None else expansion[:, number]
    results.append(pass_seconds(steps, hops, ranks, kernels[:, :, number], links, number, own))
  (forward, forward_kernels), (backward, backward_kernels) = results
  return Prediction(forward, backward, forward_kernels + backward_kernels)


def _steps_of_one_call(hops: Sequence[Hop], number: int, keep_remote_kv: bool) -> list[Step]:
  """One after the other: keys come, all of them are computed with, and gradients return."""
  path = [(1, hop) for hop in range(len(hops))]
  fetch = [] if number and keep_remote_kv else [Step(-1, 0, casts=(move,)) for move in path]
  back = [Step(-1, 0, reduces=(move,)) for move in reversed(path)] if number else []
  return [*fetch, Step(0, 0), *back]


def best_orders(
  hops: Sequence[Sequence[Hop]],
  ranks: Ranks,
  kernels: np.ndarray,
  links: Links,
  expansion: np.ndarray | None = None,
) -> tuple[Order, Order]:
  """The orders of steps with which the two passes are predicted to finish first.

  The arguments are those of `predict`, of a plan with stages.
  """
  counts = [len(path) for path in hops]
  best = []
  for number in range(2):
    default, *others = orders_of(counts, is_backward=bool(number))

    def seconds(order: Order, number: int = number) -> float:
      steps = steps_of(counts, order, is_backward=bool(number))
      own = None if expansion is None else expansion[:, number]
      return pass_seconds(steps, hops, ranks, kernels[:, :, number], links, number, own)[0]

    least, order = min(((seconds(order), i) for i, order in enumerate(others)), default=(0.0, 0))
    is_better = others and least < _WORTH_AN_ORDER * seconds(default)
    best.append(others[order] if is_better else default)
  return best[0], best[1]


def pass_seconds(
  steps: Sequence[Step],
  hops: Sequence[Sequence[Hop]],
  ranks: Ranks,
  kernels: np.ndarray,
  links: Links,
  number: int,
  expansion: np.ndarray | None = None,
) -> tuple[float, float]:
  """Seconds of one pass, and of its kernels alone, until the last rank is done.

  Args:
    steps: of the pass.
    hops: as in `predict`, and so the next two.
    ranks: see above.
    kernels: float64 `[ranks, stages]`, seconds of each stage.
    links: see above.
    number: 0 is the forward pass, 1 the backward pass.
    expansion: float64 `[stages]`, seconds of `expand`; None is none.
  """
  row_bytes = links.row_bytes, links.grad_row_bytes
  timeline = _Timeline(ranks, hops, links, row_bytes)
  for step in steps:
    if expansion is not None and step.stage >= 0:
      timeline.expand(expansion[step.stage] / num_parts_of(steps, step.stage))
    timeline.add(step, _kernel_seconds(steps, step, kernels, links, number))
  return timeline.end(), float(timeline.kernels.max())


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

  def __init__(
    self,
    ranks: Ranks,
    hops: Sequence[Sequence[Hop]],
    links: Links,
    row_bytes: tuple[int, int],
  ) -> None:
    self._ranks, self._hops, self._links, self._row_bytes = ranks, hops, links, row_bytes
    self._now = np.zeros(ranks.count)
    self.kernels = np.zeros(ranks.count)

  def expand(self, seconds: float) -> None:
    """Rows are expanded before a step, and their gradients pulled back after it."""
    self._now = self._now + seconds
    self.kernels += seconds

  def add(self, step: Step, kernel: np.ndarray) -> None:
    """One more step: it is done when its kernel and its transfers are."""
    end = self._now + kernel
    links: dict[str, np.ndarray] = {}  # The time at which the links of each level are free again.
    for row_bytes, moves in zip(self._row_bytes, (step.casts, step.reduces), strict=True):
      for stage, number in moves:
        hop = self._hops[stage - 1][number]
        begin = self._of_group(hop.level, links.get(hop.level, self._now))
        links[hop.level] = begin + hop_seconds(hop, self._ranks, self._links, row_bytes)
    self._now = np.max([end, *links.values()], axis=0)
    self.kernels += kernel

  def _of_group(self, level: str, times: np.ndarray) -> np.ndarray:
    """The latest of each rank's group."""
    shape = self._ranks.num_nodes, self._ranks.per_node
    if level == ALL:
      return np.full_like(times, times.max())
    axis = 0 if level == NODE else 1
    latest = times.reshape(shape).max(axis=axis, keepdims=True)
    return np.broadcast_to(latest, shape).reshape(-1)

  def end(self) -> float:
    """When the last rank is done."""
    return float(self._now.max())


def stage_seconds(
  forward_area: np.ndarray, backward_area: np.ndarray, links: Links, *, is_merged: bool
) -> np.ndarray:
  """float64 `[ranks, stages, 2]` for `predict`, from visible pairs `[ranks, stages]`.

  Args:
    forward_area: of the stages of the forward pass.
    backward_area: of those of the backward pass.
    links: speeds.
    is_merged: whether forward stages merge their results.
  """
  areas = np.stack([forward_area, backward_area], axis=-1)
  shares = np.array([FORWARD_SHARE, 1.0 - FORWARD_SHARE])
  besides = np.array(links.stage_seconds) + np.array([is_merged * links.merge_seconds, 0.0])
  return np.where(areas > 0, areas * links.pair_seconds * shares + besides, 0.0)


def expansion_seconds(
  own: int, rows: Sequence[int], whole_rows: Sequence[int] | None, links: Links
) -> np.ndarray | None:
  """float64 `[stages, 2]` for `predict`, or None if nothing is expanded.

  Args:
    own: keys of a rank, where a stage is over them; else 0.
    rows: of the buffers of all other stages.
    whole_rows: of those of forward stages that compute whole queries, if they do.
    links: speeds.
  """
  if not any(links.expand_seconds):
    return None
  first = [own] if own else []
  of_passes = [[*first, *(rows if whole_rows is None else whole_rows)], [*first, *rows]]
  return np.array(of_passes, np.float64).T * np.array(links.expand_seconds)


def hop_seconds(hop: Hop, ranks: Ranks, links: Links, row_bytes: int) -> float:
  """Of one hop: rows between nodes and inside them move at the same time."""
  far, near = rows_by_link(hop, ranks)
  if not far and not near:
    return 0.0
  return max(far * row_bytes / links.far, near * row_bytes / links.near) + links.latency
