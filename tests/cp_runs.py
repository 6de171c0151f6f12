"""Attention over the ranks of a mesh, from whole arrays to whole arrays, for tests."""

import functools
import operator

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask
from jax_magi._src.native.backends import BACKENDS
from tests.accuracy import Inputs, check_results, make_inputs
from tests.compilation import quick_jit
from tests.machine import HAS_GPU

# Tests that are not about the choice of the kernel name it. If the choice were open, JAX would also
# trace the plain path, which takes up to half of a test's time.
NATIVE = "cpu" if BACKENDS["cpu"].module is not None and not HAS_GPU else None


def make_mesh(axis_type=AxisType.Auto, **axes):
  count = int(np.prod(list(axes.values())))
  return jax.make_mesh(
    tuple(axes.values()),
    tuple(axes),
    devices=jax.devices()[:count],
    axis_types=(axis_type,) * len(axes),
  )


def _attend(mesh, options, q, k, v, sink, key):
  def step(q, k, v, key, sink):
    return jax_magi.calc_attn(q, k, v, key, sink=sink, return_max_logits=True, **dict(options))

  return jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P("cp"), P("cp"), P("cp"), P("cp"), P()),
    out_specs=(P("cp"), jax_magi.AttnForwardMeta(P("cp"), P())),
  )(q, k, v, key, sink)


@functools.partial(quick_jit, static_argnums=(0, 1))
def _forward_and_backward(mesh, options, operands, cotangents, key):
  def fun(q, k, v, sink):
    out, meta = _attend(mesh, options, q, k, v, sink, key)
    return (out, meta.lse), meta.max_logits

  (out, lse), vjp, max_logits = jax.vjp(fun, *operands, has_aux=True)
  return out, lse, max_logits, vjp(cotangents)


def run(inputs: Inputs, key, mesh, **options):
  """Results and gradients by name, in the order of the sequence. The default is `NATIVE`."""
  roles = {"q": "q", "k": "k", "v": "k"}
  operands = [jax_magi.dispatch(getattr(inputs, x), key, role=role) for x, role in roles.items()]
  cotangents = tuple(jax_magi.dispatch(x, key) for x in inputs.cotangents)
  fixed = tuple(sorted(({"implementation": NATIVE} | options).items()))
  out, lse, max_logits, grads = _forward_and_backward(
    mesh, fixed, (*operands, inputs.sink), cotangents, key
  )
  results = {
    "out": jax_magi.undispatch(np.asarray(out), key),
    "lse": jax_magi.undispatch(np.asarray(lse), key),
    "max_logits": max_logits,
  }
  for (name, role), grad in zip(roles.items(), grads, strict=False):
    results[f"d{name}"] = jax_magi.undispatch(np.asarray(grad), key, role=role)
  if inputs.sink is not None:
    results["dsink"] = grads[3]
  return results


# The length of all masks, so that they share programs.
LENGTH = 96
MASKS = {
  "causal": AttentionMask.causal(LENGTH),
  "full": AttentionMask.full(LENGTH),
  "documents": AttentionMask.from_cu_seqlens([0, 1, 40, 41, 70, 93], causal=True, q_len=LENGTH),
  "full_documents": AttentionMask.from_cu_seqlens([0, 50, 96]),
  "window": AttentionMask.sliding_window(LENGTH, left=9, right=3),
  "prefix": AttentionMask.prefix_lm(30, LENGTH),
  "block_causal": AttentionMask.block_causal(16, LENGTH),
  "shared_question": AttentionMask.shared_question(30, [20, 1, 45]),
  "nothing": AttentionMask(np.zeros((0, 6), np.int32), LENGTH, LENGTH),
}


def check_all_masks(cp_size, **options):
  """Runs all masks through one compiled program. `options` are options of the keys."""
  options["cp_size"] = cp_size
  keys = [jax_magi.magi_attn_flex_key(mask, **options) for mask in MASKS.values()]
  room = functools.reduce(operator.or_, (key.capacities for key in keys))
  mesh = make_mesh(cp=cp_size)
  inputs = make_inputs(
    np.random.default_rng(0), np.float32, LENGTH, LENGTH, 4, 2, 16, 24, num_sinks=0
  )
  for mask in MASKS.values():
    key = jax_magi.magi_attn_flex_key(mask, capacities=room, **options)
    assert key.capacities == room
    # Without several nodes of several ranks, two levels are one.
    is_flat = not 1 < options.get("ranks_per_node", 1) < options["cp_size"]
    is_one_level = options["transport"] == "two_level" and is_flat
    assert key.spec.transport == ("all_to_all" if is_one_level else options["transport"])
    is_deterministic = options["overlap_degree"] in (1, (1,), 2)
    results = run(inputs, key, mesh, deterministic=is_deterministic)
    check_results(results, inputs, mask)


def on_one_device(inputs: Inputs, mask, **options):
  """The results on one device, to compare with."""
  return jax_magi.attention(inputs.q, inputs.k, inputs.v, mask, return_max_logits=True, **options)
