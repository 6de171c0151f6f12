"""QK-Clip as functions: gamma from statistics, and clipped parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_magi._src.optim.layout import HEADS
from jax_magi._src.optim.projections import (
  Attention,
  Projections,
  Site,
  find_attention,
  leaves_of,
  path_of,
  shapes_of,
)
from jax_magi._src.optim.statistics import is_broken, raise_if_any, report_broken
from jax_magi._src.transforms.explicit import spec_of, with_auto_axes


def qk_clip_gamma(max_logits: Any, threshold: Any = 100.0) -> jax.Array:
  """The factor that brings each head's largest logit down to the threshold.

  Args:
    max_logits: float, any shape. Each element has its own factor.
    threshold: a positive number. inf never clips.

  Returns:
    `threshold / max_logits` where that is above the threshold, exactly 1 elsewhere, in the shape of
    `max_logits`. A maximum that is NaN or +inf raises `FloatingPointError`; under `jax.jit`, its
    gamma is NaN.
  """
  check_threshold(threshold)
  if max_logits is None or isinstance(max_logits, (str, Mapping)):
    raise ValueError(f"max_logits must be an array, got {type(max_logits).__name__}")
  x = jnp.asarray(max_logits)
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(f"max_logits must hold floating point numbers, got {x.dtype}")
  if not isinstance(x, jax.core.Tracer):
    raise_if_any({None: is_broken(x)})
  return jnp.where(is_broken(x), jnp.nan, _gamma(x, threshold))


def apply_qk_clip(
  params: Any,
  max_logits: Any,
  projections: Projections,
  threshold: Any = 100.0,
  *,
  alpha: float = 0.5,
  report: bool | None = None,
) -> Any:
  """Scales query and key projections so that no head's largest logit is above the threshold.

  Call it after the optimizer's update. Weights of heads at or below the threshold stay bitwise
  unchanged.

  Args:
    params: a tree of parameters. Clipped parameters may have any floating point dtype.
    max_logits: float `[num_q_heads]`, or `[layers, num_q_heads]` if projections are stacked or
      counted by `{layer}`. For a dictionary of projections, a dictionary with the same keys. It is
      the maximum over everything that was computed with these weights: see `reduce_max_logits`.
    projections: the query and key projections in `params`.
    threshold: a positive number. inf never clips.
    alpha: from 0 to 1. Queries are scaled by `gamma ** alpha`, keys by `gamma ** (1 - alpha)`.
      Megatron calls it `qk_clip_alpha`.
    report: whether to report heads whose maximum is NaN or +inf: by a `FloatingPointError`, or
      under `jax.jit` by an error in the log "jax_magi". These heads, and heads that share a key
      with them, keep their weights. The log takes a call of the host, and JAX does not keep
      programs with such calls in its persistent compilation cache: each run compiles the step
      again. So None, the default, writes the log only if this cache is off. Without the log, use
      `raise_if_broken(max_logits)` on the results of the step.

  Returns:
    The parameters, with clipped projections.
  """
  check_threshold(threshold)
  attention = find_attention(params, projections, check_alpha(alpha))
  statistics = match_statistics(attention, max_logits)
  report_broken(statistics, report)
  factors = make_factors(params, attention, statistics, threshold)
  return map_at(scale, factors, params)


def match_statistics(
  attention: Mapping[str | None, Attention], max_logits: Any
) -> dict[str | None, jax.Array]:
  """Checks max_logits; returns them by group, each in the shape of its layers and heads."""
  given = {None: max_logits} if None in attention else max_logits
  if not isinstance(given, Mapping):
    raise ValueError(
      f"max_logits must be a dictionary with the keys {list(attention)}, like projections"
    )
  for name in given:
    if name not in attention:
      raise ValueError(f"max_logits has {name!r}, which projections do not have")
  statistics: dict[str | None, jax.Array] = {}
  for name, found in attention.items():
    if name not in given:
      raise ValueError(f"max_logits has no entry for {name!r}")
    x, where = given[name], "" if name is None else f"[{name!r}]"
    if x is None or isinstance(x, Mapping):
      raise ValueError(f"max_logits{where} must be an array, got {type(x).__name__}")
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(f"max_logits{where} must hold floating point numbers, got {x.dtype}")
    if x.shape != found.shape:
      axes = "[layers, num_q_heads]" if len(found.shape) == 2 else "[num_q_heads]"
      raise ValueError(
        f"max_logits{where} must be {axes} = {list(found.shape)}, as the projections are, "
        f"got {list(x.shape)}; reduce_max_logits reduces over batch and microbatches"
      )
    statistics[name] = lax.stop_gradient(x)
  return statistics


def make_factors(
  params: Any,
  attention: Mapping[str | None, Attention],
  statistics: Mapping[str | None, jax.Array],
  threshold: Any,
) -> dict[str, jax.Array]:
  """The factor of each named parameter, in a shape that broadcasts to the parameter."""
  leaves, shapes = leaves_of(params), shapes_of(params)
  sites = {site.path: site for found in attention.values() for site in found.sites}

  def fun(statistics: Mapping[str | None, jax.Array], threshold: Any) -> dict[str, jax.Array]:
    return _make_factors(shapes, attention, statistics, threshold)

  def spec(site: Site) -> P:  # That of the parameter, along the axes that its factor has.
    axes = zip(spec_of(leaves[site.path]), site.projection.factor_axes, strict=True)
    return P(*(entry if is_own else None for entry, is_own in axes))

  def out_specs() -> dict[str, P]:
    return {path: spec(site) for path, site in sites.items()}

  operands = (statistics, threshold)
  return with_auto_axes(fun, ([leaves[path] for path in sites], operands), out_specs)(*operands)


def _make_factors(
  shapes: Mapping[str, tuple[int, ...]],
  attention: Mapping[str | None, Attention],
  statistics: Mapping[str | None, jax.Array],
  threshold: Any,
) -> dict[str, jax.Array]:
  factors: dict[str, jax.Array] = {}
  for name, found in attention.items():
    x = statistics[name]
    groups = x.reshape(*x.shape[:-1], found.num_groups, -1)
    gamma = _gamma(groups, threshold).min(axis=-1)
    # The factor of a group with broken statistics is unknown. It is not scaled in this step.
    gamma = jnp.where(is_broken(groups).any(axis=-1), 1.0, gamma)
    for site in found.sites:
      own = gamma if site.layer is None else gamma[site.layer]
      shape = shapes[site.path]
      num_heads = site.projection.sizes(site.path, shape)[HEADS]
      own = jnp.repeat(own**site.power, num_heads // found.num_groups, axis=-1)
      factor = site.projection.spread(site.path, shape, own)
      factors[site.path] = factors.get(site.path, 1.0) * factor
  return factors


def map_at(fun: Any, factors: Mapping[str, jax.Array], tree: Any, *rest: Any) -> Any:
  """Applies `fun(leaf, *leaves of rest, factor)` to leaves that have a factor."""

  def visit(keys: Any, leaf: Any, *others: Any) -> Any:
    factor = factors.get(path_of(keys))
    return leaf if factor is None else fun(leaf, *others, factor)

  return jax.tree_util.tree_map_with_path(visit, tree, *rest)


def scale(x: jax.Array, factor: jax.Array) -> jax.Array:
  """x * factor in the dtype of x. Where the factor is 1, x stays bitwise unchanged.

  The product is computed in float32 or wider, so that weights of 8 or 16 bits are rounded once.
  """
  dtype = np.promote_types(x.dtype, factor.dtype)
  product = x.astype(dtype) * factor.astype(dtype)
  return jnp.where(factor == 1.0, x, product.astype(x.dtype))


def _gamma(max_logits: jax.Array, threshold: Any) -> jax.Array:
  """gamma in float32 or wider. In 16 bits, heads would miss the threshold by up to 1%."""
  x = max_logits.astype(np.promote_types(max_logits.dtype, np.float32))
  threshold = jnp.asarray(threshold, x.dtype)
  is_above = x > threshold
  return jnp.where(is_above, threshold / jnp.where(is_above, x, 1.0), 1.0)


def check_threshold(threshold: Any) -> None:
  """Checks that the threshold is positive, unless it is traced."""
  if isinstance(threshold, jax.core.Tracer) and threshold.ndim == 0:
    return
  try:
    is_number = not isinstance(threshold, (bool, np.bool_)) and np.ndim(threshold) == 0
    is_positive = is_number and bool(np.asarray(threshold) > 0)
  except TypeError:  # None, a string, a schedule: nothing that has an order.
    is_positive = False
  if not is_positive:
    raise ValueError(f"threshold must be a positive number (inf never clips), got {threshold!r}")


def check_alpha(alpha: Any) -> Any:
  """Checks that alpha, the share of queries in a correction, is from 0 to 1. Skips arrays."""
  if isinstance(alpha, jax.Array) and alpha.shape == ():  # As optax.inject_hyperparams has it.
    return alpha
  is_number = isinstance(alpha, (int, float, np.integer, np.floating))
  if not is_number or isinstance(alpha, bool) or not 0.0 <= alpha <= 1.0:
    raise ValueError(f"alpha must be a number from 0 to 1, got {alpha!r}")
  return float(alpha)
