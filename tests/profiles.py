"""Profiles like those of a GPU, written by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from jax.profiler import ProfileData

_CUDA = "jax_magi::cuda"
FORWARD = f"void {_CUDA}::sm90::ForwardKernel<{_CUDA}::sm90::ForwardConfig<128> >(Params)"
BACKWARD = f"void {_CUDA}::sm80::BackwardKernel<{_CUDA}::sm80::BackwardConfig<128> >(Params)"
NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
COMPUTE, TRANSFER = "Stream #13(Kernel)", "Stream #20(Kernel)"


@dataclasses.dataclass
class Event:
  """An event from `begin` to `end`, in microseconds."""

  name: str
  begin: int
  end: int
  stats: dict[str, int | str] = dataclasses.field(default_factory=dict)


Planes = dict[str, dict[str, list[Event]]]


def profile_bytes(planes: Planes) -> bytes:
  """The file that the profiler would write. Planes contain lines, and lines contain events."""
  text = "\n".join(_plane(name, lines) for name, lines in planes.items())
  return ProfileData.text_proto_to_serialized_xspace(text)


def write_profile(folder: Path, planes: Planes, host: str = "host", time: str = "1") -> Path:
  """Writes the profile where `jax.profiler.trace(folder)` would put it, and returns the file."""
  path = folder / "plugins" / "profile" / time / f"{host}.xplane.pb"
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(profile_bytes(planes))
  return path


def _plane(name: str, lines: dict[str, list[Event]]) -> str:
  events = [event for line in lines.values() for event in line]
  event_ids = _numbered(event.name for event in events)
  stat_ids = _numbered(stat for event in events for stat in event.stats)
  parts = [f"name: {json.dumps(name)}"]
  for kind, ids in (("event", event_ids), ("stat", stat_ids)):
    parts += [
      f"{kind}_metadata {{ key: {i} value {{ id: {i} name: {json.dumps(name)} }} }}"
      for name, i in ids.items()
    ]
  for index, (line, line_events) in enumerate(lines.items()):
    inside = " ".join(_event(event, event_ids, stat_ids) for event in line_events)
    parts.append(f"lines {{ id: {index} name: {json.dumps(line)} timestamp_ns: 0 {inside} }}")
  return f"planes {{ {' '.join(parts)} }}"


def _numbered(names: Iterable[str]) -> dict[str, int]:
  return {name: number for number, name in enumerate(dict.fromkeys(names), start=1)}


def _event(event: Event, event_ids: dict[str, int], stat_ids: dict[str, int]) -> str:
  stats = " ".join(
    f"stats {{ metadata_id: {stat_ids[key]} "
    + (f"int64_value: {value}" if isinstance(value, int) else f"str_value: {json.dumps(value)}")
    + " }"
    for key, value in event.stats.items()
  )
  begin_ps, length_ps = event.begin * 10**6, (event.end - event.begin) * 10**6
  identity = f"metadata_id: {event_ids[event.name]}"
  return f"events {{ {identity} offset_ps: {begin_ps} duration_ps: {length_ps} {stats} }}"
