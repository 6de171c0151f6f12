"""Attention over sixteen ranks, in four nodes of four: python -m tests.sixteen_devices DEGREE..."""

import os
import sys

from tests.machine import QUICK_FLAGS


def main(degrees: list[int]) -> None:
  import jax

  from tests.cp_runs import check_all_masks

  assert jax.device_count() == 16
  for degree in degrees:
    for transport in ("two_level", "all_to_all"):
      check_all_masks(16, ranks_per_node=4, overlap_degree=degree, transport=transport)
  print("right")


if __name__ == "__main__":
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["XLA_FLAGS"] = " ".join(["--xla_force_host_platform_device_count=16", *QUICK_FLAGS])
  main([int(word) for word in sys.argv[1:]])
