"""The reports of the overlap tool on the order of compiled programs."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import overlap
from jax_magi._src.overlap.hlo_text import num_bytes, parse
from jax_magi._src.overlap.kinds import Kind, custom_call_kind
from tests.cp_runs import make_mesh

# The entry computations that `python -m tests.gpu_program 2 8 2 two_level documents print` printed,
# with the recommended options, and with xla_gpu_enable_latency_hiding_scheduler=false and
# xla_gpu_experimental_parallel_collective_overlap_limit=1. Metadata is reduced to the scopes of
# exchanges, and configurations to whether a collective is synchronous.
DATA = Path(__file__).parent / "data"


def _program(*lines, computations=()):
  """A scheduled module whose entry has these instructions."""
  entry = "\n".join(f"  {line}" for line in lines)
  before = "\n\n".join(computations)
  return (
    "HloModule step, is_scheduled=true, entry_computation_layout={()->f32[8]{0}}\n\n"
    f"{before}\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n"
    f"{entry}\n}}\n"
  )


def _computation(name, *lines):
  inside = "\n".join(f"  {line}" for line in lines)
  return f"%{name} (x: f32[8]) -> f32[8] {{\n  %x.{name} = f32[8]{{0}} parameter(0)\n{inside}\n}}"


def _attention(name, operand="p", more=""):
  target = 'custom_call_target="jax_magi_attention_forward"'
  return f"%{name} = (f32[8]{{0}}, u8[4]{{0}}) custom-call(%{operand}), {target}{more}"


def _start(name="all-gather-start", operand="p", more=""):
  opcode = name.partition(".")[0]
  return f"%{name} = ((f32[8]{{0}}), f32[64]{{0}}) {opcode}(%{operand}), dimensions={{0}}{more}"


def _done(name="all-gather-done", start="all-gather-start"):
  return f"%{name} = f32[64]{{0}} {name.partition('.')[0]}(%{start})"


def _only(text):
  (collective,) = overlap.schedule_of(text).collectives
  return collective


# Programs that were compiled.


def _summary(schedule):
  return [
    (c.name, c.num_bytes, c.is_async, [name.split()[0] for name in c.attention])
    for c in schedule.collectives
  ]


KEYS = 8 * 1024 * 512 * 2  # Bytes that an all-to-all inside a node brings.


def test_two_nodes():
  schedule = overlap.read_schedule(DATA / "two_nodes_with_options.hlo.txt")
  assert _summary(schedule) == [
    ("all-gather-start", KEYS // 4, True, ["ffi_call.191"]),
    ("all-to-all-start", KEYS, True, ["ffi_call.191"]),
    ("all-to-all-start.1", KEYS, True, ["ffi_call.193"]),
    ("all-reduce-start", 32, True, []),
    ("all-gather-start.1", KEYS // 4, True, ["ffi_call.197"]),
    ("all-to-all-start.2", KEYS, True, ["ffi_call.197"]),
    ("all-to-all-start.3", KEYS, True, ["ffi_call.199"]),
    ("all-to-all-start.4", 2 * KEYS, True, ["ffi_call.201"]),
    ("all-to-all-start.5", 2 * KEYS, True, ["ffi_call.203"]),
    ("reduce-scatter-start", KEYS // 4, True, ["ffi_call.205"]),
  ]
  assert schedule.num_attention == 8


def test_two_nodes_without_options():
  schedule = overlap.read_schedule(DATA / "two_nodes_without_options.hlo.txt")
  exposed = [c for c in schedule.collectives if c.num_bytes > 32 and c.overlap.exposed]
  assert [(c.name, c.is_async) for c in exposed] == [
    ("all-to-all-start", False),
    ("all-to-all-start.2", False),
  ]
  first = exposed[0]
  assert (first.after, first.before) == ("wrapped_slice", "loop_broadcast_fusion")
  assert first.independent_attention == ("ffi_call.191 (attention_forward)",)
  hidden = schedule.overlap
  assert (hidden.attention, hidden.other) == (6 * KEYS + 3 * KEYS // 4, 0)
  assert hidden.exposed == 2 * KEYS + 32


def test_program_for_cpus():
  """Collectives are synchronous there, but each could overlap attention."""
  mesh = make_mesh(cp=8)
  key = jax_magi.magi_attn_varlen_key([0, 70, 128], causal=True, cp_size=8, overlap_degree=2)

  def loss(q, k, v, key):
    return jax_magi.context_parallel_attention(q, k, v, key, mesh=mesh)[0].sum()

  sharding = NamedSharding(mesh, P("cp"))
  operands = [
    jax.ShapeDtypeStruct((128, heads, 16), jnp.float32, sharding=sharding) for heads in (4, 2, 2)
  ]
  compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*operands, key).compile()
  schedule = overlap.schedule_of(compiled.as_text())
  # Three stages forward; three backward, of which the rank's own keys are two halves.
  assert schedule.num_attention == 7
  transfers = [c for c in schedule.collectives if c.num_bytes > 1000]
  # Two stages fetch keys, and return gradients. The backward pass fetches keys again. With JAX
  # 0.10.2, XLA for CPUs merges these with the fetches of the forward pass; with 0.11, it does not.
  assert len(transfers) == (4 if jax.__version_info__ < (0, 11) else 6)
  assert not any(c.is_async or c.attention for c in transfers)
  assert all(c.independent_attention for c in transfers)


# Programs that are written here.


def test_attention_between_start_and_done_counts():
  between = _only(_program(_start(), _attention("a"), _done()))
  assert between.attention == ("a (attention_forward)",)
  assert between.num_bytes == 256
  assert between.is_async
  before = _only(_program(_attention("a"), _start(), _done()))
  assert before.attention == ()
  assert (before.after, before.before) == ("a (attention_forward)", "the end")
  after = _only(_program(_start(), _done(), _attention("a")))
  assert (after.after, after.before) == ("the beginning", "a (attention_forward)")


def test_names_without_percent_signs():
  control = ", control-predecessors={%all-gather-start}"
  text = _program(_start(), _attention("a", more=control), _done())
  assert _only(text).independent_attention == ()
  assert _only(text.replace("%", "")) == _only(text)


def test_a_pair_that_is_marked_synchronous_is():
  sync = ', backend_config={"collective_backend_config":{"is_sync":true}}'
  collective = _only(_program(_start(more=sync), _attention("a"), _done()))
  assert not collective.is_async
  assert collective.attention == ()
  assert collective.before == "a (attention_forward)"


def test_collectives_wrapped_in_calls():
  inner = "%inner = f32[64]{0} ragged-all-to-all(%x.wrapped)"
  start = "%s = ((f32[8]{0}), f32[64]{0}) async-start(%p), calls=%wrapped"
  update = "%u = ((f32[8]{0}), f32[64]{0}) async-update(%s)"
  done = "%d = f32[64]{0} async-done(%u)"
  wrapped = _computation("wrapped", inner)
  collective = _only(_program(start, _attention("a"), update, done, computations=[wrapped]))
  assert (collective.name, collective.opcode) == ("s", "ragged-all-to-all")
  assert collective.num_bytes == 256
  assert collective.attention == ("a (attention_forward)",)


def test_attention_on_another_stream_hides_a_synchronous_collective():
  stream = _computation("stream", _attention("inner", operand="x.stream"))
  start = "%s = ((f32[8]{0}), (f32[8]{0}, u8[4]{0})) call-start(%p), to_apply=%stream"
  done = "%d = (f32[8]{0}, u8[4]{0}) call-done(%s)"
  sync = "%all-reduce.1 = f32[8]{0} all-reduce(%p), to_apply=%add"
  collective = _only(_program(start, sync, done, computations=[stream]))
  assert not collective.is_async
  assert collective.attention == ("s",)


def test_loops_and_branches_have_schedules_of_their_own():
  body = _computation("body", _start(), _done(), _attention("a", operand="x.body"))
  branch = _computation("branch", "%all-reduce.2 = f32[8]{0} all-reduce(%x.branch), to_apply=%add")
  loop = (
    "%while.1 = f32[8]{0} while(%p), condition=%test, body=%body, "
    'backend_config={"known_trip_count":{"n":"12"}}'
  )
  choice = "%conditional.1 = f32[8]{0} conditional(%p, %p), branch_computations={%branch, %none}"
  schedule = overlap.schedule_of(
    _program(
      _start("collective-permute-start"),
      loop,
      _done("collective-permute-done", "collective-permute-start"),
      choice,
      computations=[body, branch],
    )
  )
  found = [(c.computation, c.times, bool(c.attention)) for c in schedule.collectives]
  assert found == [("main", 1, True), ("body", 12, False), ("branch", 1, False)]
  assert schedule.collectives[0].attention == ("while.1",)
  assert schedule.overlap == overlap.Overlap(attention=256, exposed=12 * 256 + 32)


@pytest.mark.parametrize(
  "work",
  [
    '%m = f32[8]{0} custom-call(%p), custom_call_target="__cublas$lt$matmul"',
    "%m = f32[8]{0} fusion(%p), kind=kLoop, calls=%product",
    '%m = f32[8]{0} fusion(%p), kind=kCustom, backend_config={"kind":"__triton_gemm"}',
  ],
)
def test_matmuls_hide_too(work):
  product = _computation("product", "%d = f32[8]{0} dot(%x.product, %x.product)")
  text = _program(_start(), work, _done(), _attention("a"), computations=[product])
  collective = _only(text)
  assert len(collective.matmuls) == 1
  assert collective.overlap == overlap.Overlap(other=256)


def test_small_instructions_hide_nothing():
  small = "%f = f32[8]{0} fusion(%p), kind=kLoop, calls=%product"
  free = "%b = f32[8]{0} bitcast(%p)"
  collective = _only(_program(_start(), small, free, _done(), _attention("a")))
  assert collective.num_others == 1
  assert collective.overlap == overlap.Overlap(exposed=256)


def test_independent_attention_neither_needs_nor_is_needed():
  lines = [
    _attention("needed"),
    "%g = f32[8]{0} get-tuple-element(%needed), index=0",
    _start(operand="g"),
    _attention("free"),
    _done(),
    "%t = f32[8]{0} slice(%all-gather-done)",
    _attention("needs", operand="t"),
    _attention("controlled", more=", control-predecessors={%all-gather-done}"),
  ]
  collective = _only(_program(*lines))
  assert collective.independent_attention == ("free (attention_forward)",)


def test_a_start_that_ends_elsewhere_runs_to_the_end():
  collective = _only(_program(_start(), _attention("a")))
  assert collective.attention == ("a (attention_forward)",)


@settings(deadline=None)
@given(st.data())
def test_any_order_of_starts_dones_and_attention(data):
  num = data.draw(st.integers(1, 5))
  marks = [("start", i) for i in range(num)] + [("done", i) for i in range(num)]
  marks += [("attention", i) for i in range(data.draw(st.integers(1, 5)))]
  order = data.draw(st.permutations(marks))
  place = {mark: index for index, mark in enumerate(order)}
  # If a done was drawn before its start, swap them.
  for i in range(num):
    a, b = sorted((place["start", i], place["done", i]))
    order[a], order[b] = ("start", i), ("done", i)
    place["start", i], place["done", i] = a, b
  write = {
    "start": lambda i: _start(f"all-gather-start.{i}"),
    "done": lambda i: _done(f"all-gather-done.{i}", f"all-gather-start.{i}"),
    "attention": lambda i: _attention(f"a{i}"),
  }
  schedule = overlap.schedule_of(_program(*(write[kind](i) for kind, i in order)))
  for collective in schedule.collectives:
    i = int(collective.name.rpartition(".")[2])
    inside = [n for k, n in order[place["start", i] : place["done", i]] if k == "attention"]
    assert collective.attention == tuple(f"a{n} (attention_forward)" for n in inside)


@pytest.mark.parametrize(
  ("shape", "expected"),
  [
    ("f32[]", 4),
    ("bf16[2048,512]{1,0:T(8,128)S(1)}", 2 * 2048 * 512),
    ("(f32[8]{0}, /*index=1*/(pred[3]{0}, s4[3]{0}))", 32 + 3 + 2),
    ("f8e4m3fn[16]{0}", 16),
    ("c64[<=4]{0}", 32),
    ("(f32[0]{0}, token[])", 0),
  ],
)
def test_sizes(shape, expected):
  assert num_bytes(shape) == expected


def test_every_instruction_is_read():
  text = (DATA / "two_nodes_with_options.hlo.txt").read_text()
  (instructions,) = parse(text).computations.values()
  assert len(instructions) == sum(" = " in line for line in text.splitlines()[1:])
  names = {instruction.name for instruction in instructions}
  assert all(
    names >= set(i.operands) for i in instructions if i.opcode not in ("parameter", "constant")
  )


# The command.


def _run(*arguments):
  return overlap.main([str(argument) for argument in arguments])


def test_command(tmp_path, capsys):
  path = DATA / "two_nodes_with_options.hlo.txt"
  figures = tmp_path / "figures.json"
  assert _run("--hlo", path, "--json", figures) == 0
  captured = capsys.readouterr()
  row = "all-to-all-start.1    all_to_all   8.4 MB  async  ffi_call.193 (attention_forward)"
  assert row in captured.out
  assert "of 73.4 MB, 99.9% may overlap attention" in captured.out
  assert captured.err == ""
  written = json.loads(figures.read_text())
  assert written["total"]["exposed_bytes"] == 32
  assert written["faults"] == []
  assert [c["is_exposed"] for c in written["collectives"]] == [False] * 3 + [True] + [False] * 6
  assert _run("--hlo", path, "--require-hidden", "0.999") == 0
  assert _run("--hlo", path, "--require-hidden", "1") == 1


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", "is not HLO"),
    ("#include <vector>\nint main() { return 0; }\n", "is not HLO"),
    ("module @jit_f attributes {} {\n  func.func public @main() {\n}\n", "is StableHLO"),
    (_program(_start(), _done()).replace("is_scheduled=true, ", ""), "is not scheduled"),
    (_program(_start(), _done())[:-4], "ends in the middle of computation main"),
    ("HloModule empty, is_scheduled=true\n", "has no ENTRY"),
    (_program(_start()) + _program(_start()), "holds 2 modules"),
    (_program(_attention("a")), "has no collectives"),
    (_program(_start(), _done()), "has no attention calls of jax_magi"),
    (b"\x80\xff\x00", "cannot be read as text"),
    (None, "cannot be read as text"),
  ],
)
def test_other_files_are_told_what_they_are(tmp_path, capsys, text, message):
  path = tmp_path / "program.txt"
  if text is not None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(ValueError, match=message):
    overlap.read_schedule(path)
  assert _run("--hlo", path) == 2
  assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("target", ["jax_magi_stand_in_start", "jax_magi_stand_in_done"])
def test_what_stands_in_for_communication_is_communication(target):
  assert custom_call_kind(target) == Kind.COMMUNICATION
