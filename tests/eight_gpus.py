"""Compiles a program for eight GPUs on one or none, and prints it as it is scheduled, or runs it.

python -m tests.eight_gpus OVERLAP_DEGREE needed|all_gather print|print_barrier|run [LOCAL_LENGTH]

`print_barrier` is of a program with kernel barriers.

On a machine without a GPU, JAX's CUDA plugin (jax-cuda13-plugin, jax-cuda13-pjrt) compiles alone,
with a ptxas in the PATH: where there is none, that of JAX 0.12 crashes.
When the program runs, kernels are real, but collectives move nothing: results mean nothing. As
XLA's `ragged_all_to_all` asks the other GPUs, it is run in parts that do not.
"""

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask, overlap
from tests.machine import HAS_GPU

# What XLA has to know of a GPU that is not there.
_TARGET = Path(__file__).parent / "data" / "h200.txtpb"


def find_devices(*flags: str) -> list:
  """Eight GPUs to compile for, of which one or none is there. Call it before JAX looks for some.

  Args:
    *flags: more options for XLA.
  """
  flags = ("--xla_gpu_shard_autotuning=false", *flags)
  if HAS_GPU:
    jax.config.update("jax_mock_gpu_topology", "1x8x1")
  else:
    jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # Not all that it takes to run is there.
    flags += ("--xla_gpu_autotune_level=0",)
  os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
  if HAS_GPU:
    assert jax.local_device_count() == 1
    devices = jax.devices()
  else:
    jax.devices()  # Plugins are found on the way.
    target = _TARGET.read_text()
    topology = topologies.get_topology_desc("", "cuda", target_config=target, topology="1x8x1")
    devices = topology.devices
  assert len(devices) == 8
  return devices


def main(overlap_degree: int, exchange: str, action: str, local: int) -> None:
  decompose = "--xla_gpu_unsupported_enable_ragged_all_to_all_decomposer=true"
  devices = find_devices(*([decompose] if action == "run" else []))
  mesh = Mesh(np.array(devices), ("cp",), axis_types=(AxisType.Auto,))
  mask = AttentionMask.from_cu_seqlens([0, 3 * local, 5 * local, 8 * local], causal=True)
  if exchange == "all_gather":
    mask = AttentionMask.full(8 * local)
  key = jax_magi.magi_attn_flex_key(
    mask, cp_size=8, overlap_degree=overlap_degree, all_gather=exchange == "all_gather"
  )

  def step(q, k, v, dout, key):
    def attend(q, k, v):
      out, meta = jax_magi.calc_attn(
        q, k, v, key, return_max_logits=True, kernel_barrier=action == "print_barrier"
      )
      return out, meta.max_logits

    out, backward, max_logits = jax.vjp(attend, q, k, v, has_aux=True)
    # Of what follows a layer, gradients depend on its result.
    return out, max_logits, backward(out * dout)

  out_specs = (P("cp"), P(), P("cp"))
  fun = jax.shard_map(step, mesh=mesh, in_specs=P("cp"), out_specs=out_specs)
  sharding = NamedSharding(mesh, P("cp"))

  def like(x, dtype=None):
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding)

  shapes = [(8 * local, heads, 128) for heads in (8, 2, 2, 8)]
  operands = [like(np.empty(shape, np.int8), jnp.bfloat16) for shape in shapes]
  key_shapes = jax.tree.map(like, key)
  jitted = jax.jit(fun, compiler_options=overlap.recommended_flags())
  compiled = jitted.lower(*operands, key_shapes).compile()
  if action.startswith("print"):
    print(compiled.as_text())
    return
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


if __name__ == "__main__":
  main(int(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4]) if len(sys.argv) > 4 else 1024)
