"""A call on one rank: checks the arguments, and converts them for `rank_attention`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_magi._src.arguments import check_flag
from jax_magi._src.attention import checks
from jax_magi._src.attention.api import AttnForwardMeta
from jax_magi._src.context_parallel.dispatch import check_axis
from jax_magi._src.context_parallel.key import DistAttnKey, check_key, check_one_key
from jax_magi._src.context_parallel.ops import RankConfig, rank_attention
from jax_magi._src.context_parallel.sm_margins import sm_margins
from jax_magi._src.transforms.closure import OpenFunction
from jax_magi._src.transforms.varying import vary_together


def attend_on_rank(
  q: Any,
  rows: Sequence[Any],
  kv_like: tuple[Any, Any],
  key: DistAttnKey,
  *,
  axis_name: str,
  expand: OpenFunction | None = None,
  constants: Sequence[Any] = (),
  softmax_scale: Any = None,
  softcap: Any = 0.0,
  sink: Any = None,
  return_max_logits: Any = False,
  reduce_max_logits: Any = True,
  keep_remote_kv: Any = False,
  remote_grad_dtype: Any = None,
  deterministic: Any = False,
  sm_margin: Any = None,
  kernel_barrier: Any = False,
  checkpoint_names: Any = None,
  implementation: Any = None,
) -> tuple[Any, AttnForwardMeta]:
  """`calc_attn` for rows in any form. Operands must have been checked; options are checked here.

  Args:
    q: `[q_local, num_q_heads, head_dim]`.
    rows: as in `rank_attention`.
    kv_like: the shapes and dtypes of k and v.
    key: the rank's part of the key.
    axis_name: as in `calc_attn`.
    expand: as in `RankConfig`.
    constants: as in `rank_attention`.
    softmax_scale: as in `calc_attn`.
    softcap: as in `calc_attn`.
    sink: as in `calc_attn`.
    return_max_logits: as in `calc_attn`.
    reduce_max_logits: as in `calc_attn`.
    keep_remote_kv: as in `calc_attn`.
    remote_grad_dtype: as in `calc_attn`.
    deterministic: as in `calc_attn`.
    sm_margin: as in `calc_attn`.
    kernel_barrier: as in `calc_attn`.
    checkpoint_names: as in `calc_attn`.
    implementation: as in `calc_attn`.

  Returns:
    As `calc_attn`.
  """
  config = checks.make_config(
    q,
    kv_like[1],
    softmax_scale=softmax_scale,
    softcap=softcap,
    deterministic=deterministic,
    sm_margin=0,
    checkpoint_names=checkpoint_names,
    implementation=implementation,
  )
  q, config = config.with_positive_scale(q)
  asks_max_logits = check_flag("return_max_logits", return_max_logits)
  forward, backward = (dataclasses.replace(config, sm_margin=x) for x in sm_margins(sm_margin))
  rank_config = RankConfig(
    forward,
    backward,
    axis_name,
    check_flag("keep_remote_kv", keep_remote_kv),
    check_flag("kernel_barrier", kernel_barrier),
    check_flag("reduce_max_logits", reduce_max_logits) and asks_max_logits,
    _check_grad_dtype(remote_grad_dtype),
    expand,
  )
  sink = jnp.asarray(checks.sink_logit(sink, q.shape[1]))
  # Before the custom derivative, so that the gradient of a replicated operand is summed.
  operands = vary_all((q, tuple(rows), tuple(constants), key, sink))
  out, lse, max_logits = rank_attention(rank_config, *operands)
  if not asks_max_logits:
    return out, AttnForwardMeta(lse)
  return out, AttnForwardMeta(lse, lax.stop_gradient(max_logits))


def vary_all(tree: Any) -> Any:
  """Makes all arrays of a tree vary over the same mesh axes."""
  leaves, treedef = jax.tree.flatten(tree)
  return jax.tree.unflatten(treedef, vary_together(*map(jnp.asarray, leaves)))


def part_of_rank(name: str, key: Any, axis_name: str) -> DistAttnKey:
  """The rank's part of a key: leaves with a leading axis of 1. `name` is the public function's."""
  size = check_axis(name, check_key(key), axis_name)
  if key.spec.transport in ("two_level", "ragged"):
    if axis_name not in jax.sharding.get_abstract_mesh().manual_axes:
      raise NotImplementedError(
        f"transport={key.spec.transport!r} needs shard_map: {axis_name!r} is an axis of jax.vmap, "
        "which does not support its collectives; 'all_to_all' and 'all_gather' work there"
      )
  num_ranks = np.shape(check_one_key(key).q_chunks)[0]
  if num_ranks == 1:
    return key
  if num_ranks != size:
    raise ValueError(f"key must have leaves of {size} ranks or of one, got {num_ranks}")
  # If the key is closed over or replicated, each rank takes its part.
  rank = lax.axis_index(axis_name)
  return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(jnp.asarray(x), rank, 1), key)


def check_local_lengths(
  queries: Mapping[str, Any], rows: Mapping[str, Any], key: DistAttnKey
) -> None:
  """Checks that arrays, by name, have as many rows as a rank of the key."""
  spec = key.spec
  sides = ((queries, spec.q_local, spec.q_len), (rows, spec.k_local, spec.k_len))
  for arrays, local, length in sides:
    for name, x in arrays.items():
      if not x.shape or x.shape[0] != local:
        raise ValueError(
          f"{name} must have the {local} rows of a rank (the key's mask has {length} over "
          f"{spec.cp_size} ranks; see dispatch), got {list(x.shape)}"
        )


def _check_grad_dtype(dtype: Any) -> np.dtype:
  """Checks the dtype in which gradients travel."""
  choices = [np.dtype(x) for x in (jnp.float32, jnp.bfloat16, jnp.float16)]
  try:
    found = choices[0] if dtype is None else np.dtype(dtype)
  except TypeError:
    found = None
  if found not in choices:
    names = ", ".join(x.name for x in choices)
    raise ValueError(f"remote_grad_dtype must be None or one of {names}, got {dtype!r}")
  return found
