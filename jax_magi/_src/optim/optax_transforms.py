"""QK-Clip and Muon as Optax transforms."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi._src.optim import clip
from jax_magi._src.optim.layout import Layout, parse_layout
from jax_magi._src.optim.projections import (
  Projections,
  find_attention,
  find_paths,
  groups_of,
  is_named_by,
  path_of,
  shapes_of,
)
from jax_magi._src.optim.statistics import is_broken, raise_if_any, report_broken
from jax_magi._src.transforms.explicit import spec_of, with_auto_axes


class QkClipState(NamedTuple):
  """The state of `qk_clip`.

  Attributes:
    max_logits: the maximum since the last clip, in the shape of the argument. -inf after a clip.
    num_broken: int32 in the same shape: how often a maximum was NaN or +inf.
  """

  max_logits: Any
  num_broken: Any


def qk_clip(
  projections: Projections,
  threshold: Any = 100.0,
  *,
  alpha: float = 0.5,
  accumulate: bool = False,
  report: bool | None = None,
) -> Any:
  """QK-Clip as the last transform of an Optax chain.

      optimizer = optax.chain(optax.contrib.muon(learning_rate), qk_clip(projections))
      updates, state = optimizer.update(grads, state, params, max_logits=max_logits)
      params = optax.apply_updates(params, updates)

  It changes the update so that the updated parameters are those of `apply_qk_clip`, up to a
  rounding of the update. Updates of the projections have the wider of the dtypes of update and
  parameter, because bfloat16 updates would round clipped float32 weights. Updates of heads that are
  not clipped stay bitwise unchanged. The learning rate must be applied before `qk_clip`.

  For gradient accumulation, put `optax.MultiSteps` before `qk_clip`, which then keeps the maximum:

      optax.chain(
        optax.MultiSteps(optimizer, every_k_schedule=4).gradient_transformation(),
        qk_clip(projections, accumulate=True),
      )

  Do not put `MultiSteps` around `qk_clip`: it discards what happens before its last call, including
  all maxima but the last.

  Args:
    projections: the query and key projections in the parameters.
    threshold: a positive number. inf never clips.
    alpha: as in `apply_qk_clip`.
    accumulate: whether to clip only if the update is not all zeros, by the maximum over all steps
      since the last such update. Steps with updates of zeros only add their maximum.
    report: whether to log heads whose maximum is NaN or +inf. JAX neither exports programs that
      call the host nor keeps them in its persistent compilation cache. So None, the default, logs
      only if this cache is off. Without the log, use `raise_if_broken(state)`.

  Returns:
    `optax.GradientTransformationExtraArgs`; `update` needs `params` and `max_logits`.
  """
  optax = _import_optax("qk_clip")
  clip.check_threshold(threshold)
  alpha = clip.check_alpha(alpha)

  def init(params: Any) -> Any:
    attention = find_attention(params, projections)
    low = {name: jnp.full(a.shape, -jnp.inf, np.float32) for name, a in attention.items()}
    none = {name: jnp.zeros(a.shape, np.int32) for name, a in attention.items()}
    return QkClipState(_ungroup(low), _ungroup(none))

  def update(
    updates: Any, state: Any, params: Any = None, *, max_logits: Any = None, **_: Any
  ) -> tuple[Any, Any]:
    if params is None:
      raise ValueError("qk_clip needs params: optimizer.update(grads, state, params, ...)")
    if max_logits is None:
      raise ValueError("qk_clip needs max_logits: optimizer.update(..., max_logits=max_logits)")
    attention = find_attention(params, projections, alpha)
    given = clip.match_statistics(attention, max_logits)
    so_far = clip.match_statistics(attention, state.max_logits)
    report_broken(given, report)
    num_broken = jax.tree.map(_count_broken, state.num_broken, _ungroup(given))
    highest = {name: jnp.maximum(so_far[name], x.astype(np.float32)) for name, x in given.items()}
    factors = clip.make_factors(params, attention, highest, threshold)
    if not accumulate:
      low = {name: jnp.full_like(x, -jnp.inf) for name, x in highest.items()}
    else:
      moves = _any_nonzero(updates)
      factors = {path: jnp.where(moves, f, 1.0) for path, f in factors.items()}
      low = {name: jnp.where(moves, -jnp.inf, x) for name, x in highest.items()}
    updates = clip.map_at(_clip_update, factors, updates, params)
    return updates, QkClipState(_ungroup(low), num_broken)

  return optax.GradientTransformationExtraArgs(init, update)


def muon_clip(
  learning_rate: Any,
  projections: Projections,
  matrices: Mapping[str, str],
  threshold: Any = 100.0,
  *,
  alpha: float = 0.5,
  weight_decay: Any = 0.1,
  consistent_rms: Any = 0.2,
  every_k_schedule: int | Callable[[Any], Any] = 1,
  report: bool | None = None,
  **muon_options: Any,
) -> Any:
  """Muon with QK-Clip: `optax.contrib.muon`, followed by `qk_clip`.

  Muon updates the kernels that `projections` and `matrices` name. AdamW updates everything else at
  the same learning rate: embeddings, the output head, norms, biases.

      optimizer = muon_clip(
        0.02,
        projections,
        {
          "blocks/attention/value/kernel": "layers embed -> heads dim",
          "blocks/attention/out/kernel": "layers heads dim -> embed",
          "blocks/mlp/up/kernel": "layers embed -> hidden",
          "blocks/mlp/down/kernel": "layers hidden -> embed",
        },
      )

  Args:
    learning_rate: a number or a schedule.
    projections: the query and key projections in the parameters.
    matrices: the layouts of all other kernels for Muon, by path, written as in `Projection`. Axes
      named `layers` or `experts` are stacks of matrices. The other axes before the arrow are the
      rows of a matrix, and those after it the columns.
    threshold: the threshold of QK-Clip.
    alpha: as in `qk_clip`.
    weight_decay: the weight decay of Muon's kernels, which is multiplied by the learning rate. For
      AdamW, pass `adam_weight_decay`.
    consistent_rms: the root mean square of Muon's updates, divided by the learning rate, for
      kernels of any shape. 0.2 is about that of AdamW.
    every_k_schedule: the number of calls over which gradients are averaged and max_logits are
      joined before the parameters change, as in `optax.MultiSteps`.
    report: as in `qk_clip`.
    **muon_options: further arguments of `optax.contrib.muon`.

  Returns:
    `optax.GradientTransformationExtraArgs`; `update` needs `params` and `max_logits`.
  """
  optax = _import_optax("muon_clip")
  layouts = _muon_layouts(projections, matrices)

  def dimension_numbers(params: Any) -> Any:
    def numbers(keys: Any, _: Any) -> Any:
      named = [x for path, x in layouts.items() if is_named_by(path, path_of(keys))]
      axes = named[0].muon_axes() if named else None
      return None if axes is None else optax.contrib.MuonDimensionNumbers(*axes)

    return jax.tree_util.tree_map_with_path(numbers, params)

  muon = optax.contrib.muon(
    learning_rate,
    weight_decay=weight_decay,
    consistent_rms=consistent_rms,
    muon_weight_dimension_numbers=dimension_numbers,
    **muon_options,
  )
  every_k_schedule = _check_schedule(every_k_schedule)
  accumulate = every_k_schedule != 1
  if accumulate:
    muon = optax.MultiSteps(muon, every_k_schedule).gradient_transformation()
  clipping = qk_clip(projections, threshold, alpha=alpha, accumulate=accumulate, report=report)
  both = optax.chain(muon, clipping)

  def init(params: Any) -> Any:
    # Checked here, because Optax calls dimension_numbers also with parts of the parameters.
    shapes = shapes_of(params)
    for path, layout in layouts.items():
      for found in find_paths(path, shapes):
        layout.check_rank(found, shapes[found])
    return both.init(params)

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    def out_specs() -> Any:
      return jax.tree.map(spec_of, (updates, state))

    # Optax's Muon reshapes matrices, which is an error in JAX if Explicit axes split them.
    operands = (updates, state, params, extra)
    fun = with_auto_axes(lambda u, s, p, e: both.update(u, s, p, **e), operands, out_specs)
    new_updates, new_state = fun(*operands)
    return new_updates, new_state

  return optax.GradientTransformationExtraArgs(init, update)


def raise_if_broken(state: Any) -> None:
  """Raises `FloatingPointError` if a maximum that `qk_clip` received was ever NaN or +inf.

  Args:
    state: any tree that holds `QkClipState`: the state of a whole optimizer. Or, for
      `apply_qk_clip`, max_logits as it takes them. Not traced.
  """
  if _is_statistics(state):
    given = state if isinstance(state, Mapping) else {None: state}
    raise_if_any({name: is_broken(np.asarray(x)) for name, x in given.items()})
    return
  leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, QkClipState))
  states = [x for x in leaves if isinstance(x, QkClipState)]
  if not states:
    raise ValueError("state holds no QkClipState")
  for x in states:
    counts = x.num_broken if isinstance(x.num_broken, Mapping) else {None: x.num_broken}
    raise_if_any({name: np.asarray(count) > 0 for name, count in counts.items()})


def _is_statistics(x: Any) -> bool:
  """Whether an object is max_logits: an array, or a dictionary of arrays."""
  arrays = list(x.values()) if isinstance(x, Mapping) else [x]
  return bool(arrays) and all(isinstance(one, (jax.Array, np.ndarray)) for one in arrays)


def _check_schedule(schedule: Any) -> Any:
  if callable(schedule):
    return schedule
  is_integer = isinstance(schedule, (int, np.integer)) and not isinstance(schedule, bool)
  if not is_integer or schedule < 1:
    raise ValueError(f"every_k_schedule must be a positive integer or a schedule, got {schedule!r}")
  return int(schedule)


def _import_optax(name: str) -> Any:
  try:
    importlib.import_module("optax.contrib")
    return importlib.import_module("optax")
  except ImportError as error:
    raise ImportError(f"{name} needs Optax: pip install 'jax-magi[optim]'") from error


def _ungroup(by_group: dict[str | None, Any]) -> Any:
  """Converts a dictionary by group back to the caller's form: an array, or a dictionary."""
  return by_group.get(None, by_group)


def _any_nonzero(updates: Any) -> jax.Array:
  return functools.reduce(jnp.logical_or, [jnp.any(u != 0) for u in jax.tree.leaves(updates)])


def _count_broken(count: jax.Array, max_logits: jax.Array) -> jax.Array:
  return jnp.add(count, is_broken(max_logits).astype(count.dtype))


def _clip_update(update: jax.Array, param: jax.Array, factor: jax.Array) -> jax.Array:
  wide = np.promote_types(np.promote_types(param.dtype, factor.dtype), update.dtype)
  dtype = param.dtype if param.dtype == update.dtype else wide
  # Round as `optax.apply_updates` does, and then as `apply_qk_clip` does.
  updated = (param.astype(wide) + update.astype(wide)).astype(param.dtype)
  clipped = clip.scale(updated, factor).astype(wide) - param.astype(wide)
  return jnp.where(factor == 1.0, update.astype(dtype), clipped.astype(dtype))


def _muon_layouts(projections: Projections, matrices: Mapping[str, str]) -> dict[str, Layout]:
  """The layouts of all matrices for Muon, by path. Biases of projections are excluded."""
  if not isinstance(matrices, Mapping):
    raise ValueError(
      f"matrices must be a dictionary of layouts by path, got {type(matrices).__name__}"
    )
  for path in matrices:
    if not isinstance(path, str) or not path:
      raise ValueError(f"paths of matrices must be strings, keys joined by '/', got {path!r}")
  layouts = {path: parse_layout(text) for path, text in matrices.items()}
  for path, layout in layouts.items():
    if layout.muon_axes() is None:
      raise ValueError(f"matrices[{path!r}] must have inputs and outputs, got {layout.text!r}")
  for group in groups_of(projections).values():
    for _, _, parameters in group.roles(0.5):
      for projection in parameters:
        layout = projection.parsed
        if layouts.get(projection.path, layout) != layout:
          raise ValueError(
            f"{projection.path} has two layouts, {layout.text!r} and "
            f"{layouts[projection.path].text!r}"
          )
        if layout.muon_axes() is not None:
          layouts[projection.path] = layout
  return layouts
