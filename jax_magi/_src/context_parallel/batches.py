"""Plans keys for a batch of packed documents, in a data loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_magi._src.context_parallel.api import stack_keys
from jax_magi._src.context_parallel.capacities import Capacities
from jax_magi._src.context_parallel.key import DistAttnKey
from jax_magi._src.context_parallel.make_keys import key_for_new_mask, magi_attn_flex_key
from jax_magi._src.masks.mask import AttentionMask
from jax_magi._src.masks.segments import as_ids

# A window (left, right), or None for no window.
Window = tuple[int | None, int | None] | None
# The options of a key that also apply to another mask on the same dispatch.
_OF_NEW_MASKS = ("overlap_degree", "transport", "links")


def plan_batch(
  segment_ids: Any,
  *,
  cp_size: int,
  max_segments: int,
  padding_id: int | None = 0,
  causal: bool = True,
  window: Window | Mapping[str, Window] = None,
  dispatch: Any = "zigzag",
  capacities: Any = None,
  **options: Any,
) -> Any:
  """Plans one key for each row of a batch, as one stack with leaves `[batch, cp_size, ...]`.

  Call it in a data loader: it uses NumPy on the host, gives the same result in every process, and
  keys can be sent between processes. The batch axis comes first, so that the sharding of the batch
  and `jax.tree.map(lambda x: x[:microbatch], key)` work on every leaf. `dispatch` takes a single
  key. With "zigzag", use `x[:, zigzag_positions(length, cp_size)]` for a batch of full length.

  Args:
    segment_ids: int `[batch, length]`, in the order of the sequence, as in
      `AttentionMask.from_segment_ids`.
    cp_size: the number of ranks, which is the size of the mesh axis.
    max_segments: the largest number of documents in a row.
    padding_id: the number of padding, or None, as in `AttentionMask.from_segment_ids`.
    causal: whether tokens see only themselves and earlier tokens.
    window: (left, right) inside each document, or None. A dictionary of windows, for models whose
      layers differ, returns a dictionary of keys with the same order of tokens.
    dispatch: as in `magi_attn_flex_key`. With "area", each row of the batch has its own order, and
      capacities differ from batch to batch unless you pass them.
    capacities: the room for all batches; a dictionary if windows are one. None means
      `Capacities.bound`, with which all batches of this shape share one compiled step. With "area",
      None means the needs of this batch.
    **options: further arguments of `magi_attn_flex_key`, such as `transport` and `ranks_per_node`.

  Returns:
    A `DistAttnKey`, or a dictionary of them.
  """
  ids = as_ids("segment_ids", segment_ids, ("batch", "length"))
  if not isinstance(ids, np.ndarray):
    raise ValueError("segment_ids must not be traced: keys are planned on the host")
  if not len(ids):
    raise ValueError("segment_ids must have at least one row")
  has_many = isinstance(window, Mapping)
  windows: Mapping[Any, Window] = window if isinstance(window, Mapping) else {None: window}
  rooms: Any = capacities if has_many or capacities is None else {None: capacities}
  if rooms is not None and (not isinstance(rooms, Mapping) or set(rooms) != set(windows)):
    raise ValueError("capacities must be a dictionary with the same keys as window")
  if rooms is None and not (isinstance(dispatch, str) and dispatch == "area"):
    sizes = ids.shape[1], cp_size, max_segments
    rooms = {
      name: Capacities.bound(*sizes, one, dispatch, causal=causal, **options)
      for name, one in windows.items()
    }

  def keys_of(row: np.ndarray) -> dict[Any, DistAttnKey]:
    keys: dict[Any, DistAttnKey] = {}
    for name, one in windows.items():
      mask = AttentionMask.from_segment_ids(
        row, max_segments, padding_id=padding_id, causal=causal, window=one
      )
      room = None if rooms is None else rooms[name]
      if keys:  # Later keys use the token order of the first.
        first = next(iter(keys.values()))
        kept = {x: options[x] for x in _OF_NEW_MASKS if x in options}
        keys[name] = key_for_new_mask(first, mask, capacities=room, **kept)
      else:
        keys[name] = magi_attn_flex_key(
          mask, cp_size=cp_size, dispatch=dispatch, capacities=room, **options
        )
    return keys

  rows = [keys_of(row) for row in ids]
  stacks = {
    name: stack_keys([row[name] for row in rows], None if rooms is None else rooms[name], axis=0)
    for name in windows
  }
  return stacks if has_many else stacks[None]
