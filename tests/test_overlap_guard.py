"""What the overlap tool rejects: exposed exchanges, and ragged ones that became all-gathers."""

import json

import pytest

from jax_magi import overlap
from tests.test_overlap_schedule import DATA, _attention, _computation, _done, _program, _start

HIDDEN = 'metadata={op_name="jit(step)/jvp(jax_magi_exchange_%s)/x" stack_frame_id=7}'
SINGLE = 'metadata={op_name="jit(step)/jvp(jax_magi_single_exchange_%s)/x"}'


def _in_scope(kind, scope=HIDDEN):
  return f", {scope % kind}"


def _faults(*lines, computations=()):
  return overlap.faults_of(overlap.schedule_of(_program(*lines, computations=computations)))


def _exchange(text):
  (collective,) = overlap.schedule_of(text).collectives
  return collective.exchange, collective.is_single


KINDS = ["all_to_all", "all_gather", "permute", "ragged"]


@pytest.mark.parametrize("kind", KINDS)
def test_exchanges_are_known_by_their_scope(kind):
  lines = [_start(more=_in_scope(kind)), _attention("a"), _done()]
  assert _exchange(_program(*lines)) == (kind, False)
  single = [_start(more=_in_scope(kind, SINGLE)), _attention("a"), _done()]
  assert _exchange(_program(*single)) == (kind, True)


def test_scopes_of_others_are_none_of_ours():
  for name in ("my_jax_magi_exchange_ragged", "jax_magi_exchange_of_mine", "moe/all_to_all"):
    other = _start(more=f', metadata={{op_name="jit(step)/{name}/x"}}')
    assert _exchange(_program(other, _attention("a"), _done())) == (None, False)


def test_a_collective_in_a_call_keeps_its_scope():
  inner = f"%inner = f32[64]{{0}} all-to-all(%x.wrapped){_in_scope('all_to_all')}"
  start = "%s = ((f32[8]{0}), f32[64]{0}) async-start(%p), calls=%wrapped"
  done = "%d = f32[64]{0} async-done(%s)"
  wrapped = [_computation("wrapped", inner)]
  hidden = [start, _attention("a"), done]
  assert _exchange(_program(*hidden, computations=wrapped)) == ("all_to_all", False)
  assert not _faults(*hidden, computations=wrapped)
  (fault,) = _faults(start, done, _attention("a"), computations=wrapped)
  assert fault.startswith("s in main: the exchange (all_to_all) is exposed")


def test_an_exchange_beside_attention_is_right():
  assert not _faults(_start(more=_in_scope("all_gather")), _attention("a"), _done())


def test_an_exchange_beside_nothing_is_rejected():
  lines = [_start(more=_in_scope("all_gather")), _done(), _attention("a")]
  (fault,) = _faults(*lines)
  assert fault.startswith("all-gather-start in main: the exchange (all_gather) is exposed")
  assert "no attention kernel" in fault
  assert "recommended_flags()" in fault


def test_a_synchronous_exchange_is_rejected():
  sync = ', backend_config={"collective_backend_config":{"is_sync":true}}'
  for more in (_in_scope("permute") + sync, sync + _in_scope("permute")):
    (fault,) = _faults(_start(more=more), _attention("a"), _done())
    assert "synchronously" in fault
  plain = f"%all-to-all.1 = f32[8]{{0}} all-to-all(%p){_in_scope('all_to_all')}"
  (fault,) = _faults(plain, _attention("a"))
  assert "synchronously" in fault


def test_matmuls_are_not_what_an_exchange_hides_behind():
  matmul = '%m = f32[8]{0} custom-call(%p), custom_call_target="__cublas$lt$matmul"'
  (fault,) = _faults(_start(more=_in_scope("all_gather")), matmul, _done(), _attention("a"))
  assert "no attention kernel" in fault


def test_what_nothing_can_hide_is_right():
  """Without overlap, there is one transfer, and the only kernel waits for it."""
  for kind in KINDS:
    more = _in_scope(kind, SINGLE)
    start, done = "all-to-all-start", "all-to-all-done"
    assert not _faults(_start(start, more=more), _done(done, start), _attention("a"))


def test_other_collectives_may_be_exposed():
  reduction = '%all-reduce.1 = f32[8]{0} all-reduce(%p), metadata={op_name="jit(step)/psum"}'
  assert not _faults(_start(), _done(), _attention("a"), reduction)


# In XLA's form: it drops the metadata of a ragged exchange, but not that of its operands.
_ZEROS = f"%zeros = f32[64]{{0}} fusion(), kind=kLoop, calls=%zero{_in_scope('ragged')}"
_OFFSETS = "%offsets = (s64[8]{0}, s64[8]{0}) fusion(%p), kind=kLoop, calls=%fused_offsets"
_ITEMS = [f"%o{i} = s64[8]{{0}} get-tuple-element(%offsets), index={i}" for i in range(2)]
_FUSED = _computation("fused_offsets", f"%i = s32[8]{{0}} iota(){_in_scope('ragged')}")
_UNKNOWN = _computation("fused_offsets", "%i = s32[8]{0} iota()")


def _ragged(rows="p", zeros="p"):
  operands = f"%{rows}, %{zeros}, %o0, %o1, %o0, %o1"
  return [
    f"%r = ((f32[64]{{0}}), f32[64]{{0}}) ragged-all-to-all-start({operands})",
    "%d = f32[64]{0} ragged-all-to-all-done(%r)",
  ]


def _by_name(*lines, computations=()):
  schedule = overlap.schedule_of(_program(*lines, computations=computations))
  return {c.name: c.exchange for c in schedule.collectives}


def test_a_ragged_exchange_is_known_by_what_it_takes():
  start, done = _ragged()
  lines = [_OFFSETS, *_ITEMS, start, _attention("a"), done]
  assert _by_name(*lines, computations=[_FUSED]) == {"r": "ragged"}
  assert _by_name(*lines, computations=[_UNKNOWN]) == {"r": None}
  assert not _faults(*lines, computations=[_FUSED])
  start, done = _ragged(zeros="zeros")
  lines = [_ZEROS, _OFFSETS, *_ITEMS, start, _attention("a"), done]
  assert _by_name(*lines, computations=[_UNKNOWN]) == {"r": "ragged"}
  exposed = [_OFFSETS, *_ITEMS, *_ragged(), _attention("a")]
  (fault,) = _faults(*exposed, computations=[_FUSED])
  assert fault.startswith("r in main: the exchange (ragged) is exposed")
  assert not _faults(*exposed, computations=[_UNKNOWN])


def test_a_ragged_exchange_of_what_attention_made_is_not_ours():
  """For example an exchange of experts, whose offsets depend on the result of attention."""
  attention = _attention("a", operand="zeros")
  offsets = _OFFSETS.replace("%p", "%a")
  lines = [_ZEROS, attention, offsets, *_ITEMS, *_ragged()]
  assert _by_name(*lines, computations=[_UNKNOWN]) == {"r": None}


def test_a_ragged_exchange_that_became_an_all_gather_is_rejected():
  """Over several nodes, XLA gathers the rows of all of them, and exchanges the rest inside each."""
  start, done = _ragged(rows="view")
  view = "%view = f32[64]{0} bitcast(%all-gather-done)"
  lines = [_OFFSETS, *_ITEMS, _start(), _attention("a"), _done(), view]
  lines += [start, _attention("b"), done]
  assert _by_name(*lines, computations=[_FUSED]) == {"all-gather-start": "ragged", "r": "ragged"}
  (fault,) = _faults(*lines, computations=[_FUSED])
  assert fault.startswith("all-gather-start in main: XLA has turned a ragged exchange")
  assert "transport='two_level'" in fault
  assert not _faults(*lines, computations=[_UNKNOWN])


def test_a_named_all_gather_of_a_ragged_exchange_is_rejected():
  for scope in (HIDDEN, SINGLE):
    (fault,) = _faults(_start(more=_in_scope("ragged", scope)), _attention("a"), _done())
    assert "XLA has turned a ragged exchange into an all-gather" in fault


def test_command_rejects_a_program(tmp_path, capsys):
  path, figures = DATA / "two_nodes_without_options.hlo.txt", tmp_path / "figures.json"
  assert overlap.main(["--hlo", str(path), "--json", str(figures)]) == 1
  captured = capsys.readouterr()
  assert "all-to-all-start      all_to_all   8.4 MB   sync  nothing" in captured.out
  faults = captured.err.splitlines()
  names = [fault.split()[1] for fault in faults]
  assert names == ["all-to-all-start", "all-to-all-start.2"]
  assert all(fault.startswith("jax_magi.overlap: ") for fault in faults)
  assert json.loads(figures.read_text())["faults"] == [
    fault.removeprefix("jax_magi.overlap: ") for fault in faults
  ]
