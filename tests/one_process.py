"""One of several processes that attend together.

python -m tests.one_process PORT COUNT NUMBER MASK:DEGREE:TRANSPORT:RANKS_PER_NODE...

Each has one CPU device, makes the same inputs and the same plan, and holds the results to the
accuracy rule.
"""

import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask
from tests.accuracy import check_results, make_inputs
from tests.cp_runs import NATIVE


def main(port: int, count: int, number: int, cases: list[str]) -> None:
  jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
  assert jax.process_count() == count
  assert jax.local_device_count() == 1
  mesh = jax.make_mesh((count,), ("cp",), axis_types=(AxisType.Auto,))
  length = 150
  inputs = make_inputs(
    np.random.default_rng(0), np.float32, length, length, 4, 2, 16, 24, num_sinks=0
  )
  masks = {
    "documents": AttentionMask.from_cu_seqlens([0, 10, 90, 91, length], causal=True),
    "causal": AttentionMask.causal(length),
    "full": AttentionMask.full(length),
  }
  for case in cases:
    name, degree, transport, per_node = case.split(":")
    key = jax_magi.magi_attn_flex_key(
      masks[name],
      cp_size=count,
      overlap_degree=int(degree),
      transport=transport,
      ranks_per_node=int(per_node),
    )
    check_results(_run(inputs, key, mesh), inputs, masks[name])
    print(case, key.stats().transport, flush=True)
  print("right", flush=True)


def _run(inputs, key, mesh):
  def to_global(x, spec):
    def part(index):
      return x[index]

    return jax.make_array_from_callback(np.shape(x), NamedSharding(mesh, spec), part)

  operands = [
    to_global(jax_magi.dispatch(x, key), P("cp"))
    for x in (inputs.q, inputs.k, inputs.v, *inputs.cotangents)
  ]
  sink = to_global(inputs.sink, P())
  parts = jax.tree.map(lambda x: to_global(x, P("cp")), key)

  @jax.jit
  def fun(q, k, v, dout, dlse, sink, key):
    def attend(q, k, v, sink):
      def step(q, k, v, key, sink):
        out, meta = jax_magi.calc_attn(
          q, k, v, key, sink=sink, return_max_logits=True, implementation=NATIVE
        )
        return out, meta.lse, meta.max_logits

      specs = (P("cp"),) * 4 + (P(),)
      outs = (P("cp"), P("cp"), P())
      fun = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=outs)
      out, lse, max_logits = fun(q, k, v, key, sink)
      return (out, lse), max_logits

    (out, lse), vjp, max_logits = jax.vjp(attend, q, k, v, sink, has_aux=True)
    results = (out, lse, *vjp((dout, dlse)), max_logits)
    everywhere = NamedSharding(mesh, P())
    return tuple(jax.lax.with_sharding_constraint(x, everywhere) for x in results)

  *rows, dsink, max_logits = (np.asarray(x) for x in fun(*operands, sink, parts))
  results = {
    name: jax_magi.undispatch(x, key)
    for name, x in zip(("out", "lse", "dq", "dk", "dv"), rows, strict=True)
  }
  return {**results, "dsink": dsink, "max_logits": max_logits}


if __name__ == "__main__":
  main(*map(int, sys.argv[1:4]), sys.argv[4:])
