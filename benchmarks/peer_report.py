"""Describes the results of peers in lines."""

from __future__ import annotations

import collections


def presence(described: dict[str, dict]) -> list[str]:
  """The available peers, and why others are not available, from the result of `Beside.describe`."""
  lines = ["peers"]
  for peer in described.values():
    reason = peer["absence"]
    lines.append(f"  {peer['title']}: {'here' if reason is None else f'not here: {reason}'}")
  return lines


def lines(figures: dict) -> list[str]:
  """The same from the figures of a part, with the peers that failed. None if it has no peers."""
  if "peers" not in figures:
    return []
  notes = collections.defaultdict(list)
  for rows in figures.values():
    for row in rows if isinstance(rows, list) else ():
      found = row if isinstance(row, dict) else {}
      single = {found["by"]: found["note"]} if "note" in found else {}
      for name, note in (found.get("notes", {}) | single).items():
        notes[name].append(note)
  failures = [
    f"  {name} failed in {len(found)} of its cells: {found[0]}" for name, found in notes.items()
  ]
  return presence(figures["peers"]) + failures
