"""Programs for nodes of GPUs, compiled with one GPU or none: their exchanges, and the overlap."""

import collections
import re

import pytest

from jax_magi import overlap
from jax_magi._src.context_parallel.hops import moved_rows
from jax_magi._src.context_parallel.schedule import steps_of
from tests import gpu_program
from tests.gpu_compiler import needs_compiler, run_compiler
from tests.sizes import in_turns

GPUS, LOCAL = 8, 1024
# The bytes of a row of keys and values, and of their gradients.
ROW_BYTES = 2 * gpu_program.HEADS[1] * gpu_program.HEAD_DIM * 2
OPCODES = {
  "all_to_all": "all-to-all",
  "all_gather": "all-gather",
  "permute": "collective-permute",
  "ragged": "ragged-all-to-all",
}


def _programs(nodes, degrees, transports, masks, actions="print"):
  """Key, text and action of programs that one process compiles: lists are `gpu_program`'s."""
  lists = (degrees, transports, masks, actions)
  text = run_compiler("tests.gpu_program", str(nodes), str(GPUS), *lists, str(LOCAL))
  texts = re.split(r"^(?=HloModule )", text, flags=re.MULTILINE)[1:]
  for program, text in zip(gpu_program.programs_of(*lists), texts, strict=True):
    degree, transport, mask, action = program
    key = gpu_program.make_key(nodes, GPUS, degree, transport, mask, LOCAL)
    yield key, text, action


def _expected(key, action):
  """The opcode, groups and bytes of all exchanges of the plan, with the number of equal ones."""
  ranks = key.spec.ranks
  found = collections.Counter()

  def add(hop, opcode, row_bytes, *, is_back):
    groups = ranks.groups(hop.level) or [range(ranks.count)]
    shifts = [-shift if is_back else shift for shift in hop.shifts]
    sets = [ranks.permutation(hop.level, shift) for shift in shifts] or [groups]
    for group_list, rows in zip(sets, hop.rows, strict=True):
      num_ranks = 1 if hop.kind == "permute" else ranks.group_size(hop.level)
      blocks = 1 if opcode == "reduce-scatter" else num_ranks
      found[opcode, _sorted(group_list), blocks * rows * row_bytes] += 1

  for hop in (hop for hops in key.capacities.hops for hop in hops):
    for _ in range(1 if action == "keep" else 2):
      add(hop, OPCODES[hop.kind], ROW_BYTES, is_back=False)
    back = OPCODES[hop.kind]
    if hop.kind == "all_gather":
      # Sums in 16 bits would be rounded on the way.
      back = "all-to-all" if action == "bfloat16" else "reduce-scatter"
    add(hop, back, ROW_BYTES * (1 if action == "bfloat16" else 2), is_back=True)
  return found


def _sorted(groups):
  return tuple(sorted(map(tuple, groups)))


def _check(key, text, action):
  """Checks the collectives of a program."""
  schedule = overlap.schedule_of(text)
  assert overlap.faults_of(schedule) == []
  exchanges = [c for c in schedule.collectives if c.exchange]
  # The maxima of logits, and nothing else.
  assert [c.opcode for c in schedule.collectives if not c.exchange] == ["all-reduce"]
  for exchange in exchanges:
    assert exchange.is_async, exchange
    assert exchange.attention, exchange
    assert not exchange.is_single
  found = collections.Counter((c.opcode, _sorted(c.groups), c.num_bytes) for c in exchanges)
  assert found == _expected(key, action)
  _check_links(key, exchanges, action)
  fetching = action != "keep"
  num_hops = [len(hops) for hops in key.capacities.hops]
  forward, backward = key.capacities.orders
  steps = {
    "forward": steps_of(num_hops, forward),
    "backward": steps_of(num_hops, backward, is_fetching=fetching, is_backward=True),
  }
  for direction, expected in steps.items():
    calls = re.findall(f'custom_call_target="jax_magi_attention_{direction}', text)
    assert len(calls) == len(expected)
  # All stages of a pass have their tile lists of one launch, before the first one.
  calls = re.findall('custom_call_target="jax_magi_attention_([a-z_]+)"', text)
  lists = "tile_lists"
  assert [x for x in calls if x.startswith("tile_list")] == [lists, lists]
  assert calls[0] == lists and calls.index("backward") > calls.index(lists, 1)


def _check_links(key, exchanges, action):
  """Checks that the bytes between nodes and inside nodes are those of the plan."""
  spec, stats = key.spec, key.stats()
  weight = ROW_BYTES * {"print": 4, "bfloat16": 3, "keep": 3}[action]
  links = [overlap.link_bytes(c, GPUS) for c in exchanges]
  between, inside = (sum(sizes) for sizes in zip(*links, strict=True))
  assert between + inside == weight * stats.padded_rows
  if spec.levels == ("node", "local"):
    assert between == weight * stats.levels["node"].padded_rows
    assert inside == weight * stats.levels["local"].padded_rows
  elif spec.ranks.num_nodes == 1:
    assert between == 0
  for level in spec.levels:
    hops = [hop for hops in key.capacities.hops for hop in hops if hop.level == level]
    moved = sum(moved_rows(hop, spec.ranks) for hop in hops)
    assert moved == stats.levels[level].padded_rows


# The number of nodes, and degree, transport and mask of programs that one process compiles, as in
# `gpu_program`. Each transport occurs with each number of nodes, and with each degree. Masks and
# degrees take turns.
CASES = [
  (2, ["2 two_level documents"]),
  # The cases from here on are long.
  (
    2,
    [
      "4 two_level window",
      "1-2-1 two_level documents",
      "1 two_level full",
      "1 all_to_all documents",
      "2 all_to_all window",
      "4 all_gather full",
    ],
  ),
  (4, ["1 two_level window", "4 two_level window", "4 two_level documents"]),
  (4, ["2 two_level full", "4 all_to_all documents", "2 all_gather full"]),
  (1, ["4 all_to_all documents", "1 all_to_all window"]),
  (1, ["4 all_gather documents", "1 all_gather full", "4 ragged documents", "1 ragged window"]),
  # Each kernel overlaps with one permutation, or with two.
  (1, ["1 auto window", "2 auto window", "2 auto neighbours", "4 auto neighbours"]),
]


def _id(value):
  return "-".join(value).replace(" ", "_") if isinstance(value, list) else str(value)


@needs_compiler
@pytest.mark.parametrize(
  ("nodes", "programs"),
  [CASES[0], *(pytest.param(*case, marks=pytest.mark.long) for case in CASES[1:])],
  ids=_id,
)
def test_exchanges_are_those_of_the_plan_beside_attention(nodes, programs):
  lists = map(",".join, zip(*map(str.split, programs), strict=True))
  for key, text, action in _programs(nodes, *lists):
    _check(key, text, action)
    assert nodes == 1 or "ragged-all-to-all" not in text


@pytest.mark.parametrize(
  ("mask", "nodes", "degree"), in_turns(["documents", "window", "full"], [1, 2, 4], "124")
)
def test_auto_is_one_of_these(mask, nodes, degree):
  """Programs of its transport and of its mask are among those above."""
  key = gpu_program.make_key(nodes, GPUS, degree, "auto", mask, LOCAL)
  transport = key.spec.transport
  same = gpu_program.make_key(nodes, GPUS, degree, transport, mask, LOCAL)
  # Only "auto" takes permutations among all ranks.
  expected = transport if same.spec == key.spec else "auto"
  compiled = {(n, *program.split()[1:]) for n, programs in CASES for program in programs}
  assert (nodes, expected, mask) in compiled


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize(
  ("nodes", "transports"),
  [(2, ["two_level"]), (1, ["all_to_all", "all_gather", "ragged"])],
  ids=_id,
)
def test_gradients_of_16_bits_and_keys_that_stay(nodes, transports):
  programs = [(x, *y) for x in transports for y in (("full", "bfloat16"), ("window", "keep"))]
  for key, text, action in _programs(nodes, "2", *map(",".join, zip(*programs, strict=True))):
    _check(key, text, action)


@needs_compiler
@pytest.mark.long
def test_a_transfer_without_overlap_is_reported_and_not_rejected():
  transports = "all_to_all,all_gather,ragged"
  for transport, (_, text, _) in zip(
    transports.split(","), _programs(1, "0", transports, "documents"), strict=True
  ):
    schedule = overlap.schedule_of(text)
    exchanges = [c for c in schedule.collectives if c.exchange]
    assert [c.exchange for c in exchanges] == 3 * [transport]
    assert all(c.is_single for c in exchanges)
    assert overlap.faults_of(schedule) == []


@needs_compiler
@pytest.mark.parametrize(
  ("nodes", "transport", "mask"),
  [
    (1, "all_to_all", "documents"),
    pytest.param(1, "all_gather", "full", marks=pytest.mark.long),
    pytest.param(1, "ragged", "documents", marks=pytest.mark.long),
    pytest.param(2, "two_level", "documents", marks=pytest.mark.long),
    pytest.param(
      2,
      "two_level",
      "window",
      marks=[
        pytest.mark.long,
        pytest.mark.xfail(strict=True, reason="XLA places a barrier before a small transfer"),
      ],
    ),
  ],
)
def test_a_kernel_barrier_is_between_transfers_and_their_kernel(nodes, transport, mask):
  ((_, text, _),) = _programs(nodes, "2", transport, mask, "barrier")
  entry = text[text.index("\nENTRY ") :]
  words = re.findall(
    r" (?:ragged-all-to-all|all-to-all|all-gather|reduce-scatter|collective-permute)-(start|done)\("
    r"|jax_magi_(attention|kernel)_(?:forward|backward|barrier)",
    entry,
  )
  in_flight, before = 0, None
  for word in ("".join(word) for word in words):
    in_flight += (word == "start") - (word == "done")
    if word == "kernel":
      assert in_flight
    if word == "attention":
      # The last kernel of the forward pass overlaps with nothing.
      assert (before == "kernel") == (in_flight > 0)
    before = word
  assert in_flight == 0


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_a_rank_runs_its_kernels(transport):
  """Beside GPUs that do not exist. There, XLA cannot run a ragged exchange ("No clique found")."""
  words = ["1", str(GPUS), "2", transport, "documents", "run", str(LOCAL)]
  ran = run_compiler("tests.gpu_program", *words)
  assert "ran: [[1024, 8, 128], [1024, 2, 128], [1024, 2, 128]]" in ran
