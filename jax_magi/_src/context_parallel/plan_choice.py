"""Chooses the best plan of a mask by its predicted time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jax_magi._src.arguments import check_choice, check_length
from jax_magi._src.context_parallel.capacities import (
  TRANSPORTS,
  Capacities,
  NoRoomError,
  rounded_hops,
  rounded_rows,
)
from jax_magi._src.context_parallel.chunks import Dispatch
from jax_magi._src.context_parallel.hops import ALL, Ranks
from jax_magi._src.context_parallel.key import DistAttnKey, make_key
from jax_magi._src.context_parallel.links import Links
from jax_magi._src.context_parallel.part_shares import PartShares
from jax_magi._src.context_parallel.pieces import ChunkPieces, needs_of
from jax_magi._src.context_parallel.plan import Plan, make_plan
from jax_magi._src.context_parallel.predict import (
  Kernels,
  best_order,
  expansion_seconds,
  predict,
  stage_seconds,
)
from jax_magi._src.context_parallel.schedule import Order
from jax_magi._src.context_parallel.transport import levels_of

# Degrees that "auto" chooses from.
_DEGREES = (0, 1, 2, 4)


def choose_plan(
  pieces: ChunkPieces,
  sides: list[tuple[Dispatch, Dispatch]],
  overlap_degree: Any,
  capacities: Any,
  transport: Any,
  ranks: Ranks,
  links: Links,
) -> DistAttnKey:
  """The key of the plan that is predicted to finish first, among several dispatches and degrees.

  Args:
    pieces: the pieces of the mask, by chunks of queries.
    sides: candidates for the dispatch of queries and of keys.
    overlap_degree: as in `magi_attn_flex_key`.
    capacities: as in `magi_attn_flex_key`.
    transport: as in `magi_attn_flex_key`.
    ranks: the ranks of the axis, and their nodes.
    links: the speeds that determine the cost of rows.
  """
  check_choice("transport", transport, ("auto", *TRANSPORTS))
  if transport == "ragged" and ranks.num_nodes > 1:
    raise ValueError(
      f"transport='ragged' is for the GPUs of one node, but {ranks.count} ranks are on "
      f"{ranks.num_nodes} nodes: XLA would turn it into an all-gather; use 'two_level'"
    )
  if transport == "two_level" and len(levels_of(transport, ranks)) == 1:
    transport = "all_to_all"  # On one node, or on nodes of one rank, it is the same.
  degrees = _check_degree(overlap_degree)
  hops = orders = None
  is_free = capacities is None and not isinstance(overlap_degree, (int, np.integer))
  is_whole = None if is_free else False
  if capacities is not None:
    if not isinstance(capacities, Capacities):
      raise ValueError(f"capacities must be Capacities, got {type(capacities).__name__}")
    if capacities.overlap_degree not in degrees:
      raise ValueError(f"overlap_degree is {overlap_degree}, but capacities are of {capacities}")
    degrees, hops = (capacities.overlap_degree,), capacities.hops
    transport = _transport_of(capacities, transport, ranks)
    is_whole, orders = capacities.whole_rows is not None, capacities.orders

  def candidates() -> Iterator[tuple[Plan, Dispatch, Dispatch]]:
    for queries, keys in sides:
      needs = needs_of(pieces, queries, keys)
      for degree in degrees:
        plan = make_plan(needs, degree, ranks, transport, hops, links, is_whole)
        plan = plan if orders is None else dataclasses.replace(plan, orders=orders)
        yield plan, queries, keys

  if capacities is not None:
    return _first_that_fits(candidates(), capacities)
  best, key = math.inf, None
  for plan, queries, keys in candidates():
    plan, seconds = _scheduled(
      plan, queries.local_length, keys.local_length, links, is_free=is_free
    )
    if key is None or seconds < best:
      best, key = seconds, (plan, queries, keys)
  assert key is not None
  return make_key(*key)


def _first_that_fits(
  candidates: Iterable[tuple[Plan, Dispatch, Dispatch]], capacities: Capacities
) -> DistAttnKey:
  """The key of the first plan that fits. If none does, the error is that of the first plan."""
  errors = []
  for candidate in candidates:
    try:
      return make_key(*candidate, capacities)
    except NoRoomError as error:
      errors.append(error)
  raise errors[0]


def _check_degree(degree: Any) -> tuple[int, ...]:
  """Checks the overlap degree; returns the degrees to choose from."""
  if isinstance(degree, str):
    if degree != "auto":
      raise ValueError(f"overlap_degree must be numbers or 'auto', got {degree!r}")
    return _DEGREES
  if isinstance(degree, (tuple, list)):
    if not degree:
      raise ValueError("overlap_degree must have at least one number, got none")
    return tuple(check_length("overlap_degree", one) for one in degree)
  return (check_length("overlap_degree", degree),)


def _scheduled(
  plan: Plan, q_local: int, k_local: int, links: Links, *, is_free: bool
) -> tuple[Plan, float]:
  """The plan with its predicted time. If it is free, with the best stages and orders of steps."""
  choices = [plan]
  if is_free and plan.whole is not None:
    choices.append(dataclasses.replace(plan, whole=None))
  is_ordered = is_free and plan.overlap_degree and plan.ranks.count > 1

  limit = k_local * plan.ranks.count
  hops = rounded_hops(plan.hops, limit)

  def buffers(num_rows: np.ndarray) -> tuple[int, ...]:
    return rounded_rows(num_rows.max(axis=0, initial=0), limit)

  def order_of(number: int) -> Order:
    expanded = None if expansion is None else expansion[:, number]
    return best_order(hops, plan.ranks, kernels[number], links, number, expanded)

  own, rows = k_local if plan.overlap_degree else 0, buffers(plan.num_rows)
  keys, queries = (own, *rows) if own else rows, [q_local] * plan.num_stages
  of_keys = PartShares(*plan.slices, plan.ranks.count, keys, is_backward=True)
  best, found, backward = math.inf, plan, None
  for choice in choices:
    slices, areas, whole_rows = plan.slices, plan.areas(), None
    if choice.whole is not None:
      slices, areas = choice.whole.slices, choice.whole.areas()
      whole_rows = buffers(choice.whole.num_rows)
    is_merged = choice.whole is None and bool(plan.overlap_degree)
    seconds = stage_seconds(areas, plan.areas(), links, is_merged=is_merged)
    of_queries = PartShares(*slices, plan.ranks.count, queries, is_backward=False)
    kernels = Kernels(seconds[..., 0], of_queries), Kernels(seconds[..., 1], of_keys)
    expansion = expansion_seconds(own, rows, whole_rows, links)
    if is_ordered:
      # The backward pass is the same for all choices.
      backward = backward or order_of(1)
      choice = dataclasses.replace(choice, orders=(order_of(0), backward))
    arguments = hops, plan.ranks, plan.overlap_degree, kernels, links, choice.orders
    total = predict(*arguments, expansion=expansion).total
    if total < best:
      best, found = total, choice
  return found, best


def _transport_of(capacities: Capacities, transport: str, ranks: Ranks) -> str:
  """The transport that capacities were made for."""
  levels = {hop.level for hops in capacities.hops for hop in hops}
  kind = capacities.hops[0][0].kind
  found = "two_level" if levels != {ALL} else "all_to_all" if kind == "permute" else kind
  if transport not in ("auto", found) or not levels.issubset(levels_of(found, ranks)):
    raise ValueError(
      f"capacities are of transport {found!r}, but transport is {transport!r}, with "
      f"{ranks.per_node} ranks to a node: {capacities}"
    )
  return found


####
