"""Bias and ALiBi in blocks of scores: a part of the plain path.

Blocks of scores are `[num_kv_heads, group, rows, keys]`. Blocks of a bias and of its gradient have
size 1 in each dimension in which the bias is shared.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_magi._src.transforms.varying import vary_like


@dataclasses.dataclass(frozen=True)
class Terms:
  """The terms that are added to the scaled logits.

  Attributes:
    num_kv_heads: the number of head groups.
    bias: `[num_q_heads or 1, q_len or 1, k_len]`, or None.
    alibi_slopes: `[num_q_heads]`, or None.
  """

  num_kv_heads: int
  bias: Any = None
  alibi_slopes: Any = None

  def _grouped(self, num_q_heads: int) -> tuple[int, int]:
    return self.num_kv_heads, num_q_heads // self.num_kv_heads

  def in_blocks(self, num_rows: int, num_keys: int) -> BlockTerms:
    """The terms for blocks of this size."""
    bias, slopes = self.bias, self.alibi_slopes
    if bias is not None:
      heads = (1, 1) if bias.shape[0] == 1 else self._grouped(bias.shape[0])
      bias = bias.reshape(*heads, *bias.shape[1:])
      block = (1 if bias.shape[2] == 1 else num_rows, num_keys)
      # Pad to whole blocks, at least one: a block is traced even if there are no tokens.
      missing = [
        (0, max(-size % n, n - size)) for size, n in zip(bias.shape[2:], block, strict=True)
      ]
      bias = jnp.pad(bias, [(0, 0), (0, 0), *missing]) if np.any(missing) else bias
    if slopes is not None:
      slopes = slopes.reshape(*self._grouped(slopes.shape[0]), 1, 1)
    shape = None if self.bias is None else self.bias.shape
    return BlockTerms(bias, slopes, num_rows, num_keys, shape)


@dataclasses.dataclass(frozen=True)
class BlockTerms:
  """`Terms`, padded for blocks of `num_rows` by `num_keys`."""

  bias: Any
  slopes: Any
  num_rows: int
  num_keys: int
  bias_shape: tuple[int, int, int] | None

  @property
  def _bias_block(self) -> tuple[int, ...]:
    rows = 1 if self.bias.shape[2] == 1 else self.num_rows
    return (*self.bias.shape[:2], rows, self.num_keys)

  def _distances(self, q_begin: Any, k_begin: Any) -> jax.Array:
    """key - query of a block, float32 `[1, 1, rows, keys]`."""
    rows, keys = (jnp.arange(n, dtype=np.int32) for n in (self.num_rows, self.num_keys))
    distances: jax.Array = (k_begin + keys)[None, :] - (q_begin + rows)[:, None]
    return distances.astype(np.float32)[None, None]

  def added(
    self, logits: jax.Array, mask: jax.Array, q_begin: Any, k_begin: Any
  ) -> tuple[jax.Array, jax.Array]:
    """A block of logits with the terms, and the mask without pairs whose bias is -inf."""
    if self.bias is not None:
      zero = np.int32(0)  # An int would be 64 bits wide with jax_enable_x64.
      begin = (zero, zero, zero if self.bias.shape[2] == 1 else q_begin, k_begin)
      block = lax.dynamic_slice(self.bias, begin, self._bias_block).astype(np.float32)
      logits, mask = logits + block, mask & (block != -jnp.inf)
    if self.slopes is not None:
      logits = logits + self.slopes * self._distances(q_begin, k_begin)
    return logits, mask

  def gradients(
    self, ds: jax.Array, q_begin: Any, k_begin: Any, wants: tuple[str, ...]
  ) -> dict[str, Any]:
    """The part of a block in the requested gradients. `ds` is the gradient of its logits."""
    blocks = {}
    if "bias" in wants:
      sizes = zip(self._bias_block, ds.shape, strict=True)
      axes = tuple(axis for axis, (size, full) in enumerate(sizes) if size != full)
      blocks["bias"] = ds.sum(axis=axes, keepdims=True)
    if "alibi_slopes" in wants:
      blocks["alibi_slopes"] = (ds * self._distances(q_begin, k_begin)).sum(axis=(2, 3))
    return blocks

  def no_gradients(self, wants: tuple[str, ...], like: jax.Array) -> dict[str, Any]:
    """The same for a block without visible pairs, varying over the mesh axes of `like`."""
    shapes = {}
    if "bias" in wants:
      shapes["bias"] = self._bias_block
    if "alibi_slopes" in wants:
      shapes["alibi_slopes"] = self.slopes.shape[:2]
    return {n: vary_like(jnp.zeros(shape, np.float32), like) for n, shape in shapes.items()}

  def joined(self, blocks: dict[str, Any]) -> dict[str, Any]:
    """The gradients, joined from blocks that are stacked `[key blocks, query blocks, ...]`."""
    gradients = {}
    if "bias" in blocks:
      heads, q_len, k_len = self.bias_shape  # type: ignore[misc]
      x = blocks["bias"]
      x = x.sum(axis=1, keepdims=True) if q_len == 1 else x
      x = jnp.transpose(x, (2, 3, 1, 4, 0, 5))
      x = x.reshape(heads, x.shape[2] * x.shape[3], x.shape[4] * x.shape[5])
      gradients["bias"] = x[:, :q_len, :k_len]
    if "alibi_slopes" in blocks:
      gradients["alibi_slopes"] = (
        blocks["alibi_slopes"].sum(axis=(0, 1)).reshape(self.slopes.shape[0] * self.slopes.shape[1])
      )
    return gradients
