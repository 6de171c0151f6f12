"""Checks of numbers, flags, integers and arrays that callers pass, with errors that name them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

# Lengths and positions stay below this, so that the sum of two of them fits in 32 bits.
MAX_LENGTH = 2**30


def check_number(name: str, value: Any) -> float:
  """Checks a static number that is finite in float32; returns 0 if it underflows there."""
  if isinstance(value, jax.core.Tracer):
    raise ValueError(f"{name} must be a static number, got a traced value")
  if isinstance(value, (str, bytes)):
    raise ValueError(f"{name} must be a number, got {value!r}")
  try:
    number = float(value)
  except (TypeError, ValueError):
    raise ValueError(f"{name} must be a number, got {value!r}") from None
  with np.errstate(over="ignore"):
    rounded = np.float32(number)
  if not math.isfinite(rounded):
    raise ValueError(f"{name} must be finite in float32, got {number}")
  return number if rounded else 0.0


def has_symbols(shape: tuple[Any, ...]) -> bool:
  """Whether a shape has symbolic sizes, which `jax.export` uses for programs of many sizes."""
  return any(map(jax.export.is_symbolic_dim, shape))


def check_no_symbols(name: str, shape: tuple[Any, ...]) -> None:
  """Checks that a shape has no symbolic sizes of `jax.export`."""
  if has_symbols(shape):
    raise NotImplementedError(
      f"{name} must be of known size, got the symbolic {list(shape)}; export one program for each "
      "length, or pad inputs with fully masked tokens to one of a few lengths"
    )


def check_length(name: str, length: Any) -> int:
  """Checks a static integer in [0, 2**30)."""
  number = _check_integer(name, length)
  if not 0 <= number < MAX_LENGTH:
    raise ValueError(f"{name} must lie in [0, 2**30), got {number}")
  return number


def check_positive(name: str, length: Any) -> int:
  """Checks a static integer in [1, 2**30)."""
  number = check_length(name, length)
  if number == 0:
    raise ValueError(f"{name} must be positive, got 0")
  return number


def check_position(name: str, position: Any) -> int:
  """Checks a static integer within +-2**30."""
  number = _check_integer(name, position)
  if abs(number) > MAX_LENGTH:
    raise ValueError(f"{name} must lie within +-2**30, got {number}")
  return number


def _check_integer(name: str, value: Any) -> int:
  check_no_symbols(name, (value,))
  if isinstance(value, jax.core.Tracer):
    raise ValueError(f"{name} must be a static integer, got a traced value")
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
    raise ValueError(f"{name} must be a static integer, got {value!r}")
  return int(value)


def check_flag(name: str, flag: Any) -> bool:
  """Checks a static bool."""
  if isinstance(flag, jax.core.Tracer):
    raise ValueError(
      f"{name} must be True or False, got a traced value; list it in static_argnames of jax.jit"
    )
  if not isinstance(flag, (bool, np.bool_)):
    raise ValueError(f"{name} must be True or False, got {flag!r}")
  return bool(flag)


def check_choice(name: str, choice: Any, choices: tuple[Any, ...]) -> Any:
  """Checks that a value is one of `choices`."""
  if choice not in choices:
    raise ValueError(f"{name} must be one of {choices}, got {choice!r}")
  return choice


def check_array(name: str, x: Any) -> tuple[Any, ...]:
  """Checks an array, or a value that numpy can turn into one; returns its shape."""
  if hasattr(x, "shape") and hasattr(x, "dtype"):
    return tuple(x.shape)
  try:
    array = np.asarray(x)
  except ValueError:  # The rows are lists of different lengths.
    array = np.asarray(None)
  if array.dtype.kind not in "biufc":
    raise ValueError(f"{name} must be an array, got {x!r}")
  return array.shape


def known_value(x: Any) -> np.ndarray | None:
  """The value of `x` as a numpy array, or None if `x` is traced.

  Here and everywhere, "known" means known when the call is traced.
  """
  if isinstance(x, jax.core.Tracer):
    return None
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    return None
  return np.asarray(x)


def as_integers(name: str, x: Any, shape: tuple[int | str, ...]) -> np.ndarray | jax.Array:
  """Checks an array of integers of `shape` (a string is any length); returns numpy if known."""
  try:
    value = known_value(x)
  except ValueError:  # The rows are lists of different lengths.
    expected = ", ".join(str(n) for n in shape)
    raise ValueError(f"{name} must be [{expected}], got rows of different lengths: {x!r}") from None
  if value is not None and value.size == 0 and isinstance(x, (list, tuple)):
    value = np.zeros([0 if isinstance(n, str) else n for n in shape], np.int32)
  array = x if value is None else value
  if not jnp.issubdtype(array.dtype, jnp.integer):
    raise ValueError(f"{name} must hold integers, got dtype {array.dtype}")
  if array.ndim != len(shape) or any(
    isinstance(n, int) and n != size for n, size in zip(shape, array.shape, strict=True)
  ):
    expected = "[" + ", ".join(str(n) for n in shape) + "]"
    raise ValueError(f"{name} must be {expected}, got {list(array.shape)}")
  checked: np.ndarray | jax.Array = array
  return checked


def as_int32(name: str, x: Any, shape: tuple[int | str, ...]) -> np.ndarray | jax.Array:
  """Checks an array of integers of `shape` (a string is any length); casts it to int32.

  Traced integers are clipped to +-2**30. Known integers outside are an error.
  """
  array = as_integers(name, x, shape)
  if not isinstance(array, np.ndarray):
    # Without clipping, wider types would wrap. All positions this far out have the same meaning.
    limits = jnp.iinfo(array.dtype)
    array = jnp.clip(array, max(limits.min, -MAX_LENGTH), min(limits.max, MAX_LENGTH))
    return array.astype(jnp.int32)
  if array.size and (array.max() > MAX_LENGTH or array.min() < -MAX_LENGTH):
    raise ValueError(f"{name} must lie within +-2**30, got {array.min()} .. {array.max()}")
  return array.astype(np.int32)
