"""Speeds of links and kernels, that plans are made for."""

from __future__ import annotations

import dataclasses

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
