"""Keys from masks, on the host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_magi._src.arguments import as_int32, check_choice, check_flag, check_length, known_value
from jax_magi._src.context_parallel import assignment
from jax_magi._src.context_parallel.capacities import TRANSPORTS, Capacities
from jax_magi._src.context_parallel.chunks import Dispatch, num_chunks
from jax_magi._src.context_parallel.hops import ALL, Ranks
from jax_magi._src.context_parallel.key import DistAttnKey, check_key, make_key
from jax_magi._src.context_parallel.links import Links, check_links
from jax_magi._src.context_parallel.plan import Plan, assign_by_area, make_plan
from jax_magi._src.context_parallel.predict import best_orders, predict, stage_seconds
from jax_magi._src.context_parallel.routes import levels_of
from jax_magi._src.masks.mask import AttentionMask
from jax_magi._src.masks.slices import area_of

# Chunks of a rank, where the caller does not say: enough to balance one causal document within 1%.
_CHUNKS_OF_RANK = 32
# Degrees that "auto" chooses from.
_DEGREES = (0, 1, 2, 4)
# Smaller chunks fill no tile of the kernel; but a short sequence gets four of a rank all the same.
_SMALLEST_CHUNK = 128


def magi_attn_flex_key(
  q_ranges: Any,
  k_ranges: Any = None,
  attn_type_map: Any = None,
  *,
  total_seqlen: int | None = None,
  total_seqlen_k: int | None = None,
  cp_size: int,
  chunk_size: int | None = None,
  overlap_degree: int | str | Sequence[int] = 1,
  dispatch: Any = "area",
  cross_attention: bool | None = None,
  capacities: Capacities | None = None,
  transport: str = "auto",
  ranks_per_node: int | None = None,
  links: Links | None = None,
) -> DistAttnKey:
  """Plans attention over a mask on `cp_size` ranks. Numpy on the host; equal on every process.

  Args:
    q_ranges: int `[n, 2]`, half open, as in `flex_flash_attn_func`; or an `AttentionMask`, and then
      neither of the next two.
    k_ranges: int `[n, 2]`, likewise.
    attn_type_map: int `[n]` of `MaskType`; None is FULL.
    total_seqlen: number of tokens; may be left out (the largest end).
    total_seqlen_k: number of keys, in cross-attention.
    cp_size: number of ranks: the size of the mesh axis.
    chunk_size: tokens that stay together; None is a power of two that gives each rank 32 chunks or
      more, of 128 tokens or more where the sequence is long enough.
    overlap_degree: into how many transfers, each with a call of the kernel, the keys of other ranks
      are split; the call over a rank's own keys needs none. 0 is one transfer and one call. Several
      numbers, or "auto", which is (0, 1, 2, 4), let the planner choose the one that is predicted to
      finish first. It then also chooses the order of kernels and transfers, and whether the forward
      pass merges stages or computes each query in one stage. With a single number all masks have
      the same order, and so fewer compiled programs.
    dispatch: who gets which chunk. "area": even work, few rows to move. "zigzag": the i-th block
      from the front and from the back. "contiguous": in order, so that the function `dispatch` only
      pads. Or int `[num_chunks]`, the rank of each chunk, equally many for each.
    cross_attention: whether keys are other tokens than queries, dispatched in order (`role="k"`);
      None is if there are more or fewer.
    capacities: those of another key, to share its compiled step; None is round numbers above what
      is needed.
    transport: how rows travel. "all_gather": all rows to all ranks. "all_to_all": those that are
      needed, padded to the largest number that any rank sends to another. "two_level": once to
      each node that needs them, and from there to its ranks. "ragged": exactly those that are
      needed, on GPUs of one node (see the documentation first). "auto": one of the first three,
      whichever is predicted to take the least time.
    ranks_per_node: neighbouring ranks that share a node, and so faster links; None is all of them.
    links: what moving a row costs, for `dispatch="area"` and `transport="auto"`.

  Returns:
    A `DistAttnKey`.
  """
  mask = _as_mask(q_ranges, k_ranges, attn_type_map, total_seqlen, total_seqlen_k)
  cp_size = _check_positive("cp_size", cp_size)
  if cross_attention is None:
    is_cross = mask.q_len != mask.k_len
  else:
    is_cross = check_flag("cross_attention", cross_attention)
  if not is_cross and mask.q_len != mask.k_len:
    raise ValueError(
      f"queries and keys are the same tokens unless cross_attention, but the mask has {mask.q_len} "
      f"queries and {mask.k_len} keys"
    )
  keys = None
  if is_cross:
    size = _chunk_size("total_seqlen_k", None, mask.k_len, cp_size)
    count = num_chunks(mask.k_len, size, cp_size)
    keys = Dispatch(mask.k_len, size, cp_size, assignment.contiguous(count, cp_size))
  ranks = check_ranks(cp_size, ranks_per_node)
  links = check_links(links)
  sides = [(x, keys or x) for x in _dispatches(mask, ranks, chunk_size, dispatch, keys, links)]
  return _plan_key(mask, sides, overlap_degree, capacities, transport, ranks, links)


def magi_attn_varlen_key(
  cu_seqlens_q: Any,
  cu_seqlens_k: Any = None,
  *,
  causal: bool = False,
  total_seqlen: int | None = None,
  total_seqlen_k: int | None = None,
  cp_size: int,
  **options: Any,
) -> DistAttnKey:
  """`magi_attn_flex_key` for packed documents, given by cumulative lengths that begin with 0.

  Args:
    cu_seqlens_q: int `[num_documents + 1]`.
    cu_seqlens_k: likewise, of the keys; None is those of the queries.
    causal: whether tokens see only those before them.
    total_seqlen: number of tokens, if there are more than those of the documents.
    total_seqlen_k: number of keys, likewise; None is `total_seqlen` where documents have as many
      keys as queries, and else those of the documents.
    cp_size: number of ranks.
    **options: as in `magi_attn_flex_key`.
  """
  _check_total("total_seqlen", total_seqlen, "cu_seqlens_q", cu_seqlens_q)
  other = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
  _check_total("total_seqlen_k", total_seqlen_k, "cu_seqlens_k", other)
  k_len = total_seqlen_k
  if k_len is None and (cu_seqlens_k is None or np.array_equal(cu_seqlens_q, cu_seqlens_k)):
    k_len = total_seqlen
  mask = AttentionMask.from_cu_seqlens(
    cu_seqlens_q, cu_seqlens_k, causal=causal, q_len=total_seqlen, k_len=k_len
  )
  return magi_attn_flex_key(mask, cp_size=cp_size, **options)


def key_for_new_mask(
  key: DistAttnKey,
  q_ranges: Any,
  k_ranges: Any = None,
  attn_type_map: Any = None,
  *,
  overlap_degree: int | str | Sequence[int] | None = None,
  capacities: Capacities | None = None,
  transport: str = "auto",
  links: Links | None = None,
) -> DistAttnKey:
  """Another mask on the same dispatch, for models whose layers have different masks.

  Args:
    key: says which rank has which tokens.
    q_ranges: int `[n, 2]`, or an `AttentionMask`.
    k_ranges: int `[n, 2]`.
    attn_type_map: int `[n]` of `MaskType`; None is FULL.
    overlap_degree: as in `magi_attn_flex_key`; None is that of `key`, chosen as freely as there.
    capacities: as in `magi_attn_flex_key`; so the next two.
    transport: see above.
    links: see above.
  """
  spec = check_key(key).spec
  lengths = (None, None) if isinstance(q_ranges, AttentionMask) else (spec.q_len, spec.k_len)
  mask = _as_mask(q_ranges, k_ranges, attn_type_map, *lengths)
  if (mask.q_len, mask.k_len) != (spec.q_len, spec.k_len):
    raise ValueError(
      f"the key is for {spec.q_len} queries and {spec.k_len} keys, "
      f"but the new mask has {mask.q_len} and {mask.k_len}"
    )
  queries = _dispatch_of(key.q_chunks, spec.q_len, spec.q_chunk_size, spec.cp_size)
  keys = queries
  if spec.is_cross:
    keys = _dispatch_of(key.k_chunks, spec.k_len, spec.k_chunk_size, spec.cp_size)
  degree: Any = overlap_degree
  if overlap_degree is None:
    was_free = spec.capacities.orders != (None, None)
    degree = (spec.overlap_degree,) if was_free else spec.overlap_degree
  sides = [(queries, keys)]
  return _plan_key(mask, sides, degree, capacities, transport, spec.ranks, check_links(links))


def _as_mask(
  q_ranges: Any, k_ranges: Any, attn_type_map: Any, q_len: Any, k_len: Any
) -> AttentionMask:
  """A known mask."""
  if isinstance(q_ranges, AttentionMask):
    if k_ranges is not None or attn_type_map is not None:
      raise ValueError("k_ranges and attn_type_map go with q_ranges, but a mask was given instead")
    mask = q_ranges
    for name, length, have in (
      ("total_seqlen", q_len, mask.q_len),
      ("total_seqlen_k", k_len, mask.k_len),
    ):
      if length is not None and length != have:
        raise ValueError(f"{name} is {length}, but the mask has {have}")
  else:
    if k_ranges is None:
      raise ValueError("k_ranges must be given with q_ranges")
    for name, length in (("total_seqlen", q_len), ("total_seqlen_k", k_len)):
      if length is not None:
        check_length(name, length)
    k_len = q_len if k_len is None else k_len
    mask = AttentionMask.from_ranges(q_ranges, k_ranges, attn_type_map, q_len=q_len, k_len=k_len)
    if q_len is None and k_len is None and mask.q_len != mask.k_len:
      length = max(mask.q_len, mask.k_len)
      mask = AttentionMask(mask.slices, length, length)
  slices = known_value(mask.slices)
  if slices is None:
    raise ValueError(
      "a key is planned on the host, from a known mask; got a traced one: make the key outside "
      "of jit and pass it in"
    )
  if slices.ndim != 2:
    raise ValueError(f"the mask must have slices [num_slices, 6], got {list(slices.shape)}")
  return AttentionMask(slices, mask.q_len, mask.k_len)


def _check_total(name: str, length: Any, cu_name: str, cu_seqlens: Any) -> None:
  """A length that is given, and is not less than that of all documents."""
  if length is None:
    return
  cu = as_int32(cu_name, cu_seqlens, ("num_documents + 1",))
  if check_length(name, length) < (int(cu[-1]) if cu.size and isinstance(cu, np.ndarray) else 0):
    raise ValueError(f"{name} must be at least the {cu[-1]} tokens of {cu_name}, got {length}")


def _check_positive(name: str, value: Any) -> int:
  value = check_length(name, value)
  if value == 0:
    raise ValueError(f"{name} must be positive, got 0")
  return value


def _chunk_size(name: str, size: Any, length: int, cp_size: int) -> int:
  """The given size, if each rank gets a chunk, or one that fits."""
  _check_positive(name, length)
  if size is not None:
    size = _check_positive("chunk_size", size)
    if length < size * cp_size:
      raise ValueError(
        f"{name} must be at least a chunk for each rank, {cp_size} x {size} tokens, got {length}; "
        "take a smaller chunk_size"
      )
    return size
  local = math.ceil(length / cp_size)
  wanted = max(local // _CHUNKS_OF_RANK, min(_SMALLEST_CHUNK, local // 4), 1)
  return 1 << (wanted.bit_length() - 1)


def check_ranks(cp_size: int, per_node: Any) -> Ranks:
  """The ranks and their nodes."""
  if per_node is None:
    return Ranks(cp_size, cp_size)
  per_node = min(_check_positive("ranks_per_node", per_node), cp_size)
  if cp_size % per_node:
    raise ValueError(f"ranks_per_node must divide cp_size={cp_size}, got {per_node}")
  return Ranks(cp_size, per_node)


def _dispatches(
  mask: AttentionMask,
  ranks: Ranks,
  chunk_size: Any,
  dispatch: Any,
  keys: Dispatch | None,
  links: Links,
) -> list[Dispatch]:
  """Queries over ranks, in ways to choose from; and keys too, if `keys` is None."""
  length, cp_size = mask.q_len, ranks.count
  if not isinstance(dispatch, str):
    of_chunks = as_int32("dispatch", dispatch, ("num_chunks",))
    if not isinstance(of_chunks, np.ndarray):
      raise ValueError("dispatch must be known, got a traced array")
    return [_explicit_dispatch(of_chunks, length, cp_size, chunk_size)]
  check_choice("dispatch", dispatch, ("area", "zigzag", "contiguous"))
  if dispatch == "area":
    size = _chunk_size("total_seqlen", chunk_size, length, cp_size)
    slices = np.asarray(mask.slices)
    slices = slices[area_of(slices) > 0].astype(np.int64)
    ways = assign_by_area(slices, length, size, cp_size, keys, links, ranks.per_node)
    return [Dispatch(length, size, cp_size, way) for way in ways]
  blocks = 2 if dispatch == "zigzag" else 1
  if chunk_size is None:
    _check_positive("total_seqlen", length)
    size = math.ceil(length / (blocks * cp_size))
  else:
    size = _chunk_size("total_seqlen", chunk_size, length, cp_size)
  count = num_chunks(length, size, cp_size, blocks)
  assign = assignment.zigzag if dispatch == "zigzag" else assignment.contiguous
  return [Dispatch(length, size, cp_size, assign(count, cp_size))]


def _explicit_dispatch(ranks: np.ndarray, length: int, cp_size: int, chunk_size: Any) -> Dispatch:
  _check_positive("total_seqlen", length)
  _check_positive("the number of chunks in dispatch", len(ranks))
  size = math.ceil(length / len(ranks)) if chunk_size is None else chunk_size
  size = _check_positive("chunk_size", size)
  if len(ranks) * size < length:
    raise ValueError(
      f"dispatch has {len(ranks)} chunks of {size} tokens, too few for total_seqlen={length}"
    )
  counts = np.bincount(np.clip(ranks, -1, cp_size) + 1, minlength=cp_size + 2)
  if counts[0] or counts[-1] or (counts[1:-1] != counts[1]).any():
    raise ValueError(
      f"dispatch must give each of {cp_size} ranks equally many chunks, got {ranks.tolist()}"
    )
  return Dispatch(length, size, cp_size, ranks)


def _dispatch_of(chunks: Any, length: int, chunk_size: int, cp_size: int) -> Dispatch:
  """The dispatch that a whole, known key has."""
  value = known_value(chunks)
  if value is None or value.ndim != 2 or value.shape[0] != cp_size:
    raise ValueError(f"key must be known and of all {cp_size} ranks")
  ranks = np.empty(value.size, np.int32)
  ranks[value] = np.arange(cp_size, dtype=np.int32)[:, None]
  return Dispatch(length, chunk_size, cp_size, ranks)


def _plan_key(
  mask: AttentionMask,
  sides: list[tuple[Dispatch, Dispatch]],
  overlap_degree: Any,
  capacities: Any,
  transport: Any,
  ranks: Ranks,
  links: Links,
) -> DistAttnKey:
  """The key of the plan that is predicted to finish first, of several dispatches and degrees."""
  check_choice("transport", transport, ("auto", *TRANSPORTS))
  if transport == "ragged" and ranks.num_nodes > 1:
    raise ValueError(
      f"transport='ragged' is for the GPUs of one node, but {ranks.count} ranks are on "
      f"{ranks.num_nodes} nodes: XLA would make an all-gather of it; take 'two_level'"
    )
  if transport == "two_level" and len(levels_of(transport, ranks)) == 1:
    transport = "all_to_all"  # Of one node, or of nodes of one rank, it is the same.
  degrees = _check_degree(overlap_degree)
  hops = None
  if capacities is not None:
    if not isinstance(capacities, Capacities):
      raise ValueError(f"capacities must be Capacities, got {type(capacities).__name__}")
    if capacities.overlap_degree not in degrees:
      raise ValueError(f"overlap_degree is {overlap_degree}, but capacities are of {capacities}")
    degrees, hops = (capacities.overlap_degree,), capacities.hops
    transport = _transport_of(capacities, transport, ranks)
  slices = np.asarray(mask.slices)
  is_free = capacities is None and not isinstance(overlap_degree, (int, np.integer))
  is_whole, orders = None if is_free else False, None
  if capacities is not None:
    sides = sides[:1]  # Others may need more room than there is.
    is_whole, orders = capacities.whole_rows is not None, capacities.orders
  best, key = math.inf, None
  for queries, keys in sides:
    for degree in degrees:
      plan = make_plan(slices, queries, keys, degree, ranks, transport, hops, links, is_whole)
      plan = plan if orders is None else dataclasses.replace(plan, orders=orders)
      plan, seconds = _scheduled(plan, links, is_free=is_free)
      if key is None or seconds < best:
        best, key = seconds, (plan, queries, keys)
  assert key is not None
  return make_key(*key, capacities)


def _check_degree(degree: Any) -> tuple[int, ...]:
  """The degrees to choose from."""
  if isinstance(degree, str):
    if degree != "auto":
      raise ValueError(f"overlap_degree must be numbers or 'auto', got {degree!r}")
    return _DEGREES
  if isinstance(degree, (tuple, list)):
    if not degree:
      raise ValueError("overlap_degree must be at least one number, got none")
    return tuple(check_length("overlap_degree", one) for one in degree)
  return (check_length("overlap_degree", degree),)


def _scheduled(plan: Plan, links: Links, *, is_free: bool) -> tuple[Plan, float]:
  """The plan, with the best stages and orders if it is free, and when it is predicted to finish."""
  choices = [plan]
  if is_free and plan.whole is not None:
    choices.append(dataclasses.replace(plan, whole=None))
  best, found = math.inf, plan
  for choice in choices:
    areas = plan.areas() if choice.whole is None else choice.whole.areas(), plan.areas()
    is_merged = choice.whole is None and bool(plan.overlap_degree)
    kernels = stage_seconds(*areas, links, is_merged=is_merged)
    if is_free and plan.overlap_degree and plan.ranks.count > 1:
      orders = best_orders(plan.hops, plan.ranks, kernels, links)
      choice = dataclasses.replace(choice, orders=orders)
    arguments = plan.hops, plan.ranks, plan.overlap_degree, kernels, links, choice.orders
    seconds = predict(*arguments).total
    if seconds < best:
      best, found = seconds, choice
  return found, best


def _transport_of(capacities: Capacities, transport: str, ranks: Ranks) -> str:
  """The transport that capacities are of."""
  levels = {hop.level for hops in capacities.hops for hop in hops}
  kind = capacities.hops[0][0].kind
  found = "two_level" if levels != {ALL} else "all_to_all" if kind == "permute" else kind
  if transport not in ("auto", found) or not levels.issubset(levels_of(found, ranks)):
    raise ValueError(
      f"capacities are of transport {found!r}, but transport is {transport!r}, with "
      f"{ranks.per_node} ranks to a node: {capacities}"
    )
  return found
