"""The mask of a call as one value: its slices, and their values if known at trace time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi._src.masks.slices import grouped_by_keys
from jax_magi._src.native import attention as native
from jax_magi._src.native.backends import Backend
from jax_magi._src.transforms.eager import is_eager
from jax_magi._src.transforms.operation import Derived, Operands


@dataclasses.dataclass(frozen=True)
class MaskGroup:
  """The static part of a group of calls whose tile lists are made together.

  Attributes:
    sizes: the number of slices and the number of keys of each call of the group.
    keeps_rows: whether each call leaves rows that see none of its keys to the other calls. Its tile
      list then lacks tiles of such rows alone.
    index: the index of this call in the group.
  """

  sizes: tuple[tuple[int, int], ...]
  keeps_rows: tuple[bool, ...]
  index: int


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["slices", "all_slices"],
  meta_fields=["known", "group"],
)
@dataclasses.dataclass(frozen=True)
class MaskOperand:
  """The mask of a call.

  Attributes:
    slices: int32 `[batch or 1, num_slices, 6]`.
    known: the slices as bytes, if they are known when the call is traced and the batch shares them.
    all_slices: int32 `[batch or 1, num_slices of all calls, 6]`, if the tile lists of several calls
      are made together: the slices of each call, in order.
    group: describes these calls. None means that this call makes its list alone.
  """

  slices: Any
  known: bytes | None = dataclasses.field(default=None, repr=False)
  all_slices: Any = None
  group: MaskGroup | None = None

  @classmethod
  def of(cls, slices: Any) -> MaskOperand:
    """A mask with unknown values, unless `slices` is a `MaskOperand` already."""
    return slices if isinstance(slices, MaskOperand) else cls(slices)

  @classmethod
  def of_call(cls, slices: Any, *arrays: Any) -> MaskOperand:
    """The mask of a call with these arrays. Kernels may use the values of numpy slices."""
    # Known slices are used only in compiled programs: in eager calls, each mask would compile anew.
    is_one = isinstance(slices, np.ndarray) and slices.shape[0] == 1
    if is_one and not all(map(is_eager, arrays)):
      return cls(slices, slices.tobytes())
    return cls(slices)

  @property
  def keeps_rows(self) -> bool:
    """Whether the call leaves rows that see none of its keys to the other calls of the group."""
    return self.group is not None and self.group.keeps_rows[self.group.index]

  def operands(self) -> Operands:
    """The operands of the mask, by name."""
    return {"slices": self.slices} | ({"all_slices": self.all_slices} if self.group else {})

  def table(self) -> np.ndarray | None:
    """int32 `[num_slices, 6]`, if the slices are known and the batch shares them."""
    if self.known is None or self.slices.shape[0] != 1:
      return None
    return np.frombuffer(self.known, np.int32).reshape(-1, 6)

  def for_backward(self) -> MaskOperand:
    """An equivalent mask for the backward pass, whose kernels iterate over key tiles."""
    table = self.table()
    if table is None or (grouped := grouped_by_keys(table)) is table:
      return self
    return MaskOperand(jnp.asarray(grouped)[None], grouped.tobytes())

  def tiles(
    self, backend: Backend, operands: Operands, *, is_backward: bool, **options: Any
  ) -> Derived | None:
    """Slices and a tile list for a backend's kernels, and its stamp; None if slices are unknown.

    Args:
      backend: the backend.
      operands: the operands of the call on all devices, by name.
      is_backward: whether to plan the backward pass.
      **options: options of `native.plan_tiles`.
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


class PassMasks:
  """The masks of the calls of a pass, which have the same queries and different keys.

  The device makes the tile lists of all calls at once, before the first call.

  Attributes:
    slices: int32 `[num_slices, 6]` of each call, by the name of the call.
  """

  def __init__(self, calls: Mapping[Any, tuple[Any, int]], keeping_rows: Collection[Hashable] = ()):
    """Makes the masks.

    Args:
      calls: the slices of each call and its number of keys, by its name.
      keeping_rows: the names of forward calls that leave rows that see none of their keys to the
        other calls. Calls with running results can keep them, unless they round merged results.
        The first call can if each row sees keys in one call, or is in a slice of the first call
        without keys: such rows are filled.
    """
    self.slices = {name: slices for name, (slices, _) in calls.items()}
    sizes = tuple((slices.shape[0], k_len) for slices, k_len in calls.values())
    keeps_rows = tuple(name in keeping_rows for name in calls)
    self._groups = {name: MaskGroup(sizes, keeps_rows, index) for index, name in enumerate(calls)}
    self._all_slices = jnp.concatenate(list(self.slices.values()))[None]

  def operand(self, name: Hashable, slices: Any) -> MaskOperand:
    """The mask of a call. `slices` are its own slices, which may become available later."""
    if len(self._groups) == 1:
      return MaskOperand(slices[None])
    return MaskOperand(slices[None], all_slices=self._all_slices, group=self._groups[name])
