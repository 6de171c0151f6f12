"""One of several processes that check their exchange together, and print two reports.

python -m tests.one_exchange_check PORT COUNT NUMBER

Each has two CPU devices, and is a node. For the second report, the last process alone compares with
something else than what it should get.
"""

import sys

import jax
import numpy as np
from jax.sharding import AxisType

import jax_magi
from jax_magi._src.exchange_check import api, compare


def _report(mesh):
  return jax_magi.check_exchange(
    mesh, ranks_per_node=2, transports=["two_level"], rows=32, width=4, repeats=1
  )


def main(port: int, count: int, number: int) -> None:
  jax.config.update("jax_num_cpu_devices", 2)
  api._DEGREES = (1,)  # Programs take most of the time.
  jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
  mesh = jax.make_mesh((2 * count,), ("cp",), axis_types=(AxisType.Auto,))
  # Libraries of collectives may print before the first of these lines.
  print(f"\n---\n{_report(mesh)}")
  if number == count - 1:
    buffer_rows = compare.buffer_rows
    compare.buffer_rows = lambda key: [np.roll(rows, 1, axis=1) for rows in buffer_rows(key)]
  print(f"\n---\n{_report(mesh)}")


if __name__ == "__main__":
  main(*map(int, sys.argv[1:]))
