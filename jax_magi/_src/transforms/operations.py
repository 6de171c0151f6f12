"""Counts the operations of the matrix products in a traced function."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.extend import core


def product_operations(jaxpr: core.Jaxpr) -> int:
  """Two for each multiplication in all matrix products, including those of inner functions.

  XLA's own count (`Lowered.cost_analysis`) is available only on some platforms, and plans must not
  depend on the machine that makes them. A `while` loop counts as one iteration.
  """
  total = 0
  for equation in jaxpr.eqns:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
      (contracted, _), _ = params["dimension_numbers"]
      depth = math.prod(_shape(equation.invars[0])[axis] for axis in contracted)
      total += 2 * depth * math.prod(_shape(equation.outvars[0]))
    inner = [product_operations(x) for x in _inner_jaxprs(params)]
    if name == "cond":
      total += max(inner)
    else:
      total += (params["length"] if name == "scan" else 1) * sum(inner)
  return total


def _shape(x: Any) -> tuple[int, ...]:
  return tuple(x.aval.shape)


def _inner_jaxprs(params: dict[str, Any]) -> list[core.Jaxpr]:
  found = []
  for x in jax.tree.leaves(params):
    if isinstance(x, core.ClosedJaxpr):
      found.append(x.jaxpr)
    elif isinstance(x, core.Jaxpr):
      found.append(x)
  return found
