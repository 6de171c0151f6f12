"""The result of a check, as figures, text and a chart."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jax_magi._src.context_parallel.hops import ALL, Ranks
from jax_magi._src.context_parallel.stats import LEVEL_NAMES

# A transport that is slower than another by this factor is broken. The collectives of a transport,
# and the number of rows that cross between nodes, make a smaller difference.
TOO_SLOW = 10


@dataclasses.dataclass(frozen=True)
class ExchangeCheck:
  """The rows of all ranks that one program exchanged.

  Attributes:
    transport: the transport that moved them.
    collectives: the collectives that the transport used.
    overlap_degree: the overlap degree of the keys.
    direction: "cast" for rows; "reduce" for gradients sent in float32; or "reduce in bfloat16".
    num_rows: the number of rows that were compared.
    num_wrong: the number of rows that were wrong.
  """

  transport: str
  collectives: str
  overlap_degree: int
  direction: str
  num_rows: int
  num_wrong: int


@dataclasses.dataclass(frozen=True)
class ExchangeRate:
  """The speed of a hop.

  Attributes:
    transport: the transport that the hop is part of.
    level: "all", "node" or "local", as in `LevelStats`.
    collective: the collective of the hop, such as "all_to_all".
    direction: "cast" for rows; "reduce" for gradients sent in float32.
    num_bytes: the number of bytes that each rank sends to others.
    time_ms: the median time of the slowest process.
  """

  transport: str
  level: str
  collective: str
  direction: str
  num_bytes: int
  time_ms: float

  @property
  def gb_per_s(self) -> float:
    """The bandwidth of each rank in GB/s."""
    return self.num_bytes / self.time_ms / 1e6

  @property
  def name(self) -> str:
    """The transport, followed by the collective if its name differs."""
    return _name(self.transport, self.collective)


@dataclasses.dataclass(frozen=True)
class ExchangeReport:
  """The result of `check_exchange`, the same on all processes. Print it to see its tables.

  Attributes:
    num_ranks: the number of ranks of the mesh axis.
    ranks_per_node: the number of neighbouring ranks that share a node.
    platform: the platform of the devices.
    checks: the number of wrong rows for each transport, set of collectives, overlap degree and
      direction.
    rates: the speed of each hop in each direction.
  """

  num_ranks: int
  ranks_per_node: int
  platform: str
  checks: tuple[ExchangeCheck, ...]
  rates: tuple[ExchangeRate, ...]

  @property
  def faults(self) -> list[str]:
    """A sentence for each transport that returns wrong rows, or is ten times slower than another.

    On CPUs the speed is not judged, because virtual devices share cores.
    """
    wrong = [
      f"{_name(check.transport, check.collectives)}: {check.num_wrong} of {check.num_rows} rows "
      f"are wrong in {check.direction} with overlap_degree={check.overlap_degree}"
      for check in self.checks
      if check.num_wrong
    ]
    return wrong if self.platform == "cpu" else [*wrong, *self._slow()]

  @property
  def ok(self) -> bool:
    """Whether there are no faults."""
    return not self.faults

  def raise_if_faulty(self) -> None:
    """Raises `RuntimeError` with all faults, if there are any."""
    if faults := self.faults:
      raise RuntimeError("the exchange of rows is faulty: " + "; ".join(faults))

  def plot(self, axes: Any = None) -> Any:
    """Draws the GB/s of each hop, with faulty transports in red, and returns the matplotlib axes.

    Needs matplotlib (`pip install jax-magi[plot]`).
    """
    from jax_magi._src.exchange_check.plot import plot_report

    return plot_report(self, axes)

  def level_name(self, level: str) -> str:
    """The level in words."""
    is_one_node = level == ALL and self.ranks_per_node == self.num_ranks
    return "inside a node" if is_one_node else LEVEL_NAMES[level]

  def __str__(self) -> str:
    return "\n".join(self._lines())

  def _slow(self) -> Iterator[str]:
    for rate in self.rates:
      peers = [r for r in self.rates if (r.level, r.direction) == (rate.level, rate.direction)]
      best = max(peers, key=lambda rate: rate.gb_per_s)
      if rate.gb_per_s * TOO_SLOW <= best.gb_per_s:
        yield (
          f"{rate.name} moves {_rate(rate)} GB/s {self.level_name(rate.level)} in "
          f"{rate.direction}, but {best.name} moves {_rate(best)} GB/s"
        )

  def _lines(self) -> Iterator[str]:
    ranks = Ranks(self.num_ranks, self.ranks_per_node)
    nodes = f"{ranks.num_nodes} nodes" if ranks.num_nodes > 1 else "one node"
    yield f"exchange among {ranks.count} ranks ({self.platform}) on {nodes}"
    yield ""
    yield from _table(
      ["wrong rows", "collectives", "degree", *_directions(self.checks)],
      2,
      [
        [*group, *(f"{check.num_wrong} of {check.num_rows}" for check in checks)]
        for group, checks in _grouped(
          self.checks, lambda x: (x.transport, x.collectives, str(x.overlap_degree))
        )
      ],
    )
    yield ""
    yield from _table(
      ["GB/s of a rank", "collective", "links", *_directions(self.rates)],
      3,
      [
        [*group, *map(_rate, rates)]
        for group, rates in _grouped(
          self.rates, lambda x: (x.transport, x.collective, self.level_name(x.level))
        )
      ],
    )
    yield ""
    faults = self.faults
    yield from (f"fault: {fault}" for fault in faults)
    if not faults:
      yield "no faults"


def _name(transport: str, collectives: str) -> str:
  return transport if transport == collectives else f"{transport} ({collectives})"


def _rate(rate: ExchangeRate) -> str:
  return f"{rate.gb_per_s:.3g}" if rate.gb_per_s < 1000 else f"{rate.gb_per_s:.0f}"


def _directions(figures: Sequence[Any]) -> list[str]:
  return list(dict.fromkeys(x.direction for x in figures))


def _grouped(figures: Sequence[Any], columns: Any) -> Iterator[tuple[Any, list[Any]]]:
  for group, found in itertools.groupby(figures, key=columns):
    yield group, list(found)


def _table(header: list[str], num_words: int, rows: Sequence[list[str]]) -> Iterator[str]:
  """Lines of a table: `num_words` left-aligned columns of words, then right-aligned numbers."""
  widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
  for row in (header, *rows):
    cells = [
      cell.ljust(width) if i < num_words else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    yield "  ".join(cells)
