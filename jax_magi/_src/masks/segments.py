"""Packed documents, given by the number of each token's document (segment ids of data pipelines).

Numbers may be any non-negative integers in any order. A document is a run of tokens with one
number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi._src.arguments import as_integers
from jax_magi._src.masks.slices import UNBOUNDED
from jax_magi._src.masks.windows import Edge, band_around

_INT32 = np.iinfo(np.int32)


class Segments(NamedTuple):
  """The documents of a row in their order, `[max_segments]` each. Absent documents are empty.

  Attributes:
    begin: int32, the first token of each document.
    end: int32, one past the last token of each document.
    ids: int32, the number of each document.
    is_broken: whether numbers are negative, a document is not contiguous, or there are more than
      `max_segments` documents. Always False for known numbers, for which these are errors.
  """

  begin: Any
  end: Any
  ids: Any
  is_broken: Any


def as_ids(name: str, x: Any, shape: tuple[int | str, ...]) -> np.ndarray | jax.Array:
  """Document numbers as int32. Traced numbers that do not fit in int32 become negative."""
  x = as_integers(name, x, shape)
  limits = jnp.iinfo(x.dtype)
  if isinstance(x, np.ndarray):
    if x.size and (x.max() > _INT32.max or x.min() < _INT32.min):
      raise ValueError(f"{name} must fit in 32 bits, got {x.min()} .. {x.max()}")
  elif limits.max > _INT32.max:
    is_held = x <= jnp.asarray(_INT32.max, x.dtype)
    if limits.min < _INT32.min:
      is_held &= x >= jnp.asarray(_INT32.min, x.dtype)
    x = jnp.where(is_held, x.astype(np.int32), _INT32.min)
  ids: np.ndarray | jax.Array = x.astype(np.int32)
  return ids


def check_padding_id(padding_id: Any) -> int | None:
  """Checks a static int32 number, or None."""
  is_integer = isinstance(padding_id, (int, np.integer)) and not isinstance(padding_id, bool)
  if padding_id is not None and not (is_integer and _INT32.min <= padding_id <= _INT32.max):
    raise ValueError(f"padding_id must be a static integer or None, got {padding_id!r}")
  return None if padding_id is None else int(padding_id)


def segment_slices(
  ids: Any,
  key_ids: Any,
  max_segments: int,
  *,
  padding_id: int | None,
  band: tuple[Edge, Edge],
  is_top_left: bool,
  names: tuple[str, str],
) -> tuple[np.ndarray | jax.Array, Any]:
  """One slice for each document, and whether the numbers are invalid.

  Args:
    ids: int32 `[q_len]`, the document numbers of queries.
    key_ids: int32 `[k_len]`, the document numbers of keys; the same object if keys and queries are
      the same tokens.
    max_segments: the number of slices.
    padding_id: the number of padding, which is no document. None means no padding.
    band: offsets from a query's own key.
    is_top_left: True if the first query of a document has the first key as its own key. False if
      the last query has the last key.
    names: the names of both ids, for errors.
  """
  queries = _segments(names[0], ids, max_segments, padding_id)
  if key_ids is ids:
    keys, is_broken = queries, queries.is_broken
  else:
    keys = _segments(names[1], key_ids, max_segments, padding_id)
    is_broken = queries.is_broken | keys.is_broken
    keys = _of_same_ids(queries, keys)
  xp = _library(queries.begin, keys.begin)
  diagonal = keys.begin - queries.begin if is_top_left else keys.end - queries.end
  columns = [queries.begin, queries.end, keys.begin, keys.end, *band_around(diagonal, band)]
  # A document without queries or without keys becomes padding.
  is_absent = (queries.begin >= queries.end) | (keys.begin >= keys.end)
  slices = xp.where(is_absent[:, None], 0, xp.stack(columns, axis=1)).astype(np.int32)
  return slices, is_broken


def everything_if(is_broken: Any, slices: Any, q_len: int, k_len: int) -> Any:
  """Slices `[..., max_segments, 6]`, the first of which makes all pairs visible if ids are invalid.

  NaN that is put into the row then reaches every token.
  """
  everything = np.zeros((*(1,) * (slices.ndim - 2), *slices.shape[-2:]), np.int32)
  everything[..., :1, :] = [0, q_len, 0, k_len, -UNBOUNDED, UNBOUNDED]
  is_broken = is_broken[..., None, None].astype(np.int32)
  return slices * (1 - is_broken) + everything * is_broken


def _segments(name: str, ids: Any, max_segments: int, padding_id: int | None) -> Segments:
  xp = _library(ids)
  is_token = xp.ones(ids.shape, bool) if padding_id is None else ids != np.int32(padding_id)
  is_other = xp.concatenate([xp.ones(min(len(ids), 1), bool), ids[1:] != ids[:-1]])
  is_first = is_token & is_other
  is_negative = (is_token & (ids < 0)).any()
  if isinstance(ids, np.ndarray):
    return _known_segments(name, ids, is_token, is_first, max_segments, padding_id)
  count = is_first.sum(dtype=np.int32)
  numbers = jnp.where(is_token, jnp.cumsum(is_first, dtype=np.int32), 0)
  positions = np.arange(len(ids), dtype=np.int32)
  # Numbers above max_segments are dropped by the segment operations.
  begin = jax.ops.segment_min(positions, numbers, max_segments + 1)[1:]
  end = jax.ops.segment_max(positions, numbers, max_segments + 1)[1:] + 1
  is_there = np.arange(max_segments, dtype=np.int32) < count
  begin, end = (jnp.where(is_there, x, 0) for x in (begin, end))
  found = ids[begin] if len(ids) else jnp.zeros(max_segments, np.int32)
  # Absent segments get distinct negative numbers.
  found = jnp.where(is_there, found, -1 - np.arange(max_segments, dtype=np.int32))
  ordered = jnp.sort(found)
  is_split = (ordered[1:] == ordered[:-1]).any()
  return Segments(begin, end, found, is_negative | is_split | (count > max_segments))


def _known_segments(
  name: str,
  ids: np.ndarray,
  is_token: np.ndarray,
  is_first: np.ndarray,
  max_segments: int,
  padding_id: int | None,
) -> Segments:
  """The documents of known numbers. Checks the numbers."""
  if (ids[is_token] < 0).any():
    raise ValueError(
      f"{name} must not be negative, except for padding_id={padding_id}, got {ids[is_token].min()}"
    )
  begin: Any = np.flatnonzero(is_first)
  found, counts = np.unique(ids[begin], return_counts=True)
  if (counts > 1).any():
    raise ValueError(
      f"{name} must keep each segment contiguous; {found[np.argmax(counts > 1)]} is not"
    )
  if len(begin) > max_segments:
    raise ValueError(f"{name} must have at most max_segments = {max_segments}, got {len(begin)}")
  numbers = np.where(is_token, np.cumsum(is_first), 0)
  lengths = np.bincount(numbers, minlength=len(begin) + 1)[1:]
  missing = (0, max_segments - len(begin))
  begin, end = (np.pad(x, missing).astype(np.int32) for x in (begin, begin + lengths))
  known: Any = -1 - np.arange(max_segments, dtype=np.int32)
  known[: len(lengths)] = ids[begin[: len(lengths)]]
  return Segments(begin, end, known, np.False_)


def _of_same_ids(queries: Segments, keys: Segments) -> Segments:
  """For each document of queries, the document of keys with the same number, or an empty one."""
  xp = _library(*queries, *keys)
  is_same = (queries.ids[:, None] == keys.ids[None]) & (keys.begin < keys.end)[None]
  if not is_same.size:
    return queries
  index = xp.argmax(is_same, axis=1)
  begin, end = (xp.where(is_same.any(1), xp.asarray(x)[index], 0) for x in (keys.begin, keys.end))
  return Segments(begin, end, queries.ids, keys.is_broken)


def _library(*arrays: Any) -> Any:
  """numpy if all arrays are numpy arrays, or else jax.numpy."""
  return np if all(isinstance(x, (np.ndarray, np.generic)) for x in arrays) else jnp
