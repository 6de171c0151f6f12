"""Nodes according to the caller, and according to the devices of a mesh."""

import dataclasses
import types

import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask
from jax_magi._src.context_parallel import whole_arrays
from jax_magi._src.context_parallel.nodes import check_ranks_per_node
from tests.cp_runs import make_mesh
from tests.plan_checks import execute


def _fake_mesh(slices, processes=None, platform="gpu"):
  processes = slices if processes is None else processes
  devices = [
    types.SimpleNamespace(platform=platform, process_index=process)
    if number is None
    else types.SimpleNamespace(platform=platform, process_index=process, slice_index=number)
    for number, process in zip(np.ravel(slices), np.ravel(processes), strict=True)
  ]
  array = np.array(devices, object).reshape(np.shape(slices))
  names = ("cp",) if array.ndim == 1 else ("dp", "cp")
  return types.SimpleNamespace(axis_names=names, devices=array)


_TWO_NODES = [0] * 4 + [1] * 4


@pytest.mark.parametrize(
  ("mesh", "per_node"),
  [
    (_fake_mesh(_TWO_NODES), 4),
    (_fake_mesh([[0] * 4, [1] * 4]), None),  # Nodes differ along another axis.
    (_fake_mesh(_TWO_NODES, range(8)), 2),  # One process per GPU: JAX does not know the nodes.
    (_fake_mesh([None] * 8, range(8)), None),
    (_fake_mesh(_TWO_NODES, [0] * 8, "cpu"), 2),
    (_fake_mesh([0, 1] * 4), 1),
    (_fake_mesh([0] * 8), 3),
  ],
)
@pytest.mark.filterwarnings("error")
def test_nodes_that_may_be_right_pass(mesh, per_node):
  check_ranks_per_node(mesh, "cp", per_node)


def test_nodes_that_are_wrong_are_reported():
  with pytest.raises(ValueError, match=r"all 8 ranks of 'cp' .* pass ranks_per_node=4; or 8 if"):
    check_ranks_per_node(_fake_mesh(_TWO_NODES), "cp", None)
  with pytest.raises(ValueError, match=r"ranks_per_node=1, or order the devices"):
    check_ranks_per_node(_fake_mesh([0, 1] * 4), "cp", None)
  with pytest.warns(UserWarning, match=r"ranks_per_node is 8, but neighbours .* pass .*=4"):
    check_ranks_per_node(_fake_mesh(_TWO_NODES), "cp", 8)
  with pytest.warns(UserWarning, match=r"is 2, but each 4 neighbours .* one process"):
    check_ranks_per_node(_fake_mesh(_TWO_NODES), "cp", 2)
  check_ranks_per_node(make_mesh(cp=4).abstract_mesh, "cp", None)


def test_attention_on_a_mesh_checks_its_nodes(monkeypatch):
  seen = []

  def stop(*arguments):
    seen.append(arguments)
    raise KeyboardInterrupt

  monkeypatch.setattr(whole_arrays, "check_ranks_per_node", stop)
  mesh = make_mesh(cp=4)
  key = jax_magi.magi_attn_varlen_key([0, 64], cp_size=4, ranks_per_node=2)
  q = np.zeros((64, 1, 8), np.float32)
  with pytest.raises(KeyboardInterrupt):
    jax_magi.context_parallel_attention(q, q, q, key, mesh=mesh)
  assert seen == [(mesh, "cp", 2)]


def test_a_gather_inside_nodes_stays():
  """A mask that needs few rows is planned with the collectives of one that needs all."""
  options = {"cp_size": 8, "ranks_per_node": 4, "overlap_degree": 2, "transport": "two_level"}
  masks = [AttentionMask.causal(512), AttentionMask.from_cu_seqlens(range(0, 513, 64))]
  kinds = {"all_gather": masks[0], "all_to_all": masks[1]}
  keys = {kind: jax_magi.magi_attn_flex_key(mask, **options) for kind, mask in kinds.items()}
  for kind, key in keys.items():
    assert [hop.kind for hop in key.capacities.hops[0]] == [kind]
  room = keys["all_gather"].capacities | keys["all_to_all"].capacities
  assert room.hops[0] == keys["all_gather"].capacities.hops[0]

  def check(mask, capacities):
    key = jax_magi.magi_attn_flex_key(mask, capacities=capacities, **options)
    np.testing.assert_array_equal(execute(key).counts, mask.to_dense())

  for mask in masks:
    check(mask, room)
  # Also the other way round: blocks with room for all rows serve, too.
  (hop,) = keys["all_to_all"].capacities.hops[0]
  hops = (dataclasses.replace(hop, rows=(64,)),), room.hops[1]
  check(masks[0], dataclasses.replace(room, hops=hops))
