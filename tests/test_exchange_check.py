"""`check_exchange` accepts what is right, and detects what is wrong."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import jax_magi
from jax_magi import exchange
from jax_magi._src.context_parallel import exchange as transfers
from jax_magi._src.context_parallel.hops import ALL, Hop, Ranks, moved_rows
from jax_magi._src.exchange_check import api, compare, rates, tables
from tests.cp_runs import make_mesh

_SMALL = {"rows": 32, "width": 4, "repeats": 1}


@pytest.fixture
def no_clock(monkeypatch):
  """Every hop takes a millisecond, and nothing is timed."""
  monkeypatch.setattr(rates, "time_of", lambda *_, **__: 1e-3)


@pytest.fixture
def one_degree(monkeypatch, no_clock):
  monkeypatch.setattr(api, "_DEGREES", (1,))


def _kinds(report, transport):
  return {x.collectives for x in report.checks if x.transport == transport}


# --- what is right ---


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize("per_node", [8, pytest.param(1, marks=pytest.mark.long)])
def test_one_level_is_right(per_node):
  report = jax_magi.check_exchange(make_mesh(cp=8), ranks_per_node=per_node, **_SMALL)
  assert report.ok and report.faults == []
  report.raise_if_faulty()
  assert {x.transport for x in report.checks} == {"all_to_all", "all_gather"}
  assert _kinds(report, "all_to_all") == {"all_to_all", "permute"}
  assert {x.level for x in report.rates} == {"all"}
  degrees, directions = {1, 2}, {"cast", "reduce", "reduce in bfloat16"}
  for transport in ("all_to_all", "all_gather"):
    found = {(x.overlap_degree, x.direction) for x in report.checks if x.transport == transport}
    assert found == set(itertools.product(degrees, directions))
  assert all(x.num_rows > 0 and x.num_wrong == 0 for x in report.checks)


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize(
  ("per_node", "degrees"),
  [
    (4, (2,)),
    pytest.param(4, (1,), marks=pytest.mark.long),
    pytest.param(2, (1, 2), marks=pytest.mark.long),
  ],
  ids=str,
)
def test_two_levels_are_right(monkeypatch, per_node, degrees):
  monkeypatch.setattr(api, "_DEGREES", degrees)
  report = jax_magi.check_exchange(
    make_mesh(cp=8), ranks_per_node=per_node, transports=["two_level"], **_SMALL
  )
  assert report.ok
  # Permutations need groups of three or more.
  permutes = "permute, all_to_all" if per_node == 2 else "all_to_all, permute"
  expected = {"all_to_all, all_to_all", "all_gather, all_to_all", permutes}
  assert _kinds(report, "two_level") == expected
  assert {x.level for x in report.rates} == {"node", "local"}


@pytest.mark.usefixtures("one_degree")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_other_axes_exchange_side_by_side(axis_type):
  mesh = make_mesh(axis_type, dp=2, cp=2)
  report = jax_magi.check_exchange(mesh, transports=["all_gather", "ragged"], **_SMALL)
  assert report.ok
  # Each of the two groups compares the rows of two ranks, for eight keys with one transfer.
  assert {x.num_rows for x in report.checks if x.direction == "reduce"} == {2 * 2 * 8 * 32}


@pytest.mark.usefixtures("one_degree")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_other_dtypes(dtype):
  mesh = make_mesh(cp=2)
  assert jax_magi.check_exchange(mesh, transports=["all_to_all"], dtype=dtype, **_SMALL).ok


def test_transports_that_fit_are_checked():
  one_node, nodes, alone = Ranks(8, 8), Ranks(8, 4), Ranks(8, 1)
  flat = ["all_to_all", "all_gather"]
  assert api._check_transports(None, one_node, "gpu") == [*flat, "ragged"]
  assert api._check_transports(None, one_node, "cpu") == flat
  assert api._check_transports(None, nodes, "gpu") == [*flat, "two_level"]
  assert api._check_transports(None, alone, "gpu") == flat
  assert api._check_transports(["ragged", "ragged"], one_node, "cpu") == ["ragged"]


@pytest.mark.parametrize("per_node", [2, 4, 8])
@pytest.mark.parametrize("degree", [1, 2])
def test_keys_of_a_form_differ_but_share_a_program(per_node, degree):
  transport = "all_to_all" if per_node == 8 else "two_level"
  rng = np.random.default_rng(0)
  for found in tables.make_tables(transport, Ranks(8, per_node), degree, 64, rng):
    assert len({key.spec for key in found.keys}) == 1
    assert found.keys[0].spec.transport == found.transport
    assert len({key.take_runs.tobytes() for key in found.keys}) == len(found.keys) > 1


# --- what is wrong ---


def _check(**options):
  return jax_magi.check_exchange(make_mesh(cp=4), **_SMALL, **options)


def _wrong(report):
  return {(x.transport, x.direction) for x in report.checks if x.num_wrong}


@pytest.mark.usefixtures("one_degree")
def test_a_dropped_row_is_noticed(monkeypatch):
  move = transfers.move

  def dropping(hop, ranks, axis_name, sent, sizes):
    moved = move(hop, ranks, axis_name, sent, sizes)
    is_last = lax.axis_index(axis_name) == ranks.count - 1
    return moved.at[0].set(jnp.where(is_last, jnp.zeros_like(moved[0]), moved[0]))

  monkeypatch.setattr(transfers, "move", dropping)
  report = _check(transports=["all_gather", "all_to_all"])
  assert _wrong(report) == {("all_gather", "cast"), ("all_to_all", "cast")}
  assert all(x.num_wrong <= 8 for x in report.checks)  # One row of one rank, for each key.
  assert not report.ok
  with pytest.raises(RuntimeError, match=r"all_gather: [1-8] of \d+ rows are wrong in cast with"):
    report.raise_if_faulty()


@pytest.mark.usefixtures("one_degree")
@pytest.mark.parametrize("level", ["node", "local"])
def test_swapped_blocks_are_noticed(monkeypatch, level):
  move, move_back = transfers.move, transfers.move_back

  def swapped(move):
    def fun(hop, ranks, axis_name, sent, *rest):
      moved = move(hop, ranks, axis_name, sent, *rest)
      is_of_blocks = hop.level == level and hop.kind == "all_to_all"
      return jnp.roll(moved, hop.rows[0], axis=0) if is_of_blocks else moved

    return fun

  monkeypatch.setattr(transfers, "move", swapped(move))
  monkeypatch.setattr(transfers, "move_back", swapped(move_back))
  report = _check(transports=["two_level"], ranks_per_node=2)
  assert _wrong(report) == {("two_level", x) for x in compare.DIRECTIONS}


def _index_within(index, length):
  """The index, or one out of bounds: a negative index would count from the end."""
  return jnp.where((index >= 0) & (index < length), index, length)


@pytest.mark.usefixtures("one_degree")
def test_unsummed_gradients_are_noticed(monkeypatch):
  def last_one(self, hop, total, index, length, back):
    total = jnp.zeros((length, *back.shape[1:]), back.dtype) if total is None else total
    return total.at[_index_within(index, length)].set(back, mode="drop")

  def own_one(hop, ranks, axis_name, sent, sizes, deterministic):
    if hop.kind != "all_gather":
      return move_back(hop, ranks, axis_name, sent, sizes)
    begin = lax.axis_index(axis_name) * hop.rows[0]
    return lax.dynamic_slice_in_dim(sent, begin, hop.rows[0])

  move_back = transfers.move_back
  monkeypatch.setattr(transfers.Transfer, "_sum", last_one)
  monkeypatch.setattr(transfers, "move_back", own_one)
  report = _check(transports=["all_gather", "all_to_all"])
  reduces = ("reduce", "reduce in bfloat16")
  assert _wrong(report) == set(itertools.product(("all_gather", "all_to_all"), reduces))


@pytest.mark.usefixtures("one_degree")
def test_a_rounding_too_many_is_noticed(monkeypatch):
  def rounded(self, parts, dtype):
    return parts[-1].astype(jnp.bfloat16)

  def sum_rounded(self, hop, total, index, length, back):
    shape = length, *back.shape[1:]
    total = jnp.zeros(shape, jnp.bfloat16) if total is None else total.astype(jnp.bfloat16)
    index = _index_within(index, length)
    return total.at[index].add(back.astype(jnp.bfloat16), mode="drop").astype(jnp.float32)

  with monkeypatch.context() as patch:
    patch.setattr(transfers.Transfer, "packed_back", rounded)
    assert _wrong(_check(transports=["all_to_all"])) == {("all_to_all", "reduce")}
  monkeypatch.setattr(transfers.Transfer, "_sum", sum_rounded)
  assert ("all_to_all", "reduce in bfloat16") in _wrong(_check(transports=["all_to_all"]))


def _with_rates(platform, per_node=8, **gb_per_s):
  found = tuple(
    exchange.ExchangeRate(kind, "all", kind, direction, 10**6, 1 / rate)
    for kind, rate in gb_per_s.items()
    for direction in ("cast", "reduce")
  )
  return exchange.ExchangeReport(8, per_node, platform, (), found)


def test_a_slow_transport_is_noticed():
  report = _with_rates("gpu", ragged=2.7, all_to_all=250.0, all_gather=26.0)
  assert report.faults == [
    f"ragged moves 2.7 GB/s inside a node in {x}, but all_to_all moves 250 GB/s"
    for x in ("cast", "reduce")
  ]
  assert "among all ranks" in _with_rates("gpu", 4, ragged=1.0, all_to_all=10.0).faults[0]
  assert _with_rates("gpu", ragged=25.1, all_to_all=250.0).ok
  # Levels are not compared with each other.
  slow, fast = (
    dataclasses.replace(rate, level=level)
    for rate, level in zip(report.rates[::2], ("node", "local"), strict=False)
  )
  assert dataclasses.replace(report, rates=(slow, fast)).ok
  assert _with_rates("cpu", ragged=2.7, all_to_all=250.0).ok


# --- the report ---


def _report():
  checks = (
    exchange.ExchangeCheck("all_to_all", "permute", 1, "cast", 1000, 0),
    exchange.ExchangeCheck("all_to_all", "permute", 1, "reduce", 500, 0),
    exchange.ExchangeCheck("two_level", "all_gather, all_to_all", 2, "cast", 1000, 12),
    exchange.ExchangeCheck("two_level", "all_gather, all_to_all", 2, "reduce", 500, 0),
  )
  found = tuple(
    exchange.ExchangeRate(transport, level, kind, direction, 10**8, time_ms)
    for transport, level, kind, time_ms in (
      ("all_to_all", "all", "permute", 2.0),
      ("two_level", "node", "all_gather", 0.25),
      ("two_level", "node", "all_to_all", 5.0),
    )
    for direction in ("cast", "reduce")
  )
  return exchange.ExchangeReport(8, 4, "gpu", checks, found)


def test_the_report_can_be_read():
  assert str(_report()).splitlines() == [
    "exchange among 8 ranks (gpu) on 2 nodes",
    "",
    "wrong rows  collectives             degree        cast    reduce",
    "all_to_all  permute                      1   0 of 1000  0 of 500",
    "two_level   all_gather, all_to_all       2  12 of 1000  0 of 500",
    "",
    "GB/s of a rank  collective  links            cast  reduce",
    "all_to_all      permute     among all ranks    50      50",
    "two_level       all_gather  between nodes     400     400",
    "two_level       all_to_all  between nodes      20      20",
    "",
    "fault: two_level (all_gather, all_to_all): 12 of 1000 rows are wrong in cast with "
    "overlap_degree=2",
    "fault: two_level (all_to_all) moves 20 GB/s between nodes in cast, but two_level (all_gather) "
    "moves 400 GB/s",
    "fault: two_level (all_to_all) moves 20 GB/s between nodes in reduce, but two_level "
    "(all_gather) moves 400 GB/s",
  ]
  right = dataclasses.replace(_report(), checks=(), rates=())
  assert str(right).endswith("no faults")


def test_the_report_can_be_drawn():
  pytest.importorskip("matplotlib")
  axes = _report().plot()
  assert sorted(bar.get_width() for bar in axes.patches) == [20, 20, 50, 50, 400, 400]
  names = [tick.get_text() for tick in axes.get_yticklabels()]
  assert names[1] == "two_level (all_gather)\nbetween nodes"
  assert axes.get_title("left") == "3 faults"
  assert _report().plot(axes) is axes


# --- times ---


@pytest.mark.parametrize("kind", ["all_to_all", "all_gather", "ragged", "permute"])
@pytest.mark.parametrize("is_back", [False, True], ids=["cast", "reduce"])
def test_every_hop_can_be_timed(kind, is_back, monkeypatch):
  ranks, shapes = Ranks(4, 4), []

  def shape_of(fun, repeats):
    assert repeats == 3
    shapes.append(fun().shape)
    return 1.0

  monkeypatch.setattr(rates, "median_time", shape_of)
  hop = rates.large_hop(Hop(ALL, kind, (1,), (1,) if kind == "permute" else ()), ranks, 7)
  assert 7 <= moved_rows(hop, ranks) <= 9
  mesh = make_mesh(cp=4)
  assert rates.time_of(mesh, "cp", hop, ranks, 5, jnp.float32, 3, is_back=is_back) == 1.0
  blocks = {"permute": 7, "all_gather": 3 if is_back else 12}
  assert shapes == [(4 * blocks.get(kind, 12), 5)]


def test_the_median_counts(monkeypatch):
  clock = iter([0, 1, 10, 15, 20, 22])
  monkeypatch.setattr(rates.time, "perf_counter", lambda: next(clock))
  assert rates.median_time(lambda: np.zeros(1), 3) == 2


# --- arguments ---


@pytest.mark.parametrize(
  ("options", "text"),
  [
    ({"axis_name": "sp"}, "must have an axis 'sp'"),
    ({"ranks_per_node": 3}, "must divide cp_size=4"),
    ({"transports": "ragged"}, "must be a list"),
    ({"transports": []}, "must be a list"),
    ({"transports": ["ring"]}, "must be one of"),
    ({"transports": ["two_level"]}, "'two_level' needs several nodes of several ranks"),
    (
      {"transports": ["ragged"], "ranks_per_node": 2},
      "'ragged' needs one node, but ranks_per_node makes 2",
    ),
    ({"rows": 0}, "rows must be positive"),
    ({"width": 1.5}, "width must be a static integer"),
    ({"repeats": 0}, "repeats must be positive"),
    ({"dtype": jnp.int32}, "dtype must be one of"),
    ({"dtype": None}, "dtype must be one of"),
  ],
)
def test_errors_say_what_is_wrong(options, text):
  with pytest.raises(ValueError, match=text):
    jax_magi.check_exchange(make_mesh(cp=4), **options)


def test_a_mesh_must_have_devices_and_ranks():
  with pytest.raises(ValueError, match=r"must be a jax.sharding.Mesh with devices"):
    jax_magi.check_exchange(make_mesh(cp=4).abstract_mesh)
  with pytest.raises(ValueError, match="must have at least two ranks"):
    jax_magi.check_exchange(make_mesh(cp=1))


# --- the command ---


@pytest.mark.usefixtures("one_degree")
def test_the_command_prints_the_table(capsys, tmp_path):
  png = tmp_path / "rates.png"
  options = ["--axis-size", "2", "--transports", "all_gather", "--rows", "32", "--width", "4"]
  assert exchange.main([*options, "--png", str(png)]) == 0
  text = capsys.readouterr().out
  assert text.startswith("exchange among 2 ranks (cpu) on one node") and "no faults" in text
  assert png.stat().st_size > 0


def test_the_command_tells_faults_from_bad_options(capsys, monkeypatch):
  from jax_magi._src.exchange_check import command

  monkeypatch.setattr(command, "check_exchange", lambda *_, **__: _report())
  assert exchange.main([]) == 1
  assert "fault: two_level" in capsys.readouterr().out
  assert exchange.main(["--axis-size", str(jax.device_count() + 1)]) == 2
  assert "must divide the number of devices" in capsys.readouterr().err
