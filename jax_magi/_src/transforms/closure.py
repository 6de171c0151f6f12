"""Turns the arrays that a function closes over into operands, so that they can have gradients.

A custom derivative has gradients only for its operands. `open_closure` traces a function and finds
the arrays that it closes over. The function that it returns takes these constants as arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from jax_magi._src.transforms.varying import axes_of_type, vary_over, vary_together, varying_axes


@dataclasses.dataclass(frozen=True, eq=False)
class OpenFunction:
  """A function that was traced for operands of some shapes, and closes over nothing.

  Attributes:
    programs: for the shapes of the operands: the traced program, the positions of its constants
      among all constants, and the tree structure of its results.
  """

  programs: dict[tuple[tuple[int, ...], ...], tuple[core.ClosedJaxpr, tuple[int, ...], Any]]

  def __call__(self, operands: Sequence[Any], constants: Sequence[Any]) -> Any:
    """The results of the function. It must have been traced for operands of these shapes."""
    program, places, tree = self.programs[_shapes(operands)]
    constants = [constants[place] for place in places]
    jaxpr = program.jaxpr
    if _as_traced(jaxpr.constvars, constants) and _as_traced(jaxpr.invars, operands):
      results = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, constants))(*operands)
    else:
      results = _evaluate(jaxpr, constants, operands)
    return jax.tree.unflatten(tree, results)

  def results(self, operands: Sequence[Any]) -> Any:
    """The shapes and dtypes of the results for operands of these shapes."""
    program, _, tree = self.programs[_shapes(operands)]
    return jax.tree.unflatten(tree, program.out_avals)


def open_closure(
  fun: Callable[..., Any], examples: Sequence[Sequence[Any]]
) -> tuple[OpenFunction, tuple[Any, ...]]:
  """Returns `fun` as a function without closure, and the arrays that `fun` closes over.

  Args:
    fun: a traceable function of arrays.
    examples: one example of operands for each combination of shapes that will be used.
  """
  programs: dict[tuple[tuple[int, ...], ...], tuple[core.ClosedJaxpr, tuple[int, ...], Any]] = {}
  constants: list[Any] = []
  for operands in examples:
    program, shapes = jax.make_jaxpr(fun, return_shape=True)(*operands)
    places = []
    for constant in program.consts:
      known = [place for place, other in enumerate(constants) if other is constant]
      places.append(known[0] if known else len(constants))
      if not known:
        constants.append(constant)
    programs[_shapes(operands)] = program, tuple(places), jax.tree.structure(shapes)
  return OpenFunction(programs), tuple(constants)


def _shapes(operands: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
  return tuple(tuple(x.shape) for x in operands)


def _as_traced(variables: Sequence[Any], values: Sequence[Any]) -> bool:
  """Whether values vary over the same mesh axes as when the program was traced."""
  pairs = zip(variables, values, strict=True)
  return all(axes_of_type(variable.aval) == varying_axes(value) for variable, value in pairs)


# Calls that can be replaced by their equations.
_INLINED = ("jit", "pjit", "closed_call", "core_call")


def _evaluate(jaxpr: core.Jaxpr, constants: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
  """Evaluates a traced program for operands that may vary over more mesh axes than when traced.

  Constants do. If they were replicated, each call of the program would make them vary, and each
  call would sum their gradients over the mesh. If they vary before the calls, their gradients are
  summed once, outside.
  """
  values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *operands], strict=True))

  def read(atom: Any) -> Any:
    return atom.val if isinstance(atom, core.Literal) else values[atom]

  for equation in jaxpr.eqns:
    results = _evaluate_equation(equation, [read(atom) for atom in equation.invars])
    values.update(zip(equation.outvars, results, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _evaluate_equation(equation: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
  name, params = equation.primitive.name, equation.params
  if not _as_traced(equation.invars, inputs):
    if name in ("pvary", "pcast"):
      return [vary_over(inputs[0], axes_of_type(equation.outvars[0].aval))]
    if name in _INLINED:
      inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
      return _evaluate(inner.jaxpr, inner.consts, inputs)
    if name in ("checkpoint", "remat", "remat2"):
      fun = jax.checkpoint(
        lambda *operands: _evaluate(params["jaxpr"], (), operands),
        policy=params["policy"],
        prevent_cse=params["prevent_cse"],
      )
      return list(fun(*inputs))
    if any(isinstance(x, (core.Jaxpr, core.ClosedJaxpr)) for x in jax.tree.leaves(params)):
      raise NotImplementedError(
        f"expand closes over an array that is replicated over a mesh axis, and uses it in {name}; "
        "make it vary beforehand, with jax.lax.pcast(x, axis_name, to='varying')"
      )
    inputs = list(vary_together(*inputs))
  bound = equation.primitive.get_bind_params(params)
  # Depending on its version, JAX returns functions among these parameters, or separately.
  functions, params = bound if isinstance(bound, tuple) else ((), bound)
  with equation.ctx.manager:
    results = equation.primitive.bind(*functions, *inputs, **params)
  return list(results) if equation.primitive.multiple_results else [results]
