"""The command line: `python -m jax_magi.exchange`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

import jax
from jax.sharding import AxisType

from jax_magi._src.exchange_check.api import check_exchange


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command, and returns its exit status.

  The status is 0; 1 if there are faults; 2 if the options do not fit the devices.
  """
  parser = _parser()
  options = parser.parse_args(arguments)
  if options.png and importlib.util.find_spec("matplotlib") is None:
    parser.error("--png needs matplotlib: pip install 'jax-magi[plot]'")
  if options.distributed:
    jax.distributed.initialize()
  count = jax.device_count()
  size = count if options.axis_size is None else options.axis_size
  try:
    if size < 1 or count % size:
      raise ValueError(f"--axis-size must divide the number of devices, {count}, got {size}")
    mesh = jax.make_mesh((count // size, size), ("dp", "cp"), axis_types=(AxisType.Auto,) * 2)
    report = check_exchange(
      mesh,
      ranks_per_node=options.ranks_per_node,
      transports=options.transports,
      rows=options.rows,
      width=options.width,
    )
  except ValueError as error:
    print(f"jax_magi.exchange: {error}", file=sys.stderr)
    return 2
  if jax.process_index() == 0:  # All processes have the same report.
    print(report)
    if options.png:
      report.plot().figure.savefig(options.png, dpi=150)
  return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m jax_magi.exchange",
    description="Tests the exchange of keys, values and their gradients between devices by each "
    "transport, and measures its speed. With several processes, start it on all of them.",
    epilog="Exit status: 0; 1 if a transport returns wrong rows, or is ten times slower than "
    "another; 2 if the options do not fit the devices. A message states the reason.",
  )
  parser.add_argument(
    "--ranks-per-node",
    metavar="N",
    type=int,
    help="the number of neighbouring ranks that share a node (default: all ranks)",
  )
  parser.add_argument(
    "--axis-size",
    metavar="N",
    type=int,
    help="the number of ranks of the context-parallel axis (default: all devices). With fewer, "
    "groups of ranks exchange rows at the same time",
  )
  parser.add_argument(
    "--distributed", action="store_true", help="call jax.distributed.initialize() first"
  )
  parser.add_argument(
    "--transports",
    metavar="NAME",
    nargs="+",
    help="transports to test: all_to_all, all_gather, two_level, ragged (default: all that fit)",
  )
  parser.add_argument(
    "--rows",
    metavar="N",
    type=int,
    default=32768,
    help="the number of rows that each rank sends in a timed transfer (default: %(default)s)",
  )
  parser.add_argument(
    "--width",
    metavar="N",
    type=int,
    default=2048,
    help="the number of elements of a row (default: %(default)s)",
  )
  parser.add_argument("--png", metavar="FILE", help="write a chart of the rates to this file")
  return parser
