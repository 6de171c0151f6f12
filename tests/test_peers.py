"""Peers in benchmarks: available ones are timed, others listed with a reason; none ends a run."""

import dataclasses
import json

import jax
import matplotlib.figure
import numpy as np
import pytest

import jax_magi
from benchmarks import attention, attention_gpu, beside, jax_passes, peer_report
from benchmarks.beside import Beside, PeerProcess, timed
from benchmarks.masks import MASKS
from benchmarks.peers import PEERS, Cell, Peer, as_ranges
from jax_magi import AttentionMask

BY_NAME = {peer.name: peer for peer in PEERS}
XLA = BY_NAME["xla"]


def _cell(name="causal", length=96, **changes):
  return Cell(name, MASKS[name](length), 16, 2, 1, "float32", **changes)


def _attend(mask):
  return lambda q, k, v: jax_magi.attention(q, k, v, mask)[0]


def _ours(cell):
  return [_attend(cell.mask)]


def _raise(*_):
  raise RuntimeError("out of order\nand more of it")


GOOD = Peer("good", "Good", _ours)
ABSENT = Peer("absent", "Absent", _ours, absence=lambda: "needs a moon")
FAILING = Peer("failing", "Failing", _raise)
# A peer that ignores the mask, and is right otherwise.
WRONG = Peer("wrong", "Wrong", lambda _: _ours(_cell("full")))


@pytest.mark.parametrize("name", list(MASKS))
def test_xla_computes_every_mask_on_a_cpu_too(name):
  with Beside([XLA]) as peers:
    assert peers.present == ["xla"]
    times, notes = peers.times(_cell(name))
  assert times["xla"] > 0 and notes == {}


def test_times_are_of_what_is_asked_for():
  for direction in ("forward", "backward", "both"):
    assert timed(GOOD, _cell(direction=direction))["seconds"] > 0


def test_an_absent_peer_is_named_with_the_reason():
  unknown = dataclasses.replace(
    GOOD, name="unknown", title="Unknown", needs=("json", "no_such_one")
  )
  with Beside([GOOD, ABSENT, unknown]) as peers:
    assert peers.present == ["good"]
    described = peers.describe()
    assert described["good"]["absence"] is None
    assert described["absent"]["absence"] == "needs a moon"
    assert described["unknown"]["absence"] == "there is no module no_such_one"
    assert "Absent: not here: needs a moon" in peers.summary()
    times, notes = peers.times(_cell())
  assert set(times) == {"good"} and notes == {}
  json.dumps(described)


def test_a_peer_that_fails_is_a_note_and_others_are_timed():
  with Beside([FAILING, GOOD]) as peers:
    times, notes = peers.times(_cell())
  assert notes == {"failing": "RuntimeError: out of order"} and set(times) == {"good"}


def test_the_fastest_way_that_works_counts(monkeypatch):
  seconds = {"slow": 2.0, "fast": 1.0}
  ways = {name: _ours(_cell())[0] for name in seconds}
  peer = Peer("tuned", "Tuned", lambda _: [ways["slow"], _raise, ways["fast"]])
  monkeypatch.setattr(
    jax_passes, "seconds", lambda way, *_: next(seconds[n] for n in ways if ways[n] is way)
  )
  assert timed(peer, _cell()) == {"seconds": 1.0}


def test_ways_may_depend_on_the_direction():
  peer = Peer("tuned", "Tuned", lambda cell: _ours(cell) * (3 if cell.direction == "both" else 1))
  assert timed(peer, _cell())["seconds"] > 0
  calls = []
  failing_first = Peer(
    "last", "Last", lambda cell: [lambda *x: (calls.append(x), _raise())] * 2 + _ours(cell)
  )
  assert timed(failing_first, _cell(direction="backward"))["seconds"] > 0
  assert len(calls) == 2


def test_a_peer_that_computes_something_else_is_not_compared():
  assert "computes something else" in timed(WRONG, _cell())["note"]
  # One key too many in a window of 1024. A mean error would not detect it.
  mask = AttentionMask.sliding_window(1500, left=1023)
  other = Cell("window", AttentionMask.sliding_window(1500, left=1024), 64, 2, 1, "bfloat16")
  peer = Peer("window", "Window", lambda _: _ours(other))
  assert "window is off by" in timed(peer, dataclasses.replace(other, mask=mask))["note"]
  assert "seconds" in timed(peer, other)


def test_rows_that_see_nothing_are_not_compared():
  cell = _cell("shared_question", 301)
  assert not cell.mask.to_dense().any(axis=1).all()
  assert "seconds" in timed(XLA, cell)


def test_peers_get_only_what_they_can_do():
  mosaic = BY_NAME["mosaic_gpu"]
  assert mosaic.obstacle(_cell("window")) == "has no mask window"
  assert mosaic.obstacle(_cell("causal")) == "has no head dim 16"
  causal = dataclasses.replace(_cell("causal", direction="backward"), head_dim=128)
  assert mosaic.obstacle(causal) == "has no backward pass of causal"
  assert mosaic.obstacle(dataclasses.replace(causal, direction="forward")) is None
  assert "GB for scores" in XLA.obstacle(dataclasses.replace(_cell("causal", 8192), num_q_heads=64))
  with Beside([dataclasses.replace(GOOD, masks=("full",))]) as peers:
    assert peers.times(_cell("causal")) == ({}, {})


@pytest.mark.parametrize("name", list(MASKS))
def test_ranges_show_the_same_pairs(name):
  for length in (700, 3000):
    mask = MASKS[name](length)
    q_ranges, k_ranges, types = as_ranges(mask)
    same = AttentionMask.from_ranges(q_ranges, k_ranges, types, q_len=length, k_len=length)
    np.testing.assert_array_equal(same.to_dense(), mask.to_dense())


def test_cells_travel_between_processes():
  cell = _cell("shared_question", 3000, direction="backward")
  assert Cell.from_json(json.loads(json.dumps(cell.to_json()))) == cell


@pytest.mark.long
def test_a_peer_in_a_process_of_its_own():
  process = PeerProcess(XLA)
  assert process.absence() is None
  assert process.timed(_cell())["seconds"] > 0
  process._process.kill()
  note = process.timed(_cell())["note"]
  assert "its process ended with status -9" in note
  assert process.timed(_cell())["seconds"] > 0  # In another one.
  process.close()
  assert process._process is None


def test_a_process_that_cannot_start_is_an_absence():
  process = PeerProcess(dataclasses.replace(XLA, name="nobody"))
  assert "its process ended with status 1: ValueError" in process.absence()


def test_a_process_that_hangs_is_a_note(monkeypatch):
  monkeypatch.setattr(beside, "PATIENCE", 0.0)
  process = PeerProcess(XLA)
  assert "gave no answer in 0 s" in process.timed(_cell())["note"]


def test_results_and_plots_on_a_cpu(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(attention, "LENGTH", 64)
  monkeypatch.setattr(attention, "MEMORY_LENGTHS", (64,))
  monkeypatch.setattr(attention, "PEERS", (XLA, ABSENT, FAILING))
  monkeypatch.setattr(attention, "peak_memory_mb", lambda *_: 1.0)
  paths = {kind: tmp_path / f"attention.{kind}" for kind in ("json", "png")}
  attention.main(["--json", str(paths["json"]), "--plot", str(paths["png"])])
  results = json.loads(paths["json"].read_text())
  assert results["peers"]["absent"]["absence"] == "needs a moon"
  rows = {(row["mask"], row["by"]): row for row in results["times"]}
  assert rows["causal", "xla"]["both_ms"] > 0
  assert rows["documents", "failing"]["note"] == "RuntimeError: out of order"
  assert paths["png"].stat().st_size > 1000
  printed = capsys.readouterr().out
  assert "Absent: not here: needs a moon" in printed and "RuntimeError: out of order" in printed


@pytest.fixture
def ours_anywhere(monkeypatch):
  """The benchmark for GPUs, with our implementation on any device."""
  monkeypatch.setattr(attention_gpu, "_ours", lambda mask, **_: _attend(mask))
  monkeypatch.setattr(attention_gpu, "MODELS", [(16, 2, 1)])
  monkeypatch.setattr(attention_gpu, "matrix_product_rate", lambda: 1.0)


@pytest.mark.usefixtures("ours_anywhere", "with_promotion")
def test_results_and_plots_of_a_gpu(tmp_path, monkeypatch, capsys):
  masks = {name: MASKS[name] for name in ("full", "causal")}
  monkeypatch.setattr(attention_gpu, "MASKS", masks)
  paths = {kind: tmp_path / f"attention.{kind}" for kind in ("json", "png")}
  drawn = []
  figure = matplotlib.figure.Figure
  save = figure.savefig
  monkeypatch.setattr(figure, "savefig", lambda *a, **k: (drawn.append(a[0]), save(*a, **k)))
  peers, choice = [XLA, ABSENT, FAILING], attention_gpu.Choice()
  attention_gpu.main(paths["json"], paths["png"], ["forward", "backward"], [96], peers, choice)
  results = json.loads(paths["json"].read_text())
  for part in ("forward", "backward"):
    assert [row["mask"] for row in results[part]] == ["full", "causal"]
    for row in results[part]:
      assert row["ours"] > 0 and row["xla"] > 0
      assert row["notes"]["failing"] == "RuntimeError: out of order"
      assert "absent" not in row
    assert (tmp_path / f"attention_{part}.png").stat().st_size > 1000
  for found in drawn:
    labels = [text.get_text() for legend in found.legends for text in legend.get_texts()]
    assert labels == ["jax_magi", "XLA"]
  assert "Absent: not here: needs a moon" in capsys.readouterr().out


@pytest.mark.usefixtures("with_promotion")
def test_an_implementation_is_timed_beside_the_plain_path(monkeypatch, capsys):
  used = []
  attention = jax_magi.attention

  def spy(*operands, implementation, **options):
    used.append(implementation)
    return attention(*operands, implementation="blockwise", **options)

  monkeypatch.setattr(attention_gpu, "matrix_product_rate", lambda: 1.0)
  monkeypatch.setattr(jax_magi, "attention", spy)
  choice = attention_gpu.Choice((16, 16), "cuda_sm80", ("causal",))
  attention_gpu.main(None, None, ["forward"], [64], [BY_NAME["blockwise"]], choice)
  assert set(used) == {"cuda_sm80", "blockwise"}
  assert "x plain JAX" in capsys.readouterr().out
  of_default = Cell("causal", MASKS["causal"](64), 16, 2, 2)
  assert "--implementation" in BY_NAME["blockwise"].obstacle(of_default)


def test_a_report_names_absent_peers_and_notes():
  figures = {
    "peers": {n: {"title": n, "absence": r} for n, r in (("a", None), ("b", "needs a moon"))},
    "forward": [{"mask": "full", "notes": {"a": "RuntimeError: out of order"}}],
  }
  lines = peer_report.lines(figures)
  assert any("b: not here: needs a moon" in line for line in lines)
  assert any("a failed in 1 of its cells: RuntimeError: out of order" in line for line in lines)
  assert peer_report.lines({"times": []}) == []


def test_mosaic_and_cudnn_need_a_gpu():
  if jax.default_backend() == "gpu":
    pytest.skip("there is one")
  for name in ("cudnn", "mosaic_gpu"):
    assert BY_NAME[name].absence() == "needs an NVIDIA GPU"
