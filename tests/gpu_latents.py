"""Compiles attention of 64 heads for eight GPUs with latents on the wire, or with expanded rows.

python -m tests.gpu_latents DEGREE TRANSPORT MASK LOCAL_LENGTH ROWS

ROWS is a list: `latents,expanded` makes two programs. Prints each as scheduled, forward and
backward: see `gpu_program`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import overlap
from tests import gpu_program

GPUS = 8
HEADS, NOPE, ROPE, VALUE, RANK = 64, 128, 64, 128, 512
# The numbers of 16-bit elements of a token that travel.
WIDTHS = {"latents": RANK + ROPE, "expanded": HEADS * (NOPE + ROPE + VALUE)}


def expand(latent, kv_b):
  """Computes the keys and values of MLA."""
  both = jnp.einsum("tr,rhd->thd", latent[:, :RANK], kv_b)
  rope = jnp.broadcast_to(latent[:, None, RANK:], (len(latent), HEADS, ROPE))
  return jnp.concatenate([both[..., :NOPE], rope], axis=-1), both[..., NOPE:]


def compile_step(devices, key, rows):
  mesh = Mesh(np.array(devices), ("cp",), axis_types=(AxisType.Auto,))

  def step(q, latent, kv_b, dout, key):
    def attend(q, latent, kv_b):
      options = {"implementation": "cuda"}  # Named, so that JAX traces no other path.
      if rows == "latents":
        call = jax_magi.calc_latent_attn
        return call(q, latent, key, expand=lambda rows: expand(rows, kv_b), **options)[0]
      return jax_magi.calc_attn(q, *expand(latent, kv_b), key, **options)[0]

    out, backward = jax.vjp(attend, q, latent, kv_b)
    # The cotangent depends on the result of the layer, as gradients of later layers do.
    return out, backward(out * dout)

  specs = (P("cp"), P("cp"), P(), P("cp"))
  out_specs = (P("cp"), specs[:3])
  fun = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P("cp")), out_specs=out_specs)
  length = key.spec.q_len
  shapes = [
    (length, HEADS, NOPE + ROPE),
    (length, WIDTHS["latents"]),
    (RANK, HEADS, NOPE + VALUE),
    (length, HEADS, VALUE),
  ]

  def like(shape, dtype, spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

  operands = [like(s, jnp.bfloat16, spec) for s, spec in zip(shapes, specs, strict=True)]
  tables = jax.tree.map(lambda x: like(x.shape, x.dtype, P("cp")), key)
  jitted = jax.jit(fun, compiler_options=overlap.recommended_flags())
  return jitted.lower(*operands, tables).compile()


def main(degree, transport, mask, local, kinds):
  devices = gpu_program.find_devices(1, GPUS)
  key = gpu_program.make_key(1, GPUS, degree, transport, mask, int(local))
  for rows in kinds.split(","):
    print(compile_step(devices, key, rows).as_text())


if __name__ == "__main__":
  main(*sys.argv[1:])
