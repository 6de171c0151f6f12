"""Finds faults of a compiled program: exchanges that are exposed, or that move whole buffers."""

from __future__ import annotations

from jax_magi._src.overlap.schedule import Schedule, ScheduledCollective

_FLAGS = "compile with compiler_options=jax_magi.overlap.recommended_flags()"


def faults_of(schedule: Schedule) -> list[str]:
  """Returns a sentence for each faulty exchange of a program, with the remedy.

  An exchange is a collective that moves keys, values or their gradients between ranks. With an
  `overlap_degree` of at least 1, each exchange must overlap with an attention kernel; one that does
  not is a fault. A ragged exchange that XLA turned into an all-gather is a fault, too. Other
  collectives, and exchanges with `overlap_degree=0`, are never faults.
  """
  faults = (_fault(c) for c in schedule.collectives if c.exchange is not None)
  return [fault for fault in faults if fault]


def _fault(collective: ScheduledCollective) -> str:
  name = f"{collective.name} in {collective.computation}"
  if collective.exchange == "ragged" and collective.opcode == "all-gather":
    return (
      f"{name}: XLA has turned a ragged exchange into an all-gather, because its ranks are on "
      "several nodes, and the whole buffer of each rank moves to all nodes: make the key with "
      "transport='two_level' (or 'auto'), and pass the ranks_per_node of the cluster"
    )
  if collective.is_single or collective.attention:
    return ""
  exchange = f"{name}: the exchange ({collective.exchange}) is exposed"
  if not collective.is_async:
    return f"{exchange}, because XLA runs it synchronously: {_FLAGS}"
  return (
    f"{exchange}, because no attention kernel runs between its start and its done: {_FLAGS}, and "
    "check the table for another collective that overlaps with the kernel instead"
  )
