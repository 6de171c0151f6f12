"""Predicts the time of a plan from the speeds of links and kernels, and the order of its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jax_magi._src.context_parallel.hops import ALL, NODE, Hop, Ranks, rows_by_link
from jax_magi._src.context_parallel.links import FORWARD_SHARE, Links
from jax_magi._src.context_parallel.part_shares import PartShares
from jax_magi._src.context_parallel.schedule import (
  WHOLE,
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
  """The predicted seconds of one attention layer, until the last rank is done.

  Attributes:
    forward: the seconds of the forward pass.
    backward: the seconds of the backward pass.
    kernels: the seconds of the kernels of both passes, and of `expand`, on the slowest rank.
  """

  forward: float
  backward: float
  kernels: float

  @property
  def total(self) -> float:
    """The seconds of both passes."""
    return self.forward + self.backward

  @property
  def exposed(self) -> float:
    """The seconds that transfers add to the kernels."""
    return self.total - self.kernels


@dataclasses.dataclass(frozen=True)
class Kernels:
  """The kernels of one pass.

  Attributes:
    seconds: float64 `[ranks, stages]`, the seconds of each kernel.
    shares: the shares of the parts of a kernel.
  """

  seconds: np.ndarray
  shares: PartShares


def predict(
  hops: Sequence[Sequence[Hop]],
  ranks: Ranks,
  overlap_degree: int,
  kernels: tuple[Kernels, Kernels],
  links: Links,
  orders: tuple[Order | None, Order | None] = (None, None),
  *,
  keep_remote_kv: bool = False,
  expansion: np.ndarray | None = None,
) -> Prediction:
  """Predicts the time of a plan.

  Args:
    hops: the hops of each transfer.
    ranks: the ranks of the axis.
    overlap_degree: as in the key.
    kernels: the kernels of the forward and the backward pass.
    links: the speeds of links and kernels.
    orders: the orders of steps, forward and backward.
    keep_remote_kv: whether the backward pass fetches nothing.
    expansion: float64 `[stages, 2]`, the seconds of `expand` in each stage; None without expansion.
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
    results.append(pass_seconds(steps, hops, ranks, kernels[number], links, number, own))
  (forward, forward_kernels), (backward, backward_kernels) = results
  return Prediction(forward, backward, forward_kernels + backward_kernels)


def _steps_of_one_call(hops: Sequence[Hop], number: int, keep_remote_kv: bool) -> list[Step]:
  """The steps without overlap: keys arrive, one kernel uses all of them, and gradients return."""
  path = [(1, hop) for hop in range(len(hops))]
  fetch = [] if number and keep_remote_kv else [Step(-1, 0, casts=(move,)) for move in path]
  back = [Step(-1, 0, reduces=(move,)) for move in reversed(path)] if number else []
  return [*fetch, Step(0, 0), *back]


def best_order(
  hops: Sequence[Sequence[Hop]],
  ranks: Ranks,
  kernels: Kernels,
  links: Links,
  number: int,
  expansion: np.ndarray | None = None,
) -> Order:
  """The order of steps with which a pass is predicted to finish first.

  The arguments are those of `pass_seconds`, for a plan with stages.
  """
  counts = [len(path) for path in hops]

  def steps(order: Order) -> list[Step]:
    return steps_of(counts, order, is_backward=bool(number))

  def seconds(order: Order) -> float:
    return pass_seconds(steps(order), hops, ranks, kernels, links, number, expansion)[0]

  def with_cuts(order: Order) -> Order:
    found = steps(order)
    num_parts = [num_parts_of(found, stage) for stage in range(len(counts) + 1)]
    cuts = (kernels.shares.cuts(stage, n) for stage, n in enumerate(num_parts))
    return dataclasses.replace(order, cuts=tuple(cuts))

  orders = orders_of(counts, is_backward=bool(number))
  default, best = orders[0], min(map(with_cuts, orders), key=seconds)
  return best if seconds(best) < _WORTH_AN_ORDER * seconds(default) else default


def pass_seconds(
  steps: Sequence[Step],
  hops: Sequence[Sequence[Hop]],
  ranks: Ranks,
  kernels: Kernels,
  links: Links,
  number: int,
  expansion: np.ndarray | None = None,
) -> tuple[float, float]:
  """The seconds of one pass, and of its kernels, until the last rank is done.

  Args:
    steps: the steps of the pass.
    hops: as in `predict`.
    ranks: as in `predict`.
    kernels: the kernels of the pass.
    links: as in `predict`.
    number: 0 for the forward pass, 1 for the backward pass.
    expansion: float64 `[stages]`, the seconds of `expand`; None without expansion.
  """
  row_bytes = links.row_bytes, links.grad_row_bytes
  timeline = _Timeline(ranks, hops, links, row_bytes)
  for step in steps:
    if expansion is not None and step.stage >= 0:
      begin, end = step.rows
      timeline.expand(expansion[step.stage] * (end - begin) / WHOLE)
    timeline.add(step, _kernel_seconds(step, kernels, links, number))
  return timeline.end(), float(timeline.kernels.max())


def _kernel_seconds(step: Step, kernels: Kernels, links: Links, number: int) -> np.ndarray:
  """`[ranks]`: the seconds of the kernel of a step. Each part of a divided kernel costs extra."""
  if step.stage < 0:
    return np.zeros(len(kernels.seconds))
  besides, seconds = links.stage_seconds[number], kernels.seconds[:, step.stage]
  share = kernels.shares.share(step.stage, step.rows)
  return np.where(seconds > 0, np.maximum(seconds - besides, 0.0) * share + besides, 0.0)


class _Timeline:
  """The time at which each rank is done with the steps so far.

  A transfer begins when all ranks of its group are ready.
  """

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
    """Adds the expansion of rows before a step, or its derivative after the step."""
    self._now = self._now + seconds
    self.kernels += seconds

  def add(self, step: Step, kernel: np.ndarray) -> None:
    """Adds a step, which is done when its kernel and its transfers are done."""
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
    """The latest time in each rank's group."""
    shape = self._ranks.num_nodes, self._ranks.per_node
    if level == ALL:
      return np.full_like(times, times.max())
    axis = 0 if level == NODE else 1
    latest = times.reshape(shape).max(axis=axis, keepdims=True)
    return np.broadcast_to(latest, shape).reshape(-1)

  def end(self) -> float:
    """The time at which the last rank is done."""
    return float(self._now.max())


def stage_seconds(
  forward_area: np.ndarray, backward_area: np.ndarray, links: Links, *, is_merged: bool
) -> np.ndarray:
  """The seconds of kernels, float64 `[ranks, stages, 2]`.

  Args:
    forward_area: `[ranks, stages]`, the visible pairs of the stages of the forward pass.
    backward_area: `[ranks, stages]`, the visible pairs of the stages of the backward pass.
    links: the speeds of links and kernels.
    is_merged: whether forward stages merge their results.
  """
  areas = np.stack([forward_area, backward_area], axis=-1)
  shares = np.array([FORWARD_SHARE, 1.0 - FORWARD_SHARE])
  besides = np.array(links.stage_seconds) + np.array([is_merged * links.merge_seconds, 0.0])
  return np.where(areas > 0, areas * links.pair_seconds * shares + besides, 0.0)


def expansion_seconds(
  own: int, rows: Sequence[int], whole_rows: Sequence[int] | None, links: Links
) -> np.ndarray | None:
  """The seconds of `expand` for `predict`, float64 `[stages, 2]`; None if nothing is expanded.

  Args:
    own: the number of a rank's own keys, if a stage is over them, or else 0.
    rows: the number of rows in the buffers of all other stages.
    whole_rows: the same for forward stages that compute whole queries, or None.
    links: the speeds of links and kernels.
  """
  if not any(links.expand_seconds):
    return None
  first = [own] if own else []
  of_passes = [[*first, *(rows if whole_rows is None else whole_rows)], [*first, *rows]]
  return np.array(of_passes, np.float64).T * np.array(links.expand_seconds)


def hop_seconds(hop: Hop, ranks: Ranks, links: Links, row_bytes: int) -> float:
  """The seconds of one hop. Rows between nodes and inside nodes move at the same time."""
  far, near = rows_by_link(hop, ranks)
  if not far and not near:
    return 0.0
  return max(far * row_bytes / links.far, near * row_bytes / links.near) + links.latency
