"""Makes keys from masks, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_magi._src.arguments import (
  as_int32,
  check_flag,
  check_length,
  check_positive,
  known_value,
)
from jax_magi._src.context_parallel.capacities import Capacities
from jax_magi._src.context_parallel.dispatch_choice import dispatch_keys, dispatch_queries
from jax_magi._src.context_parallel.key import DistAttnKey, check_key
from jax_magi._src.context_parallel.links import Links, check_links
from jax_magi._src.context_parallel.nodes import check_ranks
from jax_magi._src.context_parallel.pieces import cut_by_chunks
from jax_magi._src.context_parallel.plan_choice import choose_plan
from jax_magi._src.masks.mask import AttentionMask


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
  """Plans attention over a mask on `cp_size` ranks, in NumPy on the host.

  Every process computes the same plan, without communication.

  Args:
    q_ranges: int `[n, 2]`, half open, as in `flex_flash_attn_func`; or an `AttentionMask`, without
      the next two arguments.
    k_ranges: int `[n, 2]`, half open.
    attn_type_map: int `[n]` of `MaskType`. None means FULL.
    total_seqlen: the number of tokens. None means the largest end.
    total_seqlen_k: the number of keys, in cross-attention.
    cp_size: the number of ranks, which is the size of the mesh axis.
    chunk_size: the number of tokens that stay together. None means a power of two that gives each
      rank at least 32 chunks, of at least 128 tokens if the sequence is long enough.
    overlap_degree: the number of transfers in which keys of other ranks arrive. Each has its own
      kernel call, after the call over the rank's own keys. 0 means one transfer and one call. With
      several numbers, or "auto" for (0, 1, 2, 4), the planner takes the one that is predicted to
      finish first. It then also chooses the order of kernels and transfers, and whether the forward
      pass merges stages or computes each query in one stage. With a single number, all masks have
      the same order, and so fewer compiled programs.
    dispatch: the rank of each chunk. "area" balances work and moves few rows. "zigzag" gives each
      rank the i-th block from the front and from the back. "contiguous" keeps the order, so the
      function `dispatch` only pads. Or int `[num_chunks]`, with equally many chunks for each rank.
    cross_attention: whether keys are other tokens than queries, and have an order of their own
      (`role="k"`). None means True if there are more or fewer keys than queries.
    capacities: those of another key, to share its compiled step. None means round numbers above
      what is needed.
    transport: how rows travel. "all_gather" moves all rows to all ranks. "all_to_all" moves the
      needed rows, padded to the largest number between two ranks. "two_level" moves each row once
      to each node that needs it, and from there to its ranks. "ragged" moves exactly the needed
      rows, on GPUs of one node (see the documentation first). "auto" takes one of the first three,
      whichever is predicted to finish first.
    ranks_per_node: the number of neighbouring ranks that share a node. None means all ranks.
    links: speeds of links and kernels, for `dispatch="area"` and `transport="auto"`.

  Returns:
    A `DistAttnKey`.
  """
  mask = _known_mask(q_ranges, k_ranges, attn_type_map, total_seqlen, total_seqlen_k)
  cp_size = check_positive("cp_size", cp_size)
  if cross_attention is None:
    is_cross = mask.q_len != mask.k_len
  else:
    is_cross = check_flag("cross_attention", cross_attention)
  if not is_cross and mask.q_len != mask.k_len:
    raise ValueError(
      f"queries and keys are the same tokens unless cross_attention, but the mask has {mask.q_len} "
      f"queries and {mask.k_len} keys"
    )
  for name, length in (("total_seqlen_k", mask.k_len), ("total_seqlen", mask.q_len)):
    check_positive(name, length)
  ranks, links = check_ranks(cp_size, ranks_per_node), check_links(links)
  slices = np.asarray(mask.slices)
  keys = dispatch_keys(mask.k_len, cp_size) if is_cross else None
  pieces, queries = dispatch_queries(slices, mask.q_len, ranks, chunk_size, dispatch, keys, links)
  sides = [(x, keys or x) for x in queries]
  return choose_plan(pieces, sides, overlap_degree, capacities, transport, ranks, links)


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
    cu_seqlens_k: int `[num_documents + 1]`, for the keys. None means those of the queries.
    causal: whether tokens see only themselves and earlier tokens.
    total_seqlen: the number of tokens, if there is padding after the documents.
    total_seqlen_k: the number of keys, if there is padding after the documents. None means
      `total_seqlen` if documents have as many keys as queries, or else the end of the documents.
    cp_size: the number of ranks.
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
  """Plans another mask on the same order of tokens, for models whose layers have different masks.

  Args:
    key: the key whose order of tokens is kept.
    q_ranges: int `[n, 2]`, half open; or an `AttentionMask`, without the next two arguments.
    k_ranges: int `[n, 2]`, half open.
    attn_type_map: int `[n]` of `MaskType`. None means FULL.
    overlap_degree: as in `magi_attn_flex_key`. None means that of `key`.
    capacities: as in `magi_attn_flex_key`.
    transport: as in `magi_attn_flex_key`.
    links: as in `magi_attn_flex_key`.
  """
  spec = check_key(key).spec
  lengths = (None, None) if isinstance(q_ranges, AttentionMask) else (spec.q_len, spec.k_len)
  mask = _known_mask(q_ranges, k_ranges, attn_type_map, *lengths)
  if (mask.q_len, mask.k_len) != (spec.q_len, spec.k_len):
    raise ValueError(
      f"the key is for {spec.q_len} queries and {spec.k_len} keys, "
      f"but the new mask has {mask.q_len} and {mask.k_len}"
    )
  degree: Any = overlap_degree
  if overlap_degree is None:
    was_free = spec.capacities.orders != (None, None)
    degree = (spec.overlap_degree,) if was_free else spec.overlap_degree
  sides, ranks, links = [check_key(key).dispatches()], spec.ranks, check_links(links)
  pieces = cut_by_chunks(np.asarray(mask.slices), spec.q_chunk_size)
  return choose_plan(pieces, sides, degree, capacities, transport, ranks, links)


def _known_mask(
  q_ranges: Any, k_ranges: Any, attn_type_map: Any, q_len: Any, k_len: Any
) -> AttentionMask:
  """The caller's mask, given as ranges or as an `AttentionMask`, with slices in numpy."""
  lengths = {"total_seqlen": q_len, "total_seqlen_k": k_len}
  if isinstance(q_ranges, AttentionMask):
    if k_ranges is not None or attn_type_map is not None:
      raise ValueError("k_ranges and attn_type_map cannot be combined with a mask")
    mask = q_ranges
    q_len, k_len = mask.q_len, mask.k_len
    for (name, length), have in zip(lengths.items(), (q_len, k_len), strict=True):
      if length is not None and length != have:
        raise ValueError(f"{name} is {length}, but the mask has {have}")
  else:
    if k_ranges is None:
      raise ValueError("k_ranges must be given with q_ranges")
    for name, length in lengths.items():
      if length is not None:
        check_length(name, length)
    k_len = q_len if k_len is None else k_len
    mask = AttentionMask.from_ranges(q_ranges, k_ranges, attn_type_map, q_len=q_len, k_len=k_len)
    is_given = any(length is not None for length in lengths.values())
    longest = max(mask.q_len, mask.k_len)  # Of both: they are the same tokens.
    q_len, k_len = (mask.q_len, mask.k_len) if is_given else (longest, longest)
  slices = known_value(mask.slices)
  if slices is None:
    raise ValueError(
      "a key is planned on the host, from a mask that is known; got a traced one: make the key "
      "outside of jit and pass it in"
    )
  if slices.ndim != 2:
    raise ValueError(f"the mask must have slices [num_slices, 6], got {list(slices.shape)}")
  # Checked again, because JAX can make masks of any leaves: see `AttentionMask.tree_unflatten`.
  return AttentionMask(slices, q_len, k_len)


def _check_total(name: str, length: Any, cu_name: str, cu_seqlens: Any) -> None:
  """Checks that a given length is at least that of all documents."""
  if length is None:
    return
  cu = as_int32(cu_name, cu_seqlens, ("num_documents + 1",))
  if check_length(name, length) < (int(cu[-1]) if cu.size and isinstance(cu, np.ndarray) else 0):
    raise ValueError(f"{name} must be at least the {cu[-1]} tokens of {cu_name}, got {length}")
