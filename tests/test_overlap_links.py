"""Bytes between nodes and inside them, and the groups of ranks that they are counted from."""

import numpy as np
import pytest

from jax_magi import overlap
from jax_magi._src.overlap.replica_groups import groups_of
from tests.test_overlap_schedule import DATA, _attention, _only, _program

NEIGHBOURS = ((0, 1, 2, 3), (4, 5, 6, 7))
STRIDED = ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
  ("written", "groups"),
  [
    ("replica_groups={{0,1,2,3},{4,5,6,7}}", NEIGHBOURS),
    ("replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}", STRIDED),
    ("replica_groups=[2,4]<=[8]", NEIGHBOURS),
    ("replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add", STRIDED),
    ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ("replica_groups=mesh['node'=2,'gpu'=4] {'gpu'}", NEIGHBOURS),
    ("replica_groups=mesh['node'=2,'gpu'=4] {'node'}, dimensions={0}", STRIDED),
    ("replica_groups=mesh[node=2,gpu=4] {node,gpu}", (tuple(range(8)),)),
    ("replica_groups=mesh['cp'=8] {'cp':(1)2}", STRIDED),
    ("replica_groups=mesh['cp'=8] {'cp':(2)4}", NEIGHBOURS),
    ("replica_groups=mesh['cp'=8] {'cp':(1)2,'cp':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ("replica_groups=mesh['gpu'=4,'node'=2], device_ids=([2,4]T(1,0)) {'gpu'}", NEIGHBOURS),
    ("replica_groups=mesh['a'=2,'b'=2], device_ids=(2,3,0,1) {'b'}", ((2, 3), (0, 1))),
    ("replica_groups={}", (tuple(range(8)),)),
    ("channel_id=1", (tuple(range(8)),)),
    ("source_target_pairs={{0,1},{1,2},{2,0}}", ((0, 1), (1, 2), (2, 0))),
    ("replica_groups=v7:something", ()),
  ],
)
def test_groups(written, groups):
  assert groups_of(f", channel_id=1, {written}, use_global_device_ids=true", 8) == groups


def test_groups_of_all_devices():
  text = _program("%all-gather.1 = f32[8]{0} all-gather(%p)", _attention("a"))
  assert _only(text.replace("is_scheduled=true", "is_scheduled=true, num_partitions=4")).groups == (
    (0, 1, 2, 3),
  )


def _collective(opcode, shape, groups):
  text = _program(f"%c = {shape} {opcode}(%p), {groups}", _attention("a"))
  return _only(text)


def _ids(groups):
  """Groups in the format of XLA."""
  return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


ALL = "replica_groups=" + _ids([range(16)])
LOCAL = "replica_groups=[2,8]<=[16]"
NODE = "replica_groups=[8,2]<=[2,8]T(1,0)"


@pytest.mark.parametrize(
  ("opcode", "groups", "between_nodes", "inside_node"),
  [
    # Blocks of 4 bytes: what is sent is as large as what arrives.
    ("all-to-all", ALL, 8, 7),
    ("all-to-all", LOCAL, 0, 14),
    ("all-to-all", NODE, 8, 0),
    ("ragged-all-to-all", ALL, 8, 7),
    ("all-gather", ALL, 1, 14),
    ("all-gather", LOCAL, 0, 14),
    ("all-gather", NODE, 8, 0),
    # The result is one of as many blocks as there are ranks.
    ("reduce-scatter", ALL, 16, 14 * 16),
    ("reduce-scatter", LOCAL, 0, 7 * 16),
    ("reduce-scatter", NODE, 16, 0),
  ],
)
def test_links_of_two_nodes(opcode, groups, between_nodes, inside_node):
  found = overlap.link_bytes(_collective(opcode, "f32[16]{0}", groups), ranks_per_node=8)
  assert found == (4 * between_nodes, 4 * inside_node)
  # The same ranks on one node.
  alone = overlap.link_bytes(_collective(opcode, "f32[16]{0}", groups), ranks_per_node=16)
  assert alone.between_nodes == 0


@pytest.mark.parametrize(("shift", "links"), [(1, (64, 64)), (8, (64, 0)), (0, (0, 0))])
def test_links_of_permutations(shift, links):
  pairs = _ids(zip(range(16), np.roll(range(16), -shift), strict=True))
  permute = _collective("collective-permute", "f32[16]{0}", f"source_target_pairs={pairs}")
  assert overlap.link_bytes(permute, 8) == links


def test_links_of_other_collectives_are_not_known():
  reduction = _collective("all-reduce", "f32[16]{0}", ALL)
  with pytest.raises(ValueError, match="all-reduce"):
    overlap.link_bytes(reduction, 8)
  with pytest.raises(ValueError, match="replica groups of c are"):
    overlap.link_bytes(_collective("all-gather", "f32[16]{0}", "replica_groups=v7:new"), 8)


def test_links_of_a_compiled_program():
  schedule = overlap.read_schedule(DATA / "two_nodes_with_options.hlo.txt")
  links = [overlap.link_bytes(c, 8) for c in schedule.collectives if c.exchange]
  rows = 1024 * 512 * 2  # Of a rank: keys and values of two heads.
  # Forward, and again; then gradients, in float32, the other way.
  fetch = [(rows, 0), (0, 7 * rows), (0, 7 * rows)]
  assert links == [*fetch, *fetch, (0, 14 * rows), (0, 14 * rows), (2 * rows, 0)]
