"""Keys from masks, on the host."""

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
  """The mask that the caller gives in either way, with slices in numpy."""
  lengths = {"total_seqlen": q_len, "total_seqlen_k": k_len}
  if isinstance(q_ranges, AttentionMask):
    if k_ranges is not None or attn_type_map is not None:
      raise ValueError("k_ranges and attn_type_map go with q_ranges, but a mask was given instead")
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
  # Checked again, as JAX makes masks of anything: see `AttentionMask.tree_unflatten`.
  return AttentionMask(slices, q_len, k_len)


def _check_total(name: str, length: Any, cu_name: str, cu_seqlens: Any) -> None:
  """A length that is given, and is not less than that of all documents."""
  if length is None:
    return
  cu = as_int32(cu_name, cu_seqlens, ("num_documents + 1",))
  if check_length(name, length) < (int(cu[-1]) if cu.size and isinstance(cu, np.ndarray) else 0):
    raise ValueError(f"{name} must be at least the {cu[-1]} tokens of {cu_name}, got {length}")
