"""The mask of a call as one value: its slices, and what is known of them when it is traced."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi._src.masks.slices import grouped_by_keys
from jax_magi._src.native import attention as native
from jax_magi._src.native.backends import Backend
from jax_magi._src.transforms.eager import is_eager
from jax_magi._src.transforms.operation import Derived, Operands


@functools.partial(jax.tree_util.register_dataclass, data_fields=["slices"], meta_fields=["known"])
@dataclasses.dataclass(frozen=True)
class MaskOperand:
  """The mask of a call.

  Attributes:
    slices: int32 `[batch or 1, num_slices, 6]`.
    known: the same as bytes, where they are known when the call is traced, and one for the batch.
  """

  slices: Any
  known: bytes | None = dataclasses.field(default=None, repr=False)

  @classmethod
  def of(cls, slices: Any) -> MaskOperand:
    """A mask of which nothing is known, unless `slices` is a mask already."""
    return slices if isinstance(slices, MaskOperand) else cls(slices)

  @classmethod
  def of_call(cls, slices: Any, *arrays: Any) -> MaskOperand:
    """The mask of a call that takes these arrays, too; numpy slices may be known to kernels."""
    # Only in a program that is compiled as a whole: elsewhere, each mask would be a new program.
    is_one = isinstance(slices, np.ndarray) and slices.shape[0] == 1
    if is_one and not all(map(is_eager, arrays)):
      return cls(slices, slices.tobytes())
    return cls(slices)

  def table(self) -> np.ndarray | None:
    """int32 `[num_slices, 6]`, if it is known and still one for the batch."""
    if self.known is None or self.slices.shape[0] != 1:
      return None
    return np.frombuffer(self.known, np.int32).reshape(-1, 6)

  def for_backward(self) -> MaskOperand:
    """The same mask for the backward pass, whose kernels walk keys."""
    table = self.table()
    if table is None or (grouped := grouped_by_keys(table)) is table:
      return self
    return MaskOperand(jnp.asarray(grouped)[None], grouped.tobytes())

  def tiles(
    self, backend: Backend, operands: Operands, *, is_backward: bool, **options: Any
  ) -> Derived | None:
    """Slices and a tile list for a backend's kernels, and its stamp; None if it is not known.

    Args:
      backend: whose kernels are meant.
      operands: of the call, by name, on all devices.
      is_backward: which of the two operations it is.
      **options: of `native.plan_tiles`.
    """
    table = self.table()
    if table is None:
      return None
    candidates = [table]
    if not is_backward and (grouped := grouped_by_keys(table)) is not table:
      candidates.append(grouped)
    best, plan = native.plan_tiles(
      backend, operands, candidates, is_backward=is_backward, **options
    )
    slices = self.slices if best is table else jnp.asarray(best)[None]
    derived = {"slices": slices, "tile_list": np.frombuffer(plan.tile_list, np.int32)}
    return derived, {"tile_stamp": plan.tile_stamp}
