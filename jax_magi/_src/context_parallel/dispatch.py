"""Sorts tokens into the order of ranks and back, with positions and labels in that order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_magi._src.arguments import check_choice, check_position
from jax_magi._src.context_parallel.key import DistAttnKey, check_key, check_one_key
from jax_magi._src.masks.segments import as_ids
from jax_magi._src.transforms.explicit import resized_spec, with_auto_axes


def dispatch(x: Any, key: DistAttnKey, *, role: str = "q", pad_value: Any = 0) -> Any:
  """Sorts tokens into the order of ranks, with padding.

  If x and the key are NumPy arrays, as in a data loader, so is the result. A JAX array may be
  traced, and is differentiable.

  Args:
    x: `[length, ...]`, in the order of the sequence.
    key: the plan, for all ranks.
    role: "q", or "k" for keys and values of cross-attention, which have an order of their own.
    pad_value: the value of rows after the last token.

  Returns:
    `[cp_size * local, ...]`, in the order of ranks.
  """
  chunks, length, chunk_size = _side(key, role)
  chunks = _all_ranks(chunks, key, "dispatch")
  x = x if hasattr(x, "ndim") else np.asarray(x)
  if x.ndim == 0 or x.shape[0] != length:
    raise ValueError(f"x must have the {length} tokens of the key's mask, got {list(x.shape)}")
  if _is_prng_key(x):
    return _of_key_data(dispatch, x, key, role)
  xp = _library(x, chunks)
  padding = chunks.size * chunk_size - length
  if padding:
    pad_value = _check_pad_value(pad_value, x.dtype)
  widths = [(0, padding)] + [(0, 0)] * (x.ndim - 1)

  def fun(x: Any, chunks: Any) -> Any:
    padded = xp.pad(x, widths, constant_values=pad_value) if padding else x
    blocks = padded.reshape(chunks.size, chunk_size, *x.shape[1:])
    return xp.take(blocks, chunks.reshape(-1), axis=0).reshape(padded.shape)

  return _on_mesh(fun, x, chunks, chunks.size * chunk_size)


def undispatch(x: Any, key: DistAttnKey, *, role: str = "q") -> Any:
  """The inverse of `dispatch`.

  Args:
    x: `[cp_size * local, ...]`, in the order of ranks.
    key: the plan, for all ranks.
    role: as in `dispatch`.

  Returns:
    `[length, ...]`, in the order of the sequence, without padding.
  """
  chunks, length, chunk_size = _side(key, role)
  chunks = _all_ranks(chunks, key, "undispatch")
  x = x if hasattr(x, "ndim") else np.asarray(x)
  if x.ndim == 0 or x.shape[0] != chunks.size * chunk_size:
    raise ValueError(
      f"x must have the {chunks.size * chunk_size} rows of all ranks, got {list(x.shape)}"
    )
  if _is_prng_key(x):
    return _of_key_data(undispatch, x, key, role)
  xp = _library(x, chunks)

  def fun(x: Any, chunks: Any) -> Any:
    blocks = x.reshape(chunks.size, chunk_size, *x.shape[1:])
    return xp.take(blocks, xp.argsort(chunks.reshape(-1)), axis=0).reshape(x.shape)[:length]

  return _on_mesh(fun, x, chunks, length)


def get_position_ids(key: DistAttnKey, *, role: str = "q") -> Any:
  """The position of each row in the sequence, for rotary embeddings. Padding comes after the end.

  Args:
    key: the plan, for all ranks; or the rank's part of it, inside `shard_map`.
    role: as in `dispatch`.

  Returns:
    int32 `[cp_size * local]`, or `[local]` inside `shard_map`.
  """
  chunks, _, chunk_size = _side(check_one_key(key), role)
  places = np.arange(chunk_size, dtype=np.int32)[None, None]
  return (chunks[..., None] * chunk_size + places).reshape(-1)


def roll(
  x: Any,
  key: DistAttnKey,
  shift: int = -1,
  *,
  segment_ids: Any = None,
  axis_name: str = "cp",
  role: str = "q",
) -> Any:
  """`jnp.roll` along the sequence, for tokens in the order of ranks. -1 gives next-token labels.

  Args:
    x: `[cp_size * local, ...]`, or `[local, ...]` inside `shard_map`. There, rows at the edges of
      chunks come from other ranks, and all rows do if the shift is more than a chunk.
    key: the plan, for all ranks; or the rank's part of it, inside `shard_map`.
    shift: as in `jnp.roll`.
    segment_ids: int, one for each row of x. Rows that would come from another document, or from the
      other end of the sequence, are zero. None means a single document that wraps around.
    axis_name: the mesh axis, inside `shard_map`.
    role: as in `dispatch`.

  Returns:
    The same shape. Rows of padding are zero.
  """
  chunks, length, chunk_size = _side(key, role)
  shift = check_position("shift", shift)
  x = x if hasattr(x, "ndim") else np.asarray(x)
  if segment_ids is not None:
    return _roll_in_segments(x, key, shift, segment_ids, axis_name, role)
  if chunks.shape[0] == key.spec.cp_size and x.shape[0] == chunks.size * chunk_size:
    xp = _library(x, chunks)

    def fun(x: Any, key: DistAttnKey) -> Any:
      return dispatch(xp.roll(undispatch(x, key, role=role), shift, axis=0), key, role=role)

    return _on_mesh(fun, x, key, x.shape[0])
  if chunks.shape[0] != 1:
    raise ValueError(
      f"key has {chunks.shape[0]} ranks, but x is {list(x.shape)}; inside shard_map, pass the "
      "key in, with in_specs=P(axis_name)"
    )
  if x.ndim == 0 or x.shape[0] != chunks.size * chunk_size:
    raise ValueError(
      f"x must have the {chunks.size * chunk_size} rows of one rank, got {list(x.shape)}"
    )
  check_axis("roll", key, axis_name)
  if abs(shift) > min(chunk_size, length):
    rolling = functools.partial(_roll_gathered, shift=shift, axis_name=axis_name, role=role)
  else:
    rolling = functools.partial(_roll_local, shift=shift, axis_name=axis_name, role=role)
  return _on_mesh(rolling, x, key, x.shape[0])


def _roll_in_segments(
  x: Any, key: DistAttnKey, shift: int, segment_ids: Any, axis_name: str, role: str
) -> Any:
  """`roll` with zeros in rows that would come from elsewhere."""
  ids = as_ids("segment_ids", segment_ids, (*x.shape[:1],))
  _, length, _ = _side(key, role)
  rolled, other = (roll(rows, key, shift, axis_name=axis_name, role=role) for rows in (x, ids))
  source = get_position_ids(key, role=role) - np.int32(shift)
  is_kept = (other == ids) & (source >= 0) & (source < length)
  is_kept = is_kept.reshape(-1, *[1] * (x.ndim - 1))
  xp = _library(rolled, is_kept)
  return xp.where(is_kept, rolled, xp.zeros_like(rolled))


def _roll_gathered(x: Any, key: DistAttnKey, *, shift: int, axis_name: str, role: str) -> Any:
  """`roll` of a rank's rows by any shift, from all rows."""
  chunks, length, chunk_size = _side(key, role)
  blocks = x.reshape(chunks.shape[1], chunk_size, *x.shape[1:])
  owners = lax.all_gather(chunks[0], axis_name, tiled=True)
  in_order = lax.all_gather(blocks, axis_name, tiled=True)[jnp.argsort(owners)]
  tokens = in_order.reshape(-1, *x.shape[1:])[:length]
  widths = [(0, owners.size * chunk_size - length)] + [(0, 0)] * (x.ndim - 1)
  rolled = jnp.pad(jnp.roll(tokens, shift, axis=0), widths).reshape(in_order.shape)
  return rolled[chunks[0]].reshape(x.shape)


def _roll_local(x: Any, key: DistAttnKey, *, shift: int, axis_name: str, role: str) -> Any:
  """`roll` of a rank's rows."""
  chunks, length, chunk_size = _side(key, role)
  # The rows that neighbours need: the first or the last tokens of each chunk.
  blocks = x.reshape(chunks.shape[1], chunk_size, *x.shape[1:])
  begins = chunks[0] * chunk_size
  ends = jnp.clip(length - begins, 0, chunk_size)
  offsets = jnp.zeros_like(ends) if shift < 0 else jnp.maximum(ends - shift, 0)
  edge = offsets[:, None] + np.arange(abs(shift), dtype=np.int32)[None]
  edges = jnp.take_along_axis(blocks, edge.reshape(*edge.shape, *[1] * (x.ndim - 1)), axis=1)
  all_edges = lax.all_gather(edges, axis_name, tiled=True)
  owners = lax.all_gather(chunks[0], axis_name, tiled=True)
  slots = jnp.argsort(owners)

  position = get_position_ids(key, role=role)
  source = (position - shift) % length
  chunk = source // chunk_size
  near = jnp.clip(jnp.arange(len(position)) - shift, 0, len(position) - 1)
  is_near = (chunk == position // chunk_size) & (source == position - shift)
  full = jnp.clip(length - chunk * chunk_size, 0, chunk_size)
  offset = source - chunk * chunk_size - (0 if shift < 0 else jnp.maximum(full - shift, 0))
  far = all_edges[slots[chunk], jnp.clip(offset, 0, abs(shift) - 1)] if shift else x
  pick = [-1] + [1] * (x.ndim - 1)
  rolled = jnp.where(is_near.reshape(pick), jnp.take(x, near, axis=0), far)
  return jnp.where((position < length).reshape(pick), rolled, jnp.zeros_like(rolled))


def check_axis(name: str, key: DistAttnKey, axis_name: str) -> int:
  """The size of the mesh axis. Checks that the axis exists and has the size of the key."""
  try:
    size = lax.axis_size(axis_name)
  except NameError:
    raise ValueError(
      f"{name} must be called inside shard_map over a mesh axis {axis_name!r}; pass "
      "axis_name= if your axis has another name"
    ) from None
  if size != key.spec.cp_size:
    raise ValueError(
      f"the key is for cp_size={key.spec.cp_size}, but the mesh axis {axis_name!r} has size {size}"
    )
  return size


def _is_prng_key(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _of_key_data(fun: Callable[..., Any], x: Any, key: DistAttnKey, role: str) -> Any:
  """Reorders PRNG keys. The keys of padding are made of zeros."""
  data = fun(jax.random.key_data(x), key, role=role)
  return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))


def _check_pad_value(value: Any, dtype: Any) -> Any:
  """Checks a scalar that rows of this dtype can hold: `xp.pad` would truncate 0.5 to an integer."""
  if isinstance(value, jax.core.Tracer):
    return value
  found = np.asarray(value)
  is_number = found.dtype == bool or jnp.issubdtype(found.dtype, jnp.number)
  is_exact = not jnp.issubdtype(dtype, jnp.inexact)
  with np.errstate(invalid="ignore"):
    if found.ndim != 0 or not is_number or (is_exact and found.astype(dtype) != found):
      raise ValueError(f"pad_value must be a scalar of x's dtype {dtype}, got {value!r}")
  return value


def _on_mesh(fun: Callable[..., Any], x: Any, key: Any, length: int) -> Any:
  """`fun(x, key)`, whose result has this length, for arrays that may be on Explicit axes."""
  if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((x, key))):
    return fun(x, key)
  return with_auto_axes(fun, (x, key), lambda: resized_spec(x, length))(x, key)


def _library(*arrays: Any) -> Any:
  """numpy if all arrays are numpy arrays, or else jax.numpy."""
  return np if all(isinstance(x, np.ndarray) for x in arrays) else jnp


def _side(key: Any, role: str) -> tuple[Any, int, int]:
  """The chunks, the length and the chunk size of queries or keys."""
  spec = check_key(key).spec
  if check_choice("role", role, ("q", "k")) == "q":
    return key.q_chunks, spec.q_len, spec.q_chunk_size
  return key.k_chunks, spec.k_len, spec.k_chunk_size


def _all_ranks(chunks: Any, key: DistAttnKey, name: str) -> Any:
  if chunks.ndim != 2 or chunks.shape[0] != key.spec.cp_size:
    raise ValueError(
      f"{name} needs a key of all {key.spec.cp_size} ranks, got one with chunks "
      f"{list(chunks.shape)}: call it outside of shard_map, and on one key of a stack"
    )
  return chunks
