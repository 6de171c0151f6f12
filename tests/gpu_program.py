"""Compiles a step for several nodes of GPUs on one GPU or none, and prints it as scheduled.

python -m tests.gpu_program NODES GPUS DEGREE TRANSPORT MASK ACTION [LOCAL_LENGTH] [OPTION=VALUE..]

NODES x GPUS ranks share a mesh axis; `1 8 2 all_gather full print` is for eight GPUs of one node.
DEGREE is an overlap degree, or the stages of the backward pass in their order: 1-2-1. MASK is
documents, full, window, or neighbours: a window to both sides, with the sequence in order. ACTION
is print; barrier, to print a program with kernel barriers; bfloat16, with gradients that travel so;
keep, with keys that stay; or run, with one GPU. Each of these four may be a list: `2,4 two_level
window,full print` makes two programs, in turns, and lists of one value serve all. Options go to XLA
as compiler options, with values true, false or a number. The key's plan goes to stderr.

On a machine without a GPU, JAX's CUDA plugin (jax-cuda13-plugin, jax-cuda13-pjrt) compiles alone,
with a ptxas in the PATH: where there is none, that of JAX 0.12 crashes.
When the program runs, kernels are real, but collectives move nothing: results mean nothing.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask, overlap
from jax_magi._src.context_parallel.schedule import Order
from tests.machine import HAS_GPU

# The description of the target GPU, for machines that have none.
_TARGET = Path(__file__).parent / "data" / "h200.txtpb"
# The numbers of heads of q, k, v and dout, and their head dim.
HEADS, HEAD_DIM = (8, 2, 2, 8), 128
_OPTIONS = {
  "print": {},
  "run": {},
  "barrier": {"kernel_barrier": True},
  "bfloat16": {"remote_grad_dtype": jnp.bfloat16},
  "keep": {"keep_remote_kv": True},
}


def find_devices(nodes: int, gpus: int) -> list:
  """Devices to compile for, of which at most one exists. Call it before JAX looks for devices."""
  flags = ["--xla_gpu_shard_autotuning=false"]
  name = f"{nodes}x{gpus}x1"  # One process for each GPU.
  if HAS_GPU:
    jax.config.update("jax_mock_gpu_topology", name)
  else:
    jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # Not all that it takes to run is there.
    flags.append("--xla_gpu_autotune_level=0")
  os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
  if HAS_GPU:
    assert jax.local_device_count() == 1
    devices = jax.devices()
  else:
    jax.devices()  # Plugins are found on the way.
    target = _TARGET.read_text()
    topology = topologies.get_topology_desc("", "cuda", target_config=target, topology=name)
    devices = topology.devices
  assert len(devices) == nodes * gpus
  return devices


def make_mask(name: str, length: int) -> AttentionMask:
  """The mask with this name."""
  if name == "documents":
    ends = [0, *(length * x // 16 for x in (1, 2, 6, 7, 10, 16))]
    return AttentionMask.from_cu_seqlens(ends, causal=True)
  if name == "window":
    return AttentionMask.sliding_window(length, left=700)
  if name == "neighbours":
    return AttentionMask.sliding_window(length, left=500, right=500)
  return AttentionMask.full(length)


def make_key(
  nodes: int, gpus: int, degree: str, transport: str, mask: str, local: int
) -> jax_magi.DistAttnKey:
  """The plan of the program. The degree may be an order of stages."""
  stages = tuple(map(int, degree.split("-")))
  options = {
    "cp_size": nodes * gpus,
    "overlap_degree": max(stages),
    "transport": transport,
    "ranks_per_node": gpus,
    "dispatch": "contiguous" if mask == "neighbours" else "area",
  }
  whole = make_mask(mask, nodes * gpus * local)
  key = jax_magi.magi_attn_flex_key(whole, **options)
  if len(stages) == 1:
    return key
  orders = None, Order(stages, (1,) * len(stages))
  capacities = dataclasses.replace(key.capacities, orders=orders)
  return jax_magi.magi_attn_flex_key(whole, capacities=capacities, **options)


def compile_step(devices: list, key: jax_magi.DistAttnKey, action: str, options: dict) -> Any:
  """The compiled step with that plan, and the sharding and shapes of its operands."""
  mesh = Mesh(np.array(devices), ("cp",), axis_types=(AxisType.Auto,))

  def step(q, k, v, dout, key):
    def attend(q, k, v):
      # Named, so that JAX traces no other path.
      options = {"return_max_logits": True, "implementation": "cuda", **_OPTIONS[action]}
      out, meta = jax_magi.calc_attn(q, k, v, key, **options)
      return out, meta.max_logits

    out, backward, max_logits = jax.vjp(attend, q, k, v, has_aux=True)
    # The cotangent depends on the result of the layer, as gradients of later layers do.
    return out, max_logits, backward(out * dout)

  out_specs = (P("cp"), P(), P("cp"))
  fun = jax.shard_map(step, mesh=mesh, in_specs=P("cp"), out_specs=out_specs)
  sharding = NamedSharding(mesh, P("cp"))

  def like(x, dtype=None):
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding)

  shapes = [(key.spec.q_len, heads, HEAD_DIM) for heads in HEADS]
  operands = [like(np.empty(shape, np.int8), jnp.bfloat16) for shape in shapes]
  key_shapes = jax.tree.map(like, key)
  compiled = jax.jit(fun, compiler_options=options).lower(*operands, key_shapes).compile()
  return compiled, sharding, shapes


def run_step(compiled: Any, sharding: NamedSharding, shapes: list, key: Any, local: int) -> None:
  """Runs one rank of a step on the machine's GPU."""
  rng = np.random.default_rng(0)
  values = [
    jax.make_array_from_process_local_data(
      sharding, rng.standard_normal((local, *shape[1:])).astype(jnp.bfloat16), shape
    )
    for shape in shapes
  ]
  rank = jax.local_devices()[0].id
  parts = jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(sharding, x[rank : rank + 1], x.shape), key
  )
  _, _, grads = jax.block_until_ready(compiled(*values, parts))
  print(f"rank {rank} ran: {[list(g.addressable_data(0).shape) for g in grads]}")


def programs_of(*lists: str) -> list[tuple[str, ...]]:
  """Degree, transport, mask and action of each program. Lists of one value serve all programs."""
  values = [words.split(",") for words in lists]
  count = max(map(len, values))
  return list(zip(*(v * count if len(v) == 1 else v for v in values), strict=True))


def main(nodes: int, gpus: int, programs: list[tuple[str, ...]], local: int, **more) -> None:
  devices = find_devices(nodes, gpus)
  options = {**overlap.recommended_flags(), **more}
  for degree, transport, mask, action in programs:
    key = make_key(nodes, gpus, degree, transport, mask, local)
    print(key, file=sys.stderr)
    compiled, *operands = compile_step(devices, key, action, options)
    if action == "run":
      run_step(compiled, *operands, key, local)
    else:
      print(compiled.as_text())


if __name__ == "__main__":
  _, first, second, *words = sys.argv
  numbers = [int(word) for word in words[4:] if word.isdigit()]
  values = {"true": True, "false": False}
  given = [word.split("=") for word in words if "=" in word]
  pairs = {name: values[value] if value in values else int(value) for name, value in given}
  main(int(first), int(second), programs_of(*words[:4]), *(numbers or [1024]), **pairs)
