"""The other implementations of attention (peers) that ours is timed against, if installed.

An entry of `PEERS` describes a peer completely: what it needs, what it supports, and how to call
it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_magi
from benchmarks.masks import MASKS, WINDOW
from jax_magi import AttentionMask, MaskType


@dataclasses.dataclass(frozen=True)
class Cell:
  """One thing to time.

  Attributes:
    name: the name of the mask, by which peers know it.
    mask: the mask, with as many queries as keys.
    head_dim: the head dim of queries and keys, and of values unless `value_dim` is given.
    num_q_heads: the number of query heads, a multiple of `num_kv_heads`.
    num_kv_heads: the number of kv heads.
    dtype: our dtype, and that of peers without a dtype of their own.
    direction: "forward", "backward" (alone) or "both".
    is_single: whether a program has one call even if it is short. By default, short calls are timed
      several in one program.
    value_dim: the head dim of values. None means `head_dim`.
    implementation: our implementation.
  """

  name: str
  mask: AttentionMask
  head_dim: int
  num_q_heads: int
  num_kv_heads: int
  dtype: str = "bfloat16"
  direction: str = "forward"
  is_single: bool = False
  value_dim: int | None = None
  implementation: str = "cuda"

  @property
  def dims(self) -> tuple[int, int]:
    """The head dims of queries and keys, and of values."""
    return self.head_dim, self.value_dim or self.head_dim

  @property
  def length(self) -> int:
    """The number of tokens."""
    return self.mask.q_len

  def to_json(self) -> dict:
    """The cell as JSON, for another process."""
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return fields | {"mask": [self.mask.slices.tolist(), self.mask.q_len, self.mask.k_len]}

  @classmethod
  def from_json(cls, fields: dict) -> Cell:
    """The inverse of `to_json`."""
    slices, q_len, k_len = fields["mask"]
    mask = AttentionMask(np.asarray(slices, np.int32).reshape(-1, 6), q_len, k_len)
    return cls(**(fields | {"mask": mask}))


# A function of q, k [tokens, heads, head_dim] and v [tokens, heads, value_dim] that returns
# [tokens, num_q_heads, value_dim].
Attention = Callable[[Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Peer:
  """An implementation of attention.

  Attributes:
    name: the name in results.
    title: the name in plots and texts.
    ways: the calls that compute a cell. A peer that needs tuning has several, and the fastest one
      that works counts.
    needs: the modules that must be installed.
    absence: why the peer is not available although they are; None if it is. Called in its process.
    masks: the names of the cells that it supports; None for any.
    backward_masks: the names of the cells whose backward pass it supports.
    head_dims: the head dims that it supports; None for any.
    has_value_dims: whether values may have other head dims than keys.
    limit: why it cannot compute a cell for another reason; None if it can.
    dtype: the dtype of its operands, if not that of the cell.
    scales: whether it multiplies scores by head_dim ** -0.5. If not, it gets scaled queries.
    framework: the framework of its arrays, "jax" or "torch". A torch peer has a separate process,
      because two frameworks in one process load two versions of the same libraries.
  """

  name: str
  title: str
  ways: Callable[[Cell], Sequence[Attention]]
  needs: tuple[str, ...] = ()
  absence: Callable[[], str | None] = lambda: None
  masks: tuple[str, ...] | None = None
  backward_masks: tuple[str, ...] | None = None
  head_dims: tuple[int, ...] | None = None
  has_value_dims: bool = False
  limit: Callable[[Cell], str | None] = lambda _: None
  dtype: str | None = None
  scales: bool = True
  framework: str = "jax"

  def missing(self) -> str | None:
    """Why the peer is not available, as far as can be told without importing it; or None."""
    absent = [module for module in self.needs if importlib.util.find_spec(module) is None]
    return f"there is no module {' nor '.join(absent)}" if absent else None

  def obstacle(self, cell: Cell) -> str | None:
    """Why the peer cannot compute a cell; None if it can."""
    if self.masks is not None and cell.name not in self.masks:
      return f"has no mask {cell.name}"
    backward = self.backward_masks
    if cell.direction != "forward" and backward is not None and cell.name not in backward:
      return f"has no backward pass of {cell.name}"
    if self.head_dims is not None and cell.head_dim not in self.head_dims:
      return f"has no head dim {cell.head_dim}"
    if not self.has_value_dims and len(set(cell.dims)) > 1:
      return "has one head dim for keys and values"
    return self.limit(cell)

  def abilities(self) -> dict:
    """What the peer supports, for results."""
    return {
      "title": self.title,
      "masks": "any" if self.masks is None else self.masks,
      "backward_masks": "any" if self.backward_masks is None else self.backward_masks,
      "head_dims": "any" if self.head_dims is None else self.head_dims,
      "dtype": self.dtype or "as ours",
    }


def _gpu_absence() -> str | None:
  return None if jax.default_backend() == "gpu" else "needs an NVIDIA GPU"


# --- Our own path without kernels ---


def _blockwise_ways(cell: Cell) -> list[Attention]:
  return [lambda q, k, v: jax_magi.attention(q, k, v, cell.mask, implementation="blockwise")[0]]


def _named_limit(cell: Cell) -> str | None:
  return "is timed with --implementation" if cell.implementation == "cuda" else None


# --- What JAX brings ---

_JAX_OPTIONS: dict[str, dict[str, Any]] = {
  "full": {},
  "causal": {"is_causal": True},
  "window": {"is_causal": True, "local_window_size": (WINDOW - 1, 0)},
}


def _jax_ways(cell: Cell, *, implementation: str, fun: Callable | None = None) -> list[Attention]:
  """The ways of a function with the arguments of `jax.nn.dot_product_attention`."""
  fun = fun or jax.nn.dot_product_attention

  def attend(q, k, v):
    batch = (x[None] for x in (q, k, v))
    return fun(*batch, implementation=implementation, **_JAX_OPTIONS[cell.name])[0]

  return [attend]


def _xla_ways(cell: Cell) -> list[Attention]:
  if cell.name in _JAX_OPTIONS:
    return _jax_ways(cell, implementation="xla")
  dense = jnp.asarray(cell.mask.to_dense())[None]
  options = {"mask": dense, "implementation": "xla"}
  return [lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options)]


def _xla_limit(cell: Cell) -> str | None:
  gigabytes = 4 * cell.num_q_heads * cell.length**2 / 1e9
  return f"would need {gigabytes:.0f} GB for scores" if gigabytes > 8 else None


def _mosaic_ways(cell: Cell) -> list[Attention]:
  from jax.experimental.pallas.ops.gpu import attention_mgpu

  def way(**blocks):
    config = attention_mgpu.TuningConfig(
      block_q=64, max_concurrent_steps=2, causal=cell.name == "causal", **blocks
    )
    return lambda q, k, v: attention_mgpu.attention(q[None], k[None], v[None], config)[0]

  if cell.direction == "forward":
    return [way(block_kv=size) for size in (256, 128, 64)]
  names = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
  sizes = [(64, 64, 64, 64), (64, 128, 128, 64)]
  return [
    way(block_kv=128, compute_wgs_bwd=groups, **dict(zip(names, blocks, strict=True)))
    for blocks in sizes
    for groups in (1, 2)
  ]


def _mosaic_absence() -> str | None:
  try:
    from jax.experimental.pallas.ops.gpu import attention_mgpu  # noqa: F401
  except Exception as error:  # Experimental: whatever it raises, it is not here.
    return f"does not import: {error}"
  return _gpu_absence()


def _tokamax_ways(cell: Cell) -> list[Attention]:
  import tokamax

  return _jax_ways(cell, implementation="mosaic", fun=tokamax.dot_product_attention)


def _tokamax_absence() -> str | None:
  if _gpu_absence() is not None:
    return _gpu_absence()
  try:
    import tokamax  # noqa: F401
  except Exception as error:
    return f"does not import: {error}"
  return None


# --- What PyTorch has ---


def _torch_absence(module: str) -> str | None:
  try:
    import torch

    importlib.import_module(module)
  except Exception as error:  # A library that is missing, or built for another PyTorch.
    return f"does not import: {error}"
  return None if torch.cuda.is_available() else "needs an NVIDIA GPU, and PyTorch sees none"


def _flash_ways(cell: Cell) -> list[Attention]:
  import flash_attn_interface
  import torch

  options: dict[str, Any] = {"causal": cell.name.endswith("causal")}
  if cell.name == "window":
    options["window_size"] = (WINDOW - 1, 0)
  if not cell.name.startswith("varlen"):

    def attend(q, k, v):
      found = flash_attn_interface.flash_attn_func(q[None], k[None], v[None], **options)
      return _first(found)[0]

    return [attend]
  bounds = np.unique(cell.mask.slices[:, :2])
  longest = int(np.diff(bounds).max())
  cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")

  def attend_documents(q, k, v):
    found = flash_attn_interface.flash_attn_varlen_func(
      q, k, v, cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest, **options
    )
    return _first(found)

  return [attend_documents]


def _first(found):
  """Some versions return lse, too."""
  return found[0] if isinstance(found, tuple) else found


def _sdpa_ways(cell: Cell, *, backend: str) -> list[Attention]:
  """The ways of PyTorch's attention, with a backend that `SDPBackend` names."""
  import torch
  from torch.nn.attention import SDPBackend, sdpa_kernel

  options = {
    "is_causal": cell.name == "causal",
    "enable_gqa": cell.num_q_heads > cell.num_kv_heads,
  }

  def attend(q, k, v):
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(getattr(SDPBackend, backend)):
      out = torch.nn.functional.scaled_dot_product_attention(*heads_first, **options)
    return out[0].transpose(0, 1)

  return [attend]


def _sdpa_limit(cell: Cell) -> str | None:
  return "is timed by JAX" if cell.value_dim is None else None


def as_ranges(mask: AttentionMask) -> tuple[list, list, list]:
  """A mask as query ranges, key ranges and types."""
  unbounded = int(AttentionMask.full(1).slices[0, 5])
  rows = []
  for q_begin, q_end, k_begin, k_end, lo, hi in mask.slices.tolist():
    if q_begin >= q_end or k_begin >= k_end:
      continue
    is_causal, is_inverse = hi == k_end - q_end, lo == k_begin - q_begin
    if lo <= -unbounded and hi >= unbounded:
      rows.append((q_begin, q_end, k_begin, k_end, MaskType.FULL))
    elif lo <= -unbounded and is_causal:
      rows.append((q_begin, q_end, k_begin, k_end, MaskType.CAUSAL))
    elif lo <= -unbounded and q_begin < k_end - hi < q_end:
      # Rows from `cut` on see all keys.
      cut = k_end - hi
      rows.append((q_begin, cut, k_begin, k_end, MaskType.CAUSAL))
      rows.append((cut, q_end, k_begin, k_end, MaskType.FULL))
    elif hi >= unbounded and is_inverse:
      rows.append((q_begin, q_end, k_begin, k_end, MaskType.INV_CAUSAL))
    elif is_causal and is_inverse:
      rows.append((q_begin, q_end, k_begin, k_end, MaskType.BI_CAUSAL))
    elif is_causal and k_begin - lo < q_end:
      # A window: rows before `cut` see keys from the first on, later ones move along.
      cut = max(k_begin - lo, q_begin)
      if cut > q_begin:
        rows.append((q_begin, cut, k_begin, cut + hi, MaskType.CAUSAL))
      rows.append((cut, q_end, cut + lo, k_end, MaskType.BI_CAUSAL))
    elif is_causal:  # A window longer than all keys.
      rows.append((q_begin, q_end, k_begin, k_end, MaskType.CAUSAL))
    else:
      raise NotImplementedError(f"no ranges for the band {lo} .. {hi}")
  return [row[:2] for row in rows], [row[2:4] for row in rows], [int(row[4]) for row in rows]


def _magi_ways(cell: Cell) -> list[Attention]:
  import torch
  from magi_attention.functional import flex_flash_attn_func

  q_ranges, k_ranges, types = (
    torch.tensor(x, dtype=torch.int32, device="cuda") for x in as_ranges(cell.mask)
  )
  faster: dict[str, bool] = {}
  ordered = sorted(as_ranges(cell.mask)[0])
  if all(a[1] <= b[0] for a, b in itertools.pairwise(ordered)):
    faster["disable_fwd_atomic_reduction"] = True
  if cell.num_q_heads > cell.num_kv_heads and cell.direction != "forward":
    faster["cat_gqa"] = True

  def way(options):
    return lambda q, k, v: flex_flash_attn_func(q, k, v, q_ranges, k_ranges, types, **options)[0]

  return [way(options) for options in ({}, faster)]


# In the order of plots.
PEERS = (
  Peer(
    "cudnn",
    "cuDNN",
    functools.partial(_jax_ways, implementation="cudnn"),
    absence=_gpu_absence,
    masks=("full", "causal", "window"),
  ),
  Peer("xla", "XLA", _xla_ways, limit=_xla_limit),
  Peer(
    "mosaic_gpu",
    "JAX Mosaic GPU (float16)",
    _mosaic_ways,
    absence=_mosaic_absence,
    masks=("full", "causal"),
    backward_masks=("full",),
    head_dims=(64, 128, 256),
    dtype="float16",
    scales=False,
  ),
  Peer(
    "tokamax",
    "tokamax",
    _tokamax_ways,
    needs=("tokamax",),
    absence=_tokamax_absence,
    masks=("full", "causal", "window"),
  ),
  Peer(
    "flash_attention_3",
    "FlashAttention-3",
    _flash_ways,
    needs=("torch", "flash_attn_interface"),
    absence=functools.partial(_torch_absence, "flash_attn_interface"),
    masks=("full", "causal", "window", "varlen_full", "varlen_causal"),
    has_value_dims=True,
    framework="torch",
  ),
  Peer(  # Timed with `--dims` alone: JAX has no call of it where values have other dims.
    "cudnn_torch",
    "cuDNN (PyTorch)",
    functools.partial(_sdpa_ways, backend="CUDNN_ATTENTION"),
    needs=("torch",),
    absence=functools.partial(_torch_absence, "torch.nn.attention"),
    masks=("full", "causal"),
    has_value_dims=True,
    limit=_sdpa_limit,
    framework="torch",
  ),
  # The next two run on every GPU since Ampere, as the kernels that `--implementation` names do.
  Peer(
    "flash_attention_2",
    "FlashAttention-2 (PyTorch)",
    functools.partial(_sdpa_ways, backend="FLASH_ATTENTION"),
    needs=("torch",),
    absence=functools.partial(_torch_absence, "torch.nn.attention"),
    masks=("full", "causal"),
    limit=_named_limit,
    framework="torch",
  ),
  Peer("blockwise", "plain JAX", _blockwise_ways, limit=_named_limit, has_value_dims=True),
  Peer(
    "magi_attention",
    "MagiAttention",
    _magi_ways,
    needs=("torch", "magi_attention"),
    absence=functools.partial(_torch_absence, "magi_attention.functional"),
    masks=tuple(MASKS),
    head_dims=(64, 128),
    framework="torch",
  ),
)
