"""Maxima of attention logits: reductions, and reports of invalid values."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_MAX_NAMED = 8  # The maximum number of heads in one message.
_logger = logging.getLogger("jax_magi")


def reduce_max_logits(
  max_logits: Any,
  axis: int | Sequence[int] | None = None,
  *,
  axis_name: str | Sequence[str] | None = None,
) -> Any:
  """The maximum over microbatches, batch and devices, as `qk_clip` expects it.

  NaN becomes +inf, which `qk_clip` reports as well. XLA would drop a NaN from a maximum over
  devices, even in a `jnp.max` that it splits over devices.

  Args:
    max_logits: an array or a tree of arrays, for example `[microbatches, layers, batch, heads]`.
    axis: the axes to reduce over: batch and microbatches, but never layers.
    axis_name: the mesh axes to reduce over, inside `jax.shard_map`: data and context parallel axes.
      A tree takes one collective, so call this once at the end of a step, with all layers.

  Returns:
    The same tree without `axis`. It has no gradient.
  """

  def reduce(x: Any) -> jax.Array:
    found: jax.Array = lax.stop_gradient(jnp.asarray(x))
    found = jnp.where(jnp.isnan(found), jnp.inf, found)
    if axis is None:
      return found
    axes = tuple(axis) if isinstance(axis, Sequence) else axis
    return found.max(axis=axes, initial=-jnp.inf)

  leaves, treedef = jax.tree.flatten(jax.tree.map(reduce, max_logits))
  if axis_name is not None and leaves:
    # One collective for all layers, in a dtype that can represent all of theirs.
    wide = functools.reduce(np.promote_types, [x.dtype for x in leaves])
    flat = lax.pmax(jnp.concatenate([jnp.ravel(x).astype(wide) for x in leaves]), axis_name)
    parts = jnp.split(flat, np.cumsum([x.size for x in leaves])[:-1].tolist())
    leaves = [p.reshape(x.shape).astype(x.dtype) for p, x in zip(parts, leaves, strict=True)]
  return jax.tree.unflatten(treedef, leaves)


def is_broken(max_logits: Any) -> Any:
  """Where the maximum is NaN or +inf. -inf is valid: the head has no visible pairs."""
  return ~(max_logits < np.inf)


def report_broken(statistics: Mapping[str | None, jax.Array], report: bool | None) -> None:
  """Raises for maxima that are NaN or +inf, by group of layers. If they are traced, logs them.

  `report` is the argument of `apply_qk_clip` and `qk_clip`.
  """
  if report is False:
    return
  broken = {name: is_broken(x) for name, x in statistics.items()}
  if not any(isinstance(x, jax.core.Tracer) for x in broken.values()):
    raise_if_any(broken)
    return
  if report is None and _are_programs_kept():
    return

  def tell(broken: dict[str | None, jax.Array]) -> None:
    jax.debug.callback(functools.partial(_log_any, list(broken)), list(broken.values()))

  # In a branch, so that the host is called only if there is something to report.
  is_any = functools.reduce(jnp.logical_or, [x.any() for x in broken.values()])
  lax.cond(is_any, lambda: tell(broken), lambda: None)


def _are_programs_kept() -> bool:
  """Whether JAX's persistent compilation cache is on. It refuses programs that call the host."""
  config: Any = jax.config  # Its type lacks the options.
  return bool(config.jax_enable_compilation_cache and config.jax_compilation_cache_dir)


def raise_if_any(broken: Mapping[str | None, Any]) -> None:
  """Raises a `FloatingPointError` that names the marked heads, if there are any."""
  text = _describe(broken)
  if text:
    raise FloatingPointError(text)


def _log_any(names: Sequence[str | None], broken: Sequence[Any]) -> None:
  # Under vmap, both branches run, so there may be nothing to report.
  text = _describe(dict(zip(names, broken, strict=True)))
  if text:
    _logger.error("%s; QK-Clip leaves their weights as they are", text)


def _describe(broken: Mapping[str | None, Any]) -> str:
  """Names the marked heads of `[heads]` or `[layers, heads]` arrays; empty if there are none."""
  heads = [
    ("" if name is None else f"{name} ") + _position(index)
    for name, where in broken.items()
    for index in np.argwhere(np.asarray(where))
  ]
  more = f", and {len(heads) - _MAX_NAMED} more" if len(heads) > _MAX_NAMED else ""
  return f"max_logits are NaN or +inf at {', '.join(heads[:_MAX_NAMED])}{more}" if heads else ""


def _position(index: Any) -> str:
  words = {1: "head {}", 2: "layer {} head {}"}
  return words[len(index)].format(*index) if len(index) in words else str(index.tolist())
