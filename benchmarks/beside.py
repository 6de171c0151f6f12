"""Times the available baselines, in this process or each in a separate process.

Baselines are checked before they are timed. If one computes something else, it is not compared.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peer_report
from benchmarks.peers import PEERS, Cell, Peer

ROOT = Path(__file__).resolve().parent.parent
# Tokens and heads of the check: longer than a window, and several documents.
CHECK_LENGTH, CHECK_Q_HEADS, CHECK_KV_HEADS = 4096, 2, 1
# The limit of a row's error, relative to the row. One key too many or too few in a window of 1024
# exceeds it; rounding to bfloat16 does not.
CHECK_LIMIT = 0.03
# A peer's process that takes more than this many seconds hangs.
PATIENCE = 300.0


def timed(peer: Peer, cell: Cell) -> dict[str, Any]:
  """{"seconds": the time of the fastest way}, or {"note": the reason}. Never raises."""
  passes = importlib.import_module(f"benchmarks.{peer.framework}_passes")
  times, notes = [], []
  try:
    for number, way in enumerate(peer.ways(cell)):
      try:
        _check(peer, number, _small(cell))
        times.append(passes.seconds(way, cell, peer))
      except Exception as error:  # Whatever others raise is a note, and no end.
        notes.append(_in_words(error))
  except Exception as error:
    notes.append(_in_words(error))
  return {"seconds": min(times)} if times else {"note": notes[0] if notes else "has no way"}


def _in_words(error: Exception) -> str:
  lines = str(error).strip().splitlines()
  return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def _small(cell: Cell) -> Cell:
  """The same cell with few tokens and heads. All long masks of a name begin in the same way."""
  length = min(cell.length, CHECK_LENGTH)
  mask = cell.mask.crop(0, length, 0, length)
  heads = {"num_q_heads": CHECK_Q_HEADS, "num_kv_heads": CHECK_KV_HEADS}
  return dataclasses.replace(cell, mask=mask, is_single=False, **heads)


@functools.cache
def _check(peer: Peer, number: int, cell: Cell) -> None:
  """Raises if way `number` of `peer` computes a wrong result for a small cell."""
  passes = importlib.import_module(f"benchmarks.{peer.framework}_passes")
  rng = np.random.default_rng(0)
  heads = (CHECK_Q_HEADS, CHECK_KV_HEADS, CHECK_KV_HEADS)
  q, k, v = (
    rng.standard_normal((cell.length, h, dim), np.float32)
    for h, dim in zip(heads, (cell.head_dim, *cell.dims), strict=True)
  )
  scale = cell.head_dim**-0.5
  operands = passes.from_numpy((q if peer.scales else q * scale, k, v), peer.dtype or cell.dtype)
  out = passes.to_numpy(peer.ways(cell)[number], operands)
  dense = cell.mask.to_dense()
  is_seeing = dense.any(axis=1)  # What others return for other rows is their affair.
  truth = _attention(q, k, v, dense, scale)
  error = np.linalg.norm(out - truth, axis=-1)[is_seeing]
  error /= np.linalg.norm(truth, axis=-1)[is_seeing]
  if not error.max() <= CHECK_LIMIT:  # NaN is wrong, too.
    raise ValueError(f"computes something else: a row of {cell.name} is off by {error.max():.2g}")


def _attention(q, k, v, dense, scale: float) -> np.ndarray:
  """Attention in float32, with the mask as an array. Fully masked rows are NaN."""
  outs = []
  for head in range(q.shape[1]):
    kv_head = head * k.shape[1] // q.shape[1]
    scores = np.where(dense, q[:, head] @ k[:, kv_head].T * np.float32(scale), -np.inf)
    with np.errstate(invalid="ignore"):
      weights = np.exp(scores - scores.max(axis=1, keepdims=True))
      outs.append(weights @ v[:, kv_head] / weights.sum(axis=1, keepdims=True))
  return np.stack(outs, axis=1)


class PeerProcess:
  """A peer in a separate process, which is started again if it ends."""

  def __init__(self, peer: Peer):
    self._peer = peer
    self._process: subprocess.Popen | None = None

  def absence(self) -> str | None:
    """Why the peer is not available, according to its process; None if it is."""
    answer = self._ask({"absence": True})
    return answer.get("absence", answer.get("note"))

  def timed(self, cell: Cell) -> dict[str, Any]:
    """Like `timed`. If the process ends, that is a note, too."""
    return self._ask({"cell": cell.to_json()})

  def _start(self) -> subprocess.Popen:
    self._errors = tempfile.TemporaryFile("w+")
    return subprocess.Popen(
      [sys.executable, "-m", "benchmarks.peer_process", self._peer.name],
      cwd=ROOT,
      # JAX there is for masks alone.
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._errors,
      text=True,
    )

  def _ask(self, question: dict) -> dict[str, Any]:
    self._process = self._process or self._start()
    assert self._process.stdin is not None and self._process.stdout is not None
    try:
      self._process.stdin.write(json.dumps(question) + "\n")
      self._process.stdin.flush()
    except BrokenPipeError:
      return self._end()
    if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
      self._process.kill()
      self._end()
      return {"note": f"gave no answer in {PATIENCE:.0f} s"}
    line = self._process.stdout.readline()
    return json.loads(line) if line else self._end()

  def _end(self) -> dict[str, Any]:
    assert self._process is not None
    status = self._process.wait()
    self._process = None
    self._errors.seek(0)
    last = (self._errors.read().strip().splitlines() or [""])[-1]
    return {"note": f"its process ended with status {status}: {last[:200]}"}

  def close(self) -> None:
    """Ends the process."""
    if self._process is not None:
      self._process.communicate()  # The end of its questions is its end.
      self._process = None


@dataclasses.dataclass(frozen=True)
class _Here:
  """A peer in this process."""

  peer: Peer

  def absence(self) -> str | None:
    return self.peer.absence()

  def timed(self, cell: Cell) -> dict[str, Any]:
    return timed(self.peer, cell)

  def close(self) -> None:
    pass


class Beside:
  """The peers of a run: those that are available, and the reasons why others are not."""

  def __init__(self, peers: Sequence[Peer] = PEERS):
    self.peers = {peer.name: peer for peer in peers}
    self.absences: dict[str, str] = {}
    self._runners: dict[str, PeerProcess | _Here] = {}
    for name, peer in self.peers.items():
      runner = PeerProcess(peer) if peer.framework == "torch" else _Here(peer)
      reason = peer.missing() or runner.absence()
      if reason is None:
        self._runners[name] = runner
      else:
        self.absences[name] = reason
        runner.close()

  def __enter__(self) -> Beside:
    return self

  def __exit__(self, *_) -> None:
    for runner in self._runners.values():
      runner.close()

  @property
  def present(self) -> list[str]:
    """The names of the available peers."""
    return list(self._runners)

  def describe(self) -> dict[str, dict]:
    """What each peer supports, and why it is absent, for the results."""
    return {
      name: peer.abilities() | {"absence": self.absences.get(name)}
      for name, peer in self.peers.items()
    }

  def summary(self) -> str:
    """Lines with the available peers, and the reasons why others are not available."""
    return "\n".join(peer_report.presence(self.describe()))

  def times(self, cell: Cell, names: Sequence[str] | None = None) -> tuple[dict, dict]:
    """Seconds by peer, and notes by peer that failed. Unsupported cells are in neither."""
    times, notes = {}, {}
    for name, runner in self._runners.items():
      if (names is not None and name not in names) or self.peers[name].obstacle(cell) is not None:
        continue
      answer = runner.timed(cell)
      if "seconds" in answer:
        times[name] = answer["seconds"]
      else:
        notes[name] = answer["note"]
    return times, notes
