"""Reads what ran on each device from a profile that `jax.profiler` wrote."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from jax_magi._src.overlap.kinds import Kind, is_collective, kernel_kind, short_name, thunk_kind

_HOW_TO_RECORD = "record one with `with jax.profiler.trace(FOLDER):` around a few steps"
# Events of a CPU's profile that only contain other events.
_CONTAINERS = re.compile(r"(?:call|while|conditional)(?:\.|$)")
# Events of a GPU's profile that are no work.
_BOOKKEEPING = ("MemoryAlloc", "MemoryFree", "MemoryResidency")
# The names of lines that some tools add to a GPU's profile.
_DEVICE_STEPS = "Steps"
_PROGRAMS = "XLA Modules"
_ANNOTATION = "jax.profiler.StepTraceAnnotation"


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A kernel or a copy that ran on a GPU, or an HLO instruction that ran on a CPU.

  Attributes:
    name: the shortened name of the kernel.
    hlo_op: the instruction that launched it; "" if the profile does not say.
    kind: what it does.
    lane: the stream or thread.
    begin_ps: the time at which it began, in picoseconds.
    end_ps: the time at which it ended, later than `begin_ps`.
  """

  name: str
  hlo_op: str
  kind: Kind
  lane: str
  begin_ps: int
  end_ps: int

  def __str__(self) -> str:
    if is_collective(self.hlo_op):
      return self.hlo_op  # NCCL has few kernels, so their names do not tell collectives apart.
    return f"{self.name} ({self.hlo_op})" if self.hlo_op not in ("", self.name) else self.name


@dataclasses.dataclass(frozen=True)
class Step:
  """What one device ran in one step.

  Attributes:
    label: the name of the step.
    device: the name of the device.
    kernels: the kernels in the order in which they began.
  """

  label: str
  device: str
  kernels: tuple[Kernel, ...]


@dataclasses.dataclass(frozen=True)
class Trace:
  """A profile.

  Attributes:
    paths: the files, one for each host.
    step_source: how the steps were found, in words.
    steps: one entry for each step and device, sorted by device.
    notes: sentences that a reader of the figures should know.
  """

  paths: tuple[Path, ...]
  step_source: str
  steps: tuple[Step, ...]
  notes: tuple[str, ...]

  @property
  def devices(self) -> list[str]:
    """The names of the devices, in order."""
    return list(dict.fromkeys(step.device for step in self.steps))

  @property
  def labels(self) -> list[str]:
    """The names of the steps, in order."""
    return list(dict.fromkeys(step.label for step in self.steps))


def read_trace(path: str | Path, *, check_kinds: bool = True) -> Trace:
  """Reads a profile.

  Args:
    path: an `.xplane.pb` file, or the folder that was given to `jax.profiler.trace`. In a folder,
      the newest profile is read, with the files of all hosts.
    check_kinds: whether to require communication and attention in the profile.

  Raises:
    ValueError: if there is no profile, or it lacks kernels that are required. The message says
      what to record.
  """
  paths = _find(Path(path))
  hosts = [_read_host(file, f"{_host_name(file)} " if len(paths) > 1 else "") for file in paths]
  if not any(host.kernels for host in hosts):
    planes = sorted({name for host in hosts for name in host.planes})
    raise ValueError(
      f"{path} has no kernels of a GPU and no instructions of a CPU, only {planes}: "
      f"{_HOW_TO_RECORD}, in the process that runs them, and wait for their results inside"
    )
  steps = tuple(step for host in hosts for step in _steps(host))
  notes = tuple(dict.fromkeys(note for host in hosts for note in _notes(host)))
  if check_kinds:
    _check_kinds(path, steps, notes)
  sources = dict.fromkeys(_marks(host, device)[0] for host in hosts for device in host.kernels)
  return Trace(paths, " and ".join(sources), steps, notes)


def _check_kinds(path: str | Path, steps: Iterable[Step], notes: tuple[str, ...]) -> None:
  found = {kernel.kind for step in steps for kernel in step.kernels}
  more = "".join(f". {note}" for note in notes)
  if Kind.COMMUNICATION not in found:
    raise ValueError(
      f"{path} has no communication that could be hidden: record a step that runs on several "
      f"devices{more}"
    )
  if Kind.ATTENTION not in found:
    raise ValueError(
      f"{path} has no attention kernels of jax_magi that could hide communication: record a step "
      "whose attention uses native kernels; if it does not, name a platform in the argument "
      f"`implementation`, and the error will state the reason{more}"
    )


def _find(path: Path) -> tuple[Path, ...]:
  if path.is_file():
    return (path,)
  if not path.exists():
    raise ValueError(f"{path} does not exist: {_HOW_TO_RECORD}, and pass FOLDER")
  files = sorted(path.glob("**/*.xplane.pb"))
  if not files:
    raise ValueError(f"{path} has no *.xplane.pb below it: {_HOW_TO_RECORD}, and pass FOLDER")
  # The files of one profile are in one folder, named after its time.
  newest = max((file.parent for file in files), key=lambda folder: (folder.stat().st_mtime, folder))
  return tuple(file for file in files if file.parent == newest)


@dataclasses.dataclass
class _Host:
  """The contents of one file, before they are divided into steps.

  Attributes:
    planes: the names of all planes.
    kernels: the kernels by device, each with the time of its launch, if known.
    host_marks: the times at which the host began a step, with the names of the steps.
    device_marks: the same for devices, by line of the profile and by device.
    num_graphs: the number of CUDA graphs whose kernels the profile does not show.
  """

  planes: list[str]
  kernels: dict[str, list[tuple[int | None, Kernel]]]
  host_marks: list[tuple[int, str]]
  device_marks: dict[tuple[str, str], list[tuple[int, str]]]
  num_graphs: int = 0


def _read_host(path: Path, prefix: str) -> _Host:
  """Reads one file. `prefix` is prepended to the names of its devices."""
  profile = _open(path)  # Owns the memory of the planes.
  planes = list(profile.planes)
  host = _Host([plane.name for plane in planes], collections.defaultdict(list), [], {})
  launches: dict[int, int] = {}
  for _, event, stats in _events(planes, "/host:"):
    if "step_num" in stats:
      host.host_marks.append((_ps(event.start_ns), f"{event.name} {stats['step_num']}"))
    if "correlation_id" in stats:
      launches[stats["correlation_id"]] = _ps(event.start_ns)
  for plane in planes:
    if plane.name.startswith("/device:GPU:"):
      _read_gpu(plane, prefix + plane.name.removeprefix("/device:"), launches, host)
  if not host.kernels:
    _read_cpus(planes, prefix, host)
  return host


def _open(path: Path) -> ProfileData:
  """Opens a profile. A file of another kind fails to parse, or is empty."""
  try:
    data = path.read_bytes()
    profile = ProfileData.from_serialized_xspace(data)
  except (OSError, RuntimeError, ValueError) as error:
    raise ValueError(f"{path} is not a profile ({error}): {_HOW_TO_RECORD}") from error
  if not any(True for _ in profile.planes):
    raise ValueError(
      f"{path} holds nothing in its {len(data)} bytes: was the profiler stopped? {_HOW_TO_RECORD}"
    )
  return profile


def _events(planes: Iterable[Any], prefix: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
  """Yields line, event and properties of planes with this prefix, without Python functions."""
  for plane in planes:
    if plane.name.startswith(prefix):
      for line in plane.lines:
        for event in line.events:
          if not event.name.startswith("$"):  # A Python function: there may be millions.
            yield line.name, event, dict(event.stats)


def _read_gpu(plane: Any, device: str, launches: dict[int, int], host: _Host) -> None:
  for line in plane.lines:
    if line.name in (_DEVICE_STEPS, _PROGRAMS):
      marks = sorted((_ps(event.start_ns), event.name) for event in line.events)
      if line.name == _PROGRAMS:
        marks = [(begin, f"{name} {index}") for index, (begin, name) in enumerate(marks)]
      host.device_marks[line.name, device] = marks
  for line, event, stats in _events([plane], plane.name):
    host.num_graphs += event.name.startswith("CudaGraph")
    # The other lines repeat the same events under other names.
    if line.startswith("Stream #") and not event.name.startswith(_BOOKKEEPING):
      hlo_op = str(stats.get("hlo_op", ""))
      kind = kernel_kind(event.name, hlo_op)
      launch = launches.get(stats.get("correlation_id", -1))
      _add(host, device, event, (short_name(event.name), hlo_op, kind, line), launch)


def _read_cpus(planes: Iterable[Any], prefix: str, host: _Host) -> None:
  for line, event, stats in _events(planes, "/host:CPU"):
    hlo_op = stats.get("hlo_op")
    if hlo_op is not None and not _CONTAINERS.match(hlo_op):
      device = f"{prefix}CPU:{stats.get('device_ordinal', 0)}"
      _add(host, device, event, (hlo_op, hlo_op, thunk_kind(hlo_op), line), None)


def _add(
  host: _Host, device: str, event: Any, what: tuple[str, str, Kind, str], launch: int | None
) -> None:
  begin, end = _ps(event.start_ns), _ps(event.end_ns)
  if begin < end:
    host.kernels[device].append((launch, Kernel(*what, begin, end)))


def _marks(host: _Host, device: str) -> tuple[str, list[tuple[int, str]]]:
  """How the steps of a device were found, and the times at which they begin."""
  if marks := host.device_marks.get((_DEVICE_STEPS, device)):
    return "the devices' own steps", marks
  if host.host_marks:
    return _ANNOTATION, sorted(host.host_marks)
  if marks := host.device_marks.get((_PROGRAMS, device)):
    return "executions of programs", marks
  return f"the whole profile, which has no marks (use {_ANNOTATION})", []


def _steps(host: _Host) -> Iterator[Step]:
  """Assigns each kernel to the step that had begun last when the kernel was launched."""
  for device in sorted(host.kernels, key=_natural):
    source, marks = _marks(host, device)
    begins = [begin for begin, _ in marks]
    by_step = collections.defaultdict(list)
    for launch, kernel in host.kernels[device]:
      # The host runs ahead of the device, so its marks match launches, not executions.
      time = launch if source == _ANNOTATION and launch is not None else kernel.begin_ps
      by_step[bisect.bisect_right(begins, time) - 1].append(kernel)
    if marks:
      by_step.pop(-1, None)  # Before the first step.
    for index in sorted(by_step):
      kernels = tuple(sorted(by_step[index], key=lambda kernel: kernel.begin_ps))
      yield Step(marks[index][1] if marks else "all", device, kernels)


def _notes(host: _Host) -> Iterator[str]:
  if host.num_graphs:
    yield (
      f"The profile does not show the kernels of {host.num_graphs} CUDA graphs: run with "
      "XLA_FLAGS=--xla_gpu_enable_command_buffer= to see them"
    )
  if any("CPU:" in device for device in host.kernels):
    yield (
      "This is a profile of CPUs: each custom call counts as attention, and devices share cores"
    )


def _host_name(file: Path) -> str:
  return file.name.removesuffix(".xplane.pb")


def _ps(time_ns: float) -> int:
  return round(time_ns * 1000)


def _natural(name: str) -> list[Any]:
  """A key that sorts GPU:2 before GPU:10."""
  return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
