"""Assigns rows to transfers.

Everything here is numpy on the host, from ranges of rows to ranges of rows.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jax_magi._src.context_parallel.hop_choice import NEARLY_ALL, cheapest_rows
from jax_magi._src.context_parallel.intervals import cut, starts_within, union
from jax_magi._src.context_parallel.legs import Rows, legs_of
from jax_magi._src.context_parallel.transport import Transport

# The number of pieces of a rank's rows for each transfer, if transfers take pieces in turns.
_TURNS = 4


def with_transfers(rows: Rows, transport: Transport) -> Rows:
  """Assigns a transfer to each range of rows, and cuts ranges if needed."""
  count = transport.num_far
  if transport.gathers:
    rows = _in_parts(rows, transport.part_length, count)
  elif count == 1:
    rows = dataclasses.replace(rows, transfer=np.zeros_like(rows.begin))
  else:
    in_order = _in_order(rows, transport)
    in_turns = _in_parts(rows, math.ceil(transport.k_local / (_TURNS * count)), count)
    # Contiguous parts have fewer slices, so turns must save enough rows.
    is_worth_it = _padded(in_turns, transport) < NEARLY_ALL * _padded(in_order, transport)
    rows = in_turns if is_worth_it else in_order
  if transport.num_near:
    per_node = transport.ranks.per_node
    is_near = rows.owner // per_node == rows.rank // per_node
    rows = dataclasses.replace(rows, transfer=np.where(is_near, 0, rows.transfer + 1))
  return rows


def _in_parts(rows: Rows, unit: int, count: int) -> Rows:
  """Assigns pieces of every owner's rows to transfers in turn."""
  index, number, local, end = cut(rows.local, rows.local + rows.size, unit)
  rows = rows[index]
  begin = rows.begin + local - rows.local
  return Rows(rows.rank, begin, end - local, rows.owner, local, number % count)


def _in_order(rows: Rows, transport: Transport) -> Rows:
  """Assigns rows to transfers by position, with equally many rows of each rank or node in each."""
  count, level = transport.num_far, transport.levels[0]
  group, owner = (transport.ranks.index(level, x) for x in (rows.rank, rows.owner))
  moving = rows[group != owner]
  g, begin, end = union(group[group != owner], moving.begin, moving.begin + moving.size)
  before = starts_within(g, end - begin)
  totals = np.bincount(g, end - begin, int(group.max(initial=0)) + 1).astype(np.int64)
  transfer = np.zeros_like(rows.begin)
  for number in range(1, count):
    # The position before which this number of the group's rows lies.
    wanted = totals * number // count
    bound = np.zeros(len(totals), np.int64)
    has = (before <= wanted[g]) & (wanted[g] < before + end - begin)
    bound[g[has]] = begin[has] + wanted[g[has]] - before[has]
    rows, transfer, group = _cut_at(rows, transfer, group, bound)
    transfer += rows.begin >= bound[group]
  return dataclasses.replace(rows, transfer=transfer)


def _cut_at(
  rows: Rows, transfer: np.ndarray, group: np.ndarray, bound: np.ndarray
) -> tuple[Rows, np.ndarray, np.ndarray]:
  """Cuts each range that contains the bound of its group in two."""
  at = bound[group] - rows.begin
  is_cut = (0 < at) & (at < rows.size)
  index = np.repeat(np.arange(len(is_cut)), 1 + is_cut)
  is_second = np.append(False, index[1:] == index[:-1])[: len(index)]
  offset = np.where(is_second, at[index], 0)
  end = np.where(is_cut[index] & ~is_second, at[index], rows.size[index])
  rows = rows[index]
  rows = dataclasses.replace(
    rows, begin=rows.begin + offset, local=rows.local + offset, size=end - offset
  )
  return rows, transfer[index], group[index]


def _padded(rows: Rows, transport: Transport) -> float:
  """The rows that move in all far transfers, including padding. The largest transfer counts twice.

  Without that, a single transfer for all rows would be the cheapest, and nothing would overlap it.
  """
  count = transport.num_far
  leg = legs_of(rows, dataclasses.replace(transport, num_transfers=count))[0]
  most = np.array([cheapest_rows(leg.level, leg.sizes()[:, t], leg.ranks) for t in range(count)])
  return float(most.sum() + count * most.max(initial=0))
