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

  That is 0; 1 if there are faults; 2 if there is nothing to check.
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
  if jax.process_index() == 0:  # All have the same report.
    print(report)
    if options.png:
      report.plot().figure.savefig(options.png, dpi=150)
  return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m jax_magi.exchange",
    description="Checks that rows of keys and values travel between devices as they should, by "
    "each transport, and how fast. With several processes, start it on all of them.",
    epilog="Exit status: 0; 1 if a transport is wrong, or ten times slower than another; 2 if the "
    "options do not fit the devices, with a message that says why.",
  )
  parser.add_argument(
    "--ranks-per-node", metavar="N", type=int, help="neighbouring ranks that share a node (all)"
  )
  parser.add_argument(
    "--axis-size",
    metavar="N",
    type=int,
    help="ranks of the context parallel axis (all devices); other groups of them run side by side",
  )
  parser.add_argument(
    "--distributed", action="store_true", help="call jax.distributed.initialize() first"
  )
  parser.add_argument(
    "--transports",
    metavar="NAME",
    nargs="+",
    help="all_to_all, all_gather, two_level or ragged (those that fit)",
  )
  parser.add_argument(
    "--rows", metavar="N", type=int, default=32768, help="that each rank moves, timed (%(default)s)"
  )
  parser.add_argument(
    "--width", metavar="N", type=int, default=2048, help="elements of a row (%(default)s)"
  )
  parser.add_argument("--png", metavar="FILE", help="draw the rates there")
  return parser
