"""Speeds of links and kernels, that plans are made for."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_magi._src.arguments import check_number

# Of the operations of both passes: two products forward, five backward.
FORWARD_SHARE = 2 / 7


@dataclasses.dataclass(frozen=True)
class Links:
  """What a plan's transfers and kernels are taken to cost.

  The defaults are of H200s, eight to a node, each with a NIC of 400 Gbit/s, and of a model with 48
  query heads over 8 kv heads of 128 in 16 bit. A plan needs only their proportions, and those
  roughly.

  Attributes:
    near: bytes a second that a GPU sends, and receives, inside its node.
    far: the same between nodes.
    latency: seconds that each collective adds to the time of its bytes.
    row_bytes: of the keys and values of a token, as they travel.
    grad_row_bytes: of their gradients.
    pair_seconds: of a query and a key that it sees, all heads, forward and backward.
    stage_seconds: what each call of a kernel adds, forward and backward: its launch and last tiles.
    merge_seconds: what each call of the forward kernel adds where its results are merged with those
      of other calls, instead of computing each query in one call.
  """

  near: float = 450e9
  far: float = 50e9
  latency: float = 20e-6
  row_bytes: int = 4096
  grad_row_bytes: int = 8192
  pair_seconds: float = 86016 / 550e12
  stage_seconds: tuple[float, float] = (0.05e-3, 0.2e-3)
  merge_seconds: float = 0.1e-3

  def __post_init__(self) -> None:
    for name in ("near", "far", "row_bytes", "grad_row_bytes", "pair_seconds"):
      if (value := check_number(name, getattr(self, name))) <= 0.0:
        raise ValueError(f"{name} must be positive, got {value}")
    if not isinstance(self.stage_seconds, tuple) or len(self.stage_seconds) != 2:
      raise ValueError(f"stage_seconds must be (forward, backward), got {self.stage_seconds!r}")
    times = [("latency", self.latency), ("merge_seconds", self.merge_seconds)]
    for name, seconds in (*times, *(("stage_seconds", x) for x in self.stage_seconds)):
      if check_number(name, seconds) < 0.0:
        raise ValueError(f"{name} must not be negative, got {seconds}")

  @property
  def near_row(self) -> float:
    """A row that moves inside a node, twice forward and once back, in pairs computed meanwhile."""
    return self._moved_bytes / self.near / self.pair_seconds

  @property
  def far_row(self) -> float:
    """The same of a row that crosses to another node."""
    return self._moved_bytes / self.far / self.pair_seconds

  @property
  def _moved_bytes(self) -> float:
    return 2 * self.row_bytes + self.grad_row_bytes


def check_links(links: Any) -> Links:
  """The caller's, or those of H200 nodes for None."""
  if links is None:
    return Links()
  if not isinstance(links, Links):
    raise ValueError(f"links must be Links or None, got {links!r}")
  return links
