"""The speeds of links and kernels that plans assume."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi._src.arguments import check_length, check_number
from jax_magi._src.transforms.operations import product_operations

# The forward share of the operations of both passes: two of seven products.
FORWARD_SHARE = 2 / 7
# Operations per second of our kernels on an H200, over both passes.
_RATE = 550e12
# Operations per second of matrix products of latents and weights on an H200, and bytes per second
# of its memory. For 8192 rows of 64 heads with 192 and 128 dims, these predict 0.36 and 0.92 ms;
# 0.37 and 0.90 were measured.
_PRODUCT_RATE, _MEMORY = 700e12, 4e12


@dataclasses.dataclass(frozen=True)
class Links:
  """Speeds of links and kernels, by which the planner weighs balance against communication.

  The defaults describe nodes of eight H200s, each with a NIC of 400 Gbit/s, and a 16-bit model with
  48 query heads and 8 kv heads of dim 128. Only the rough proportions matter to a plan.

  Attributes:
    near: bytes per second that a GPU sends and receives inside its node.
    far: bytes per second that a GPU sends and receives between nodes.
    latency: seconds that each collective takes in addition to its bytes.
    row_bytes: bytes of the keys and values of a token.
    grad_row_bytes: bytes of the gradients of the keys and values of a token.
    pair_seconds: time of one visible pair, with all heads, forward and backward.
    stage_seconds: time that each kernel call adds, forward and backward: launch and last tiles.
    merge_seconds: time that each forward call adds if its results are merged with other calls.
    expand_seconds: time that `expand` of `calc_latent_attn` takes per row of a stage, forward and
      backward. The backward pass expands again. Nothing overlaps with expansion.
  """

  near: float = 450e9
  far: float = 50e9
  latency: float = 20e-6
  row_bytes: int = 4096
  grad_row_bytes: int = 8192
  pair_seconds: float = 86016 / _RATE
  stage_seconds: tuple[float, float] = (0.05e-3, 0.2e-3)
  merge_seconds: float = 0.1e-3
  expand_seconds: tuple[float, float] = (0.0, 0.0)

  def __post_init__(self) -> None:
    for name in ("near", "far", "row_bytes", "grad_row_bytes", "pair_seconds"):
      if (value := check_number(name, getattr(self, name))) <= 0.0:
        raise ValueError(f"{name} must be positive, got {value}")
    times = [("latency", self.latency), ("merge_seconds", self.merge_seconds)]
    for name in ("stage_seconds", "expand_seconds"):
      pair = getattr(self, name)
      if not isinstance(pair, tuple) or len(pair) != 2:
        raise ValueError(f"{name} must be (forward, backward), got {pair!r}")
      times += [(name, seconds) for seconds in pair]
    for name, seconds in times:
      if check_number(name, seconds) < 0.0:
        raise ValueError(f"{name} must not be negative, got {seconds}")

  def for_rows(self, rows: Any, *, remote_grad_dtype: Any = None) -> Links:
    """The same speeds for rows of other arrays, such as the latents of `calc_latent_attn`.

        links = Links().for_rows(latent).for_heads(64, 192, 128).for_expand(expand, latent)
        key = magi_attn_flex_key(..., links=links)

    Args:
      rows: a tree of arrays `[n, ...]`, or of `jax.ShapeDtypeStruct`: latents, or k and v.
      remote_grad_dtype: as in `calc_attn`.
    """
    leaves = _leaves_of(rows)
    widths = [(math.prod(x.shape[1:]), x.dtype) for x in leaves]
    row_bytes = sum(width * np.dtype(dtype).itemsize for width, dtype in widths)
    grad_bytes = np.dtype(np.float32 if remote_grad_dtype is None else remote_grad_dtype).itemsize
    grad_width = sum(width for width, dtype in widths if jnp.issubdtype(dtype, jnp.inexact))
    return dataclasses.replace(self, row_bytes=row_bytes, grad_row_bytes=grad_width * grad_bytes)

  def for_heads(self, num_q_heads: int, head_dim: int, value_dim: int | None = None) -> Links:
    """The same speeds for attention with other heads, computed at the rate of an H200.

    Args:
      num_q_heads: the number of query heads of a device.
      head_dim: the head dim of queries and keys.
      value_dim: the head dim of values. None means `head_dim`.
    """
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {"num_q_heads": num_q_heads, "head_dim": head_dim, "value_dim": value_dim}
    for name, size in sizes.items():
      if check_length(name, size) == 0:
        raise ValueError(f"{name} must be positive, got 0")
    # Seven products, four of which are with queries or keys, and three with values.
    operations = num_q_heads * (8 * head_dim + 6 * value_dim)
    return dataclasses.replace(self, pair_seconds=operations / _RATE)

  def for_expand(self, expand: Callable[[Any], Any], rows: Any) -> Links:
    """The same speeds with the cost of expanding rows (`expand_seconds`), at the rate of an H200.

    The cost follows from the matrix products of `expand` and the bytes of what it returns.

    Args:
      expand: as in `calc_latent_attn`.
      rows: as in `for_rows`.
    """
    _leaves_of(rows)
    if not callable(expand):
      raise ValueError(f"expand must be a function of rows, got {expand!r}")

    def cost(count: int) -> np.ndarray:
      """The operations of matrix products, and the bytes of k and v."""
      some = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), rows)
      program, kv = jax.make_jaxpr(expand, return_shape=True)(some)
      sizes = [math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(kv)]
      return np.array([product_operations(program.jaxpr), sum(sizes)])

    # The difference excludes costs that do not depend on the number of rows.
    operations, num_bytes = map(float, cost(2) - cost(1))
    products, moves = operations / _PRODUCT_RATE, num_bytes / _MEMORY
    # The derivative of a product is two products. Backward, gradients of k and v are moved, too.
    forward, backward = products + 2 * moves, 3 * products + 4 * moves
    return dataclasses.replace(self, expand_seconds=(forward, backward))

  @property
  def expand_row(self) -> float:
    """The cost of expanding a row in both passes, in visible pairs computed in the same time."""
    return sum(self.expand_seconds) / self.pair_seconds

  @property
  def near_row(self) -> float:
    """The cost of moving a row inside a node, twice forward and once back, in visible pairs."""
    return self._moved_bytes / self.near / self.pair_seconds

  @property
  def far_row(self) -> float:
    """The cost of moving a row to another node, in visible pairs."""
    return self._moved_bytes / self.far / self.pair_seconds

  @property
  def _moved_bytes(self) -> float:
    return 2 * self.row_bytes + self.grad_row_bytes


def _leaves_of(rows: Any) -> list[Any]:
  """The arrays of a tree. Checks that each has an axis of rows."""
  leaves = jax.tree.leaves(rows)
  if not leaves or not all(hasattr(x, "dtype") and len(x.shape) for x in leaves):
    raise ValueError(f"rows must be arrays with at least one axis, got {rows!r}")
  return leaves


def check_links(links: Any) -> Links:
  """Checks links; None means those of H200 nodes."""
  if links is None:
    return Links()
  if not isinstance(links, Links):
    raise ValueError(f"links must be Links or None, got {links!r}")
  return links
