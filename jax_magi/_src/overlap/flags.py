"""Compiler options with which XLA runs communication beside computation."""

from __future__ import annotations

import warnings
from typing import Any

import jax

# With the reason of each.
_RECOMMENDED: dict[str, Any] = {
  # XLA's scheduler that puts computation between the begin and the end of a collective. On Hopper
  # it is on by itself only for programs without a collective that it has no cost for: not for those
  # with `ragged_all_to_all`.
  "xla_gpu_enable_latency_hiding_scheduler": True,
  # Communication that is ready goes before kernels that are. It is the default, and has to stay.
  "xla_gpu_enable_highest_priority_async_stream": True,
  # Two collectives in flight: a two-level exchange moves rows between nodes and inside them beside
  # the same kernel. With one, the second runs before the kernel, beside nothing.
  "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}


def recommended_flags() -> dict[str, Any]:
  """The compiler options to give to `jax.jit` for a step with communication.

  `jax.jit(step, compiler_options=recommended_flags())`; or, for all programs of a process,
  `XLA_FLAGS=$(python -m jax_magi.overlap --flags)` in its environment.

  Returns:
    Those that the installed JAX knows. It warns of others, and leaves them out.
  """
  known = {}
  for name, value in _RECOMMENDED.items():
    try:
      _compile_with({name: value})
    except Exception as error:  # JAX has had several types for it.
      reason = (str(error).splitlines() or [repr(error)])[0]
      warnings.warn(
        f"jax {jax.__version__} does not take the compiler option {name}={value}, which jax_magi "
        f"recommends: {reason}; look with `python -m jax_magi.overlap` whether communication "
        "overlaps without it",
        stacklevel=2,
      )
    else:
      known[name] = value
  return known


def flags_text() -> str:
  """The same, as XLA_FLAGS wants them."""
  return " ".join(f"--{name}={str(x).lower()}" for name, x in recommended_flags().items())


def _compile_with(options: dict[str, Any]) -> None:
  """Raises if there is no such option, whatever platform it is for."""
  jax.jit(lambda x: x, compiler_options=options).lower(0).compile()
