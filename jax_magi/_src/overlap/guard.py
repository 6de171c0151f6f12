"""What must not be in a compiled program: exchanges that are exposed, or that move everything."""

from __future__ import annotations

from jax_magi._src.overlap.schedule import Schedule, ScheduledCollective

_FLAGS = "compile with compiler_options=jax_magi.overlap.recommended_flags()"


def faults_of(schedule: Schedule) -> list[str]:
  """What is wrong with the exchanges of a program, a sentence each, with what to do.

  An exchange moves keys, values or their gradients between the ranks of an attention with
  `overlap_degree` of at least 1. It has to run beside an attention kernel. Other collectives, and
  exchanges without overlap, are never at fault.
  """
  faults = (_fault(c) for c in schedule.collectives if c.exchange is not None)
  return [fault for fault in faults if fault]


def _fault(collective: ScheduledCollective) -> str:
  name = f"{collective.name} in {collective.computation}"
  if collective.exchange == "ragged" and collective.opcode == "all-gather":
    return (
      f"{name}: XLA has made an all-gather of a ragged exchange, as its ranks are on several "
      "nodes, and the whole buffer of each rank moves to all nodes: make the key with "
      "transport='two_level' (or 'auto'), and ranks_per_node= of the cluster"
    )
  if collective.is_single or collective.attention:
    return ""
  exchange = f"{name}: the exchange ({collective.exchange}) is exposed"
  if not collective.is_async:
    return f"{exchange}, as XLA runs it synchronously: {_FLAGS}"
  return (
    f"{exchange}, as no attention kernel stands between its start and its done: {_FLAGS}, and look "
    "in the table for a collective that has taken its kernel"
  )
