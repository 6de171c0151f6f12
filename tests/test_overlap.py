"""The reports of the overlap tool on profiles."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_magi
from jax_magi import overlap
from jax_magi._src.overlap import intervals
from jax_magi._src.overlap.kinds import kernel_kind, short_name
from jax_magi.overlap import Kernel, Kind, Overlap, Step, Wait, measure
from tests.cp_runs import make_mesh
from tests.profiles import BACKWARD, COMPUTE, FORWARD, NCCL, TRANSFER, Event, write_profile

_PS_PER_US = 10**6


# Intervals: each function against the sets of points that they stand for.

_INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def _points(spans):
  return {point for begin, end in spans for point in range(begin, end)}


def _is_normal(spans):
  flat = [edge for span in spans for edge in span]
  return flat == sorted(set(flat))  # Sorted, disjoint, not empty, and none touches the next.


@given(_INTERVALS)
def test_union(spans):
  union = intervals.union(spans)
  assert _is_normal(union)
  assert _points(union) == _points(spans)
  assert intervals.length(union) == len(_points(spans))


@given(_INTERVALS, _INTERVALS)
def test_intersection_and_difference(a, b):
  a, b = intervals.union(a), intervals.union(b)
  both, rest = intervals.intersection(a, b), intervals.difference(a, b)
  assert _is_normal(both)
  assert _is_normal(rest)
  assert _points(both) == _points(a) & _points(b)
  assert _points(rest) == _points(a) - _points(b)
  assert intervals.union(both + rest) == a


# A step.

_KERNELS = st.lists(
  st.builds(
    lambda kind, name, begin, length: Kernel(name, "", kind, "s", begin, begin + length),
    st.sampled_from(Kind),
    st.sampled_from("abc"),
    st.integers(0, 30),
    st.integers(1, 12),
  ),
  min_size=1,
  max_size=12,
)


@given(_KERNELS)
def test_each_moment_of_communication_is_counted_once_and_rightly(kernels):
  result = measure(Step("0", "GPU:0", tuple(sorted(kernels, key=lambda k: k.begin_ps))))

  def moments(kind, name=None):
    chosen = [k for k in kernels if k.kind is kind and name in (None, k.name)]
    return _points((k.begin_ps, k.end_ps) for k in chosen)

  attention, other = moments(Kind.ATTENTION), moments(Kind.OTHER)

  def expected(communication):
    exposed = communication - attention - other
    beside_attention = communication & attention
    rest = communication - attention - exposed
    return Overlap(len(beside_attention), len(rest), len(exposed))

  assert result.overlap == expected(moments(Kind.COMMUNICATION))
  for collective in result.collectives:
    assert collective.overlap == expected(moments(Kind.COMMUNICATION, collective.name))
    assert sum(wait.time_ps for wait in collective.waits) == collective.overlap.exposed


def _kernels(*rows):
  return tuple(
    Kernel(name, "", kind, "s", begin, end)
    for name, kind, begin, end in sorted(rows, key=lambda row: row[2])
  )


def test_waits_name_what_ended_before_and_what_began_after():
  step = Step(
    "0",
    "GPU:0",
    _kernels(
      ("first", Kind.OTHER, 0, 10),
      ("transfer", Kind.COMMUNICATION, 12, 40),
      ("attention", Kind.ATTENTION, 20, 30),
      ("last", Kind.OTHER, 45, 50),
      ("late", Kind.COMMUNICATION, 50, 60),
    ),
  )
  transfer, late = measure(step).collectives
  assert transfer.overlap == Overlap(attention=10, other=0, exposed=18)
  assert transfer.waits == (Wait("attention", "last", 10), Wait("first", "attention", 8))
  assert late.waits == (Wait("last", "the step's end", 10),)


@pytest.mark.parametrize(
  ("kernel", "hlo_op", "kind"),
  [
    (FORWARD, "ffi_call.3", Kind.ATTENTION),
    (BACKWARD, "", Kind.ATTENTION),
    ("_ZN8jax_magi4cuda4sm9013ForwardKernelINS1_6ConfigEEEvT_", "", Kind.ATTENTION),
    ("jax_magi::cuda::PrepareBackwardKernel(PrepareArgs)", "ffi_call.4", Kind.OTHER),
    ("void jax_magi::cuda::SoftmaxForwardKernel<float>(P)", "ffi_call.5", Kind.OTHER),
    ("void other::ForwardKernel<float>(P)", "", Kind.OTHER),
    (NCCL, "", Kind.COMMUNICATION),
    ("void xla::RaggedAllToAllKernelImpl<4l>(void*)", "", Kind.COMMUNICATION),
    ("void jax_magi::StandInCommunicationKernel<8>(Args)", "ffi_call.9", Kind.COMMUNICATION),
    ("MemcpyP2P", "", Kind.COMMUNICATION),
    ("MemcpyD2D", "all-gather-start.2", Kind.COMMUNICATION),
    ("MemcpyD2D", "copy.2", Kind.OTHER),
    ("input_reduce_scatter_fusion", "input_reduce_scatter_fusion", Kind.OTHER),
    ("wrapped", "psum_invariant.7", Kind.COMMUNICATION),
    ("loop_fusion", "all-gather-like.3", Kind.OTHER),
    ("void cutlass::gemm<ncclThing>(AllReduceArgs)", "", Kind.OTHER),
  ],
)
def test_kinds_of_kernels(kernel, hlo_op, kind):
  assert kernel_kind(kernel, hlo_op) is kind


def test_names_are_short():
  assert short_name(FORWARD) == "ForwardKernel"
  assert short_name(NCCL) == "ncclDevKernel_SendRecv"
  assert short_name("void (anonymous namespace)::Reset<int>(int*)") == "Reset"


@pytest.mark.parametrize(
  ("kernel", "hlo_op", "name"),
  [
    ("ncclDevKernel_SendRecv", "all-to-all-start.1", "all-to-all-start.1"),
    ("StandInCommunicationKernel", "ffi_call.3", "StandInCommunicationKernel (ffi_call.3)"),
    ("ncclDevKernel_SendRecv", "", "ncclDevKernel_SendRecv"),
  ],
)
def test_collectives_have_the_name_that_tells_most(kernel, hlo_op, name):
  step = Step("0", "GPU:0", (Kernel(kernel, hlo_op, Kind.COMMUNICATION, "s", 0, 1),))
  assert [collective.name for collective in measure(step).collectives] == [name]


# Profiles of GPUs.


def _gpu(shift=0):
  """A step of 100 us: a transfer of 40 overlaps attention for 20 and a fusion for 5."""
  return {
    COMPUTE: [
      Event("fusion", shift, shift + 20, {"hlo_op": "fusion.1", "correlation_id": shift + 1}),
      Event(FORWARD, shift + 40, shift + 80, {"hlo_op": "ffi_call.7", "correlation_id": shift + 2}),
      Event("MemoryAlloc", shift, shift + 100),
    ],
    TRANSFER: [
      Event(NCCL, shift + 15, shift + 40, {"hlo_op": "all-to-all-start.1"}),
      Event(NCCL, shift + 60, shift + 75, {"hlo_op": "all-to-all-start.1"}),
    ],
  }


def _merged(*parts):
  return {line: [e for part in parts for e in part.get(line, [])] for line in parts[0]}


_ONE = Overlap(15 * _PS_PER_US, 5 * _PS_PER_US, 20 * _PS_PER_US)


def test_a_profile_without_steps_is_one(tmp_path):
  write_profile(tmp_path, {"/device:GPU:0": _gpu(), "/host:CPU": {}})
  trace = overlap.read_trace(tmp_path)
  (step,) = trace.steps
  assert (step.label, step.device) == ("all", "GPU:0")
  result = measure(step)
  assert result.overlap == _ONE
  (collective,) = result.collectives
  assert (collective.name, collective.count) == ("all-to-all-start.1", 2)
  assert collective.waits == (
    Wait("fusion (fusion.1)", "ForwardKernel (ffi_call.7)", 20 * _PS_PER_US),
  )


def test_steps_by_annotation_follow_launches(tmp_path):
  """The host is ahead: both steps are launched before the device begins the second."""
  device = _merged(_gpu(), _gpu(100))
  for line in device.values():
    for event in line:
      event.stats["correlation_id"] = 100 * event.begin + event.end
  launches = [
    Event("cuLaunchKernel", 2 + 20 * (e.begin >= 100), 3 + 20 * (e.begin >= 100), dict(e.stats))
    for line in device.values()
    for e in line
  ]
  marks = [Event("train", 20 * i, 20 * i + 10, {"step_num": 5 + i}) for i in range(2)]
  host = {"python": [*marks, Event("$function", 0, 1)], "launcher": launches}
  write_profile(tmp_path, {"/device:GPU:0": device, "/host:CPU": host})
  trace = overlap.read_trace(tmp_path)
  assert trace.step_source == "jax.profiler.StepTraceAnnotation"
  assert trace.labels == ["train 5", "train 6"]
  assert [measure(step).overlap for step in trace.steps] == [_ONE, _ONE]


@pytest.mark.parametrize(
  ("line", "labels"),
  [("Steps", ["1", "2"]), ("XLA Modules", ["1 0", "2 1"])],
)
def test_steps_that_the_device_marks(tmp_path, line, labels):
  device = _merged(_gpu(), _gpu(100)) | {line: [Event("1", 0, 100), Event("2", 100, 200)]}
  write_profile(tmp_path, {"/device:GPU:0": device})
  trace = overlap.read_trace(tmp_path)
  assert trace.labels == labels
  assert [measure(step).overlap for step in trace.steps] == [_ONE, _ONE]


def test_steps_of_the_device_do_not_follow_launches(tmp_path):
  device = _merged(_gpu(), _gpu(100)) | {"Steps": [Event("1", 0, 100), Event("2", 100, 200)]}
  launches = [
    Event("cuLaunchKernel", 0, 1, dict(event.stats)) for event in device[COMPUTE] if event.stats
  ]
  write_profile(tmp_path, {"/device:GPU:0": device, "/host:CPU": {"launcher": launches}})
  steps = overlap.read_trace(tmp_path).steps
  assert [measure(step).overlap for step in steps] == [_ONE, _ONE]


def test_what_runs_before_the_first_step_is_left_out(tmp_path):
  device = _merged(_gpu(), _gpu(100))
  marks = [Event("train", 100, 200, {"step_num": 3})]
  write_profile(tmp_path, {"/device:GPU:0": device, "/host:CPU": {"python": marks}})
  (step,) = overlap.read_trace(tmp_path).steps
  assert step.label == "train 3"
  assert measure(step).overlap == _ONE


def test_loops_of_cpus_do_not_hide_what_they_hold(tmp_path):
  names = {"while.1": (0, 30), "all-to-all.2": (0, 10), "ffi_call.3": (10, 20), "add.4": (5, 7)}
  thunks = {
    f"thread {name}": [Event(name, *when, {"hlo_op": name, "device_ordinal": 1})]
    for name, when in names.items()
  }
  write_profile(tmp_path, {"/host:CPU": thunks})
  (step,) = overlap.read_trace(tmp_path).steps
  assert step.device == "CPU:1"
  assert measure(step).overlap == Overlap(0, 2 * _PS_PER_US, 8 * _PS_PER_US)


def test_several_hosts_and_devices_of_the_newest_profile(tmp_path):
  write_profile(tmp_path, {"/device:GPU:0": _gpu()}, host="a", time="1")
  gpus = {f"/device:GPU:{i}": _gpu() for i in (10, 2)}
  files = [write_profile(tmp_path, gpus, host=host, time="2") for host in "ab"]
  trace = overlap.read_trace(tmp_path)
  assert trace.paths == tuple(files)
  assert trace.devices == ["a GPU:2", "a GPU:10", "b GPU:2", "b GPU:10"]
  assert overlap.read_trace(files[0]).devices == ["GPU:2", "GPU:10"]


def test_graphs_that_hide_their_kernels_are_told(tmp_path):
  device = _merged(_gpu(), {COMPUTE: [Event("CudaGraphExec:1", 90, 95)]})
  write_profile(tmp_path, {"/device:GPU:0": device})
  (note,) = overlap.read_trace(tmp_path).notes
  assert "xla_gpu_enable_command_buffer" in note


# The command.


def _run(*arguments):
  return overlap.main([str(argument) for argument in arguments])


def test_command_reports_draws_and_writes(tmp_path, capsys):
  pytest.importorskip("matplotlib")
  write_profile(tmp_path, {f"/device:GPU:{i}": _gpu() for i in range(2)})
  png, figures = tmp_path / "picture.png", tmp_path / "figures.json"
  assert _run(tmp_path, "--png", png, "--json", figures) == 0
  out = capsys.readouterr().out
  assert "37.5% of communication overlapped attention, 50.0% overlapped any work" in out
  assert "0.040 exposed after fusion (fusion.1), before ForwardKernel (ffi_call.7)" in out
  assert str(png) in out
  assert png.read_bytes().startswith(b"\x89PNG")
  total = json.loads(figures.read_text())["total"]
  assert total == {
    "communication_ms": 0.08,
    "attention_ms": 0.03,
    "other_ms": 0.01,
    "exposed_ms": 0.04,
    "hidden_share": 0.5,
    "attention_share": 0.375,
  }


@pytest.mark.parametrize(("share", "status"), [("0.5", 0), ("0.51", 1)])
def test_command_can_require_a_share(tmp_path, capsys, share, status):
  write_profile(tmp_path, {"/device:GPU:0": _gpu()})
  assert _run(tmp_path, "--no-png", "--require-hidden", share) == status
  assert ("--require-hidden is 0.51" in capsys.readouterr().err) == bool(status)


def test_command_draws_the_step_it_is_asked_for(tmp_path, capsys):
  pytest.importorskip("matplotlib")
  device = _merged(_gpu(), _gpu(100)) | {"Steps": [Event("7", 0, 100), Event("8", 100, 200)]}
  write_profile(tmp_path, {"/device:GPU:0": device})
  for step in ("7", "8"):
    assert _run(tmp_path, "--png", tmp_path / "p.png", "--step", step) == 0
    assert f"picture of {step} of GPU:0" in capsys.readouterr().out
  assert _run(tmp_path, "--step", "9") == 2
  assert "there is no step 9: there are 7, 8" in capsys.readouterr().err


def test_picture_shows_hidden_and_exposed(tmp_path):
  pytest.importorskip("matplotlib")
  write_profile(tmp_path, {"/device:GPU:0": _gpu()})
  (step,) = overlap.read_trace(tmp_path).steps
  axes = overlap.plot_step(step)
  assert [label.get_text() for label in axes.get_yticklabels()] == [COMPUTE, TRANSFER]

  def length(label):
    """The total length of all bars of this colour, in ms."""
    bars = [c for c in axes.collections if c.get_label() == label]
    boxes = [path.get_extents() for c in bars for path in c.get_paths()]
    return sum(box.width for box in boxes)

  assert length("communication, hidden") == pytest.approx(0.020)
  assert length("communication, exposed") == pytest.approx(0.020)


def test_command_line():
  command = [sys.executable, "-m", "jax_magi.overlap", "nowhere"]
  result = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert result.returncode == 2
  assert result.stderr.startswith("jax_magi.overlap: nowhere does not exist: record one with")
  assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [[], ["a", "--hlo", "b"], ["--hlo", "a", "--step", "1"]])
def test_command_takes_one_of_the_two(arguments, capsys):
  with pytest.raises(SystemExit, match="2"):
    _run(*arguments)
  assert "TRACE" in capsys.readouterr().err


def _only(kernel):
  return {"/device:GPU:0": {COMPUTE: [Event(kernel, 0, 10)]}}


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"no profile" * 50, "is not a profile"),
    (b"", "holds nothing in its 0 bytes"),
    (np.random.default_rng(0).bytes(5000), "is not a profile"),
    ({"/device:TPU:0": {"XLA Ops": [Event("op", 0, 1)]}}, r"only \['/device:TPU:0'\]"),
    ({"/host:CPU": {"python": [Event("work", 0, 1)]}}, "no kernels of a GPU"),
    ({"/device:GPU:0": {}}, "no kernels of a GPU"),
    (_only(FORWARD), "has no communication"),
    (_only(NCCL), "has no attention kernels of jax_magi"),
  ],
)
def test_other_files_are_told_what_they_are(tmp_path, capsys, content, message):
  path = tmp_path / "plugins" / "a.xplane.pb"
  path.parent.mkdir()
  if isinstance(content, bytes):
    path.write_bytes(content)
  else:
    path = write_profile(tmp_path, content)
  with pytest.raises(ValueError, match=message):
    overlap.read_trace(path)
  assert _run(tmp_path, "--no-png") == 2
  assert "jax.profiler.trace" in (error := capsys.readouterr().err) or "record a step" in error


def test_a_folder_without_a_profile(tmp_path, capsys):
  assert _run(tmp_path) == 2
  assert "has no *.xplane.pb below it" in capsys.readouterr().err


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_damaged_profiles_never_crash(tmp_path_factory, data):
  folder = tmp_path_factory.mktemp("damaged")
  path = write_profile(folder, {"/device:GPU:0": _gpu()})
  content = bytearray(path.read_bytes())
  for _ in range(data.draw(st.integers(1, 4))):
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
  path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
  assert _run(folder, "--no-png") in (0, 2)


def test_profile_that_jax_records(tmp_path, capsys):
  """On CPUs, collectives overlap nothing."""
  mesh = make_mesh(cp=4)
  key = jax_magi.magi_attn_varlen_key([0, 40, 64], causal=True, cp_size=4, overlap_degree=1)
  q, k, v = (jnp.ones((64, heads, 16)) for heads in (4, 2, 2))
  step = jax.jit(lambda *x: jax_magi.context_parallel_attention(*x, key, mesh=mesh)[0])
  jax.block_until_ready(step(q, k, v))
  with jax.profiler.trace(tmp_path):
    for number in range(3):
      with jax.profiler.StepTraceAnnotation("train", step_num=number):
        jax.block_until_ready(step(q, k, v))
  trace = overlap.read_trace(tmp_path)
  assert trace.labels == ["train 0", "train 1", "train 2"]
  assert trace.devices == [f"CPU:{i}" for i in range(4)]
  assert len(trace.steps) == 12
  counts = {tuple(sorted((c.name, c.count) for c in measure(s).collectives)) for s in trace.steps}
  assert len(counts) == 1  # All devices run the same program in all steps.
  assert all(sum(k.kind is Kind.ATTENTION for k in step.kernels) == 2 for step in trace.steps)
  assert _run(tmp_path, "--no-png") == 0
  assert "profile of CPUs" in capsys.readouterr().out


@pytest.mark.parametrize(("sm_margin", "is_hidden"), [(0, False), (16, True)])
def test_profiles_of_an_h200(sm_margin, is_hidden):
  """Attention, and a stand-in for communication on 16 SMs, 0.2 ms after it."""
  trace = overlap.read_trace(Path(__file__).parent / "data" / f"h200_margin_{sm_margin}.xplane.pb")
  assert trace.devices == ["GPU:0"]
  assert trace.labels == [f"step {number}" for number in range(6)]
  for step in trace.steps:
    attention = [k for k in step.kernels if k.kind is overlap.Kind.ATTENTION]
    assert [k.name for k in attention] == ["ForwardKernel"]
    (collective,) = overlap.measure(step).collectives
    assert collective.count == 1
    (communication,) = [k for k in step.kernels if k.kind is overlap.Kind.COMMUNICATION]
    assert 2.5e9 < communication.end_ps - communication.begin_ps < 3.5e9
    if is_hidden:
      assert collective.overlap.attention_share == 1.0
      assert not collective.waits
    else:
      assert collective.overlap.attention_share < 0.01
      assert communication.begin_ps > attention[0].end_ps - 2e7  # It waited for the kernel.
