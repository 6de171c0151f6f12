"""Attention over sixteen ranks, in four nodes of four: python -m tests.sixteen_devices DEGREE..."""

import os
import sys

import numpy as np


def main(degrees: list[int]) -> None:
  import jax

  from jax_magi import magi_attn_flex_key
  from tests.accuracy import check_results, make_inputs
  from tests.cp_runs import LENGTH, MASKS, make_mesh, run

  assert jax.device_count() == 16
  inputs = make_inputs(
    np.random.default_rng(0), np.float32, LENGTH, LENGTH, 4, 2, 16, 24, num_sinks=0
  )
  for degree in degrees:
    options = {"cp_size": 16, "ranks_per_node": 4, "overlap_degree": degree}
    for transport in ("two_level", "all_to_all"):
      for name in ("causal", "documents", "window", "shared_question"):
        key = magi_attn_flex_key(MASKS[name], transport=transport, **options)
        assert key.spec.transport == transport
        check_results(run(inputs, key, make_mesh(cp=16)), inputs, MASKS[name])
  print("right")


if __name__ == "__main__":
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=16"
  main([int(word) for word in sys.argv[1:]])
