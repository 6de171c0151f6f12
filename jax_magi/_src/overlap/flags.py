"""Compiler options with which XLA overlaps communication with computation."""

from __future__ import annotations

import warnings
from typing import Any

import jax

# Each option with its reason.
_RECOMMENDED: dict[str, Any] = {
  # This scheduler puts computation between the start and the end of a collective. On Hopper, XLA
  # turns it on only if it has a cost model for all collectives of the program; it has none for
  # `ragged_all_to_all`.
  "xla_gpu_enable_latency_hiding_scheduler": True,
  # When a collective and a kernel are both ready, the collective starts first. This is the default,
  # and overlap depends on it.
  "xla_gpu_enable_highest_priority_async_stream": True,
  # Two collectives may be in flight. A two-level exchange moves rows between nodes and inside nodes
  # during the same kernel. With a limit of one, the second collective runs before the kernel and
  # is exposed.
  "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}


def recommended_flags() -> dict[str, Any]:
  """Returns the compiler options that let XLA overlap communication with attention.

  Pass them to one program, `jax.jit(step, compiler_options=recommended_flags())`, or to all
  programs of a process, with `XLA_FLAGS=$(python -m jax_magi.overlap --flags)` in its environment.

  Returns:
    The options that the installed JAX knows, by name. For each other option, the function warns and
    leaves it out.
  """
  known = {}
  for name, value in _RECOMMENDED.items():
    try:
      _compile_with({name: value})
    except Exception as error:  # The type depends on the version of JAX.
      reason = (str(error).splitlines() or [repr(error)])[0]
      warnings.warn(
        f"jax {jax.__version__} does not take the compiler option {name}={value}, which jax_magi "
        f"recommends: {reason}; check with `python -m jax_magi.overlap` that communication "
        "overlaps without it",
        stacklevel=2,
      )
    else:
      known[name] = value
  return known


def flags_text() -> str:
  """The recommended options in the format of XLA_FLAGS."""
  return " ".join(f"--{name}={str(x).lower()}" for name, x in recommended_flags().items())


def _compile_with(options: dict[str, Any]) -> None:
  """Raises if JAX knows no such option. The platform of the option does not matter."""
  jax.jit(lambda x: x, compiler_options=options).lower(0).compile()
