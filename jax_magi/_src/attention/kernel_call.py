"""The operands of attention's operations, and the kernels that implement them on each backend."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_magi._src.attention.mask_operand import MaskGroup, MaskOperand
from jax_magi._src.native import attention as native
from jax_magi._src.native.backends import (
  Backend,
  candidates,
  check_implementation,
  log_fallback,
)
from jax_magi._src.transforms.operation import (
  Derived,
  DerivedOperand,
  Native,
  Operands,
  Results,
)

# The name of the path in plain JAX.
PLAIN = "blockwise"

# What may be added to the scaled logits, in the order of the kernels, with its dimensions.
TERMS = {
  # In q's dtype or float32; a size of 1 is shared by the batch, heads or queries.
  "bias": "bhqk",
  # float32; each times (key - query) is added.
  "alibi_slopes": "bh",
}
# The dimensions of all operands, as in `Operation`. Operands after "sink" are optional.
OPERANDS = {
  "q": "bqhd",
  "k": "bkgd",
  "v": "bkge",
  "dout": "bqhe",
  "lse": "bqh",
  "delta": "bqh",
  "slices": "bnc",
  "all_slices": "bnc",  # See `MaskOperand`.
  "sink": "bh",
  **TERMS,
  "running_out": "bqhe",
  "running_lse": "bqh",
  "running_max_logits": "bh",
  "running_dq": "bhw",
  "tile_list": "t",  # Derived from the others: see `_tile_list`.
}
SHARED = frozenset({"slices", "all_slices", "bias"})
SOURCES = frozenset({"all_slices"})


def given_terms(terms: Mapping[str, jax.Array | None]) -> Operands:
  """The terms that are not None."""
  assert terms.keys() <= TERMS.keys(), terms.keys()
  return {name: x for name, x in terms.items() if x is not None}


# Names of the saved residuals, for `jax.checkpoint` policies.
CHECKPOINT_NAMES = ("jax_magi_out", "jax_magi_lse")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
  """The static arguments of a call."""

  softmax_scale: float
  softcap: float = 0.0
  deterministic: bool = False
  sm_margin: int = 0
  implementation: str | None = None
  checkpoint_names: tuple[str, str] = CHECKPOINT_NAMES

  def with_positive_scale(self, q: Any) -> tuple[Any, AttentionConfig]:
    """An equivalent call with a positive scale: kernels rely on the order of products."""
    if self.softmax_scale < 0.0:
      return -q, dataclasses.replace(self, softmax_scale=-self.softmax_scale)
    if self.softmax_scale == 0.0:
      return jnp.zeros_like(q), dataclasses.replace(self, softmax_scale=1.0)
    return q, self


@dataclasses.dataclass(frozen=True)
class KernelCall:
  """A kernel, and the information that its tile plan depends on.

  Attributes:
    config: the static arguments.
    known: as in `MaskOperand`.
    group: as in `MaskOperand`.
    kernel: a function of the operands by name, `backend`, and `tile_stamp`.
    wants: the operands whose gradients are requested, in addition to q, k and v.
    is_backward: whether this is the backward pass.
    has_float_grads: whether gradients are float32 even if q is not.
  """

  config: AttentionConfig
  known: bytes | None
  group: MaskGroup | None
  kernel: Callable[..., Results]
  wants: tuple[str, ...] = ()
  is_backward: bool = False
  has_float_grads: bool = False


def natives(call: KernelCall, operands: Operands) -> dict[str, Native]:
  """The platforms whose kernels take the operands."""
  config = call.config
  is_in_order = config.deterministic and "bias" in call.wants
  q, v = operands["q"], operands["v"]
  check = functools.partial(
    Backend.attention_obstacle,
    q=q,
    v=v,
    bias_in_order=operands["bias"] if is_in_order else None,
  )
  # The arguments were checked before it was known which gradients are requested.
  check_implementation(config.implementation, PLAIN, check, has_architectures=True)
  if config.implementation is None:
    log_fallback("attention", PLAIN, check)
  return {
    platform: _on_backend(call, backend.for_attention(q, v))
    for platform, backend in candidates(config.implementation).items()
    if check(backend) is None
  }


def _on_backend(call: KernelCall, backend: Backend) -> Native:
  return Native(functools.partial(call.kernel, backend=backend), _tile_list(call, backend))


def _tile_list(call: KernelCall, backend: Backend) -> DerivedOperand:
  """The tile list of a backend's kernels: which tiles they compute, in which order.

  For a known mask, it is planned when the call is traced, with the equivalent slices that take the
  least time. For other masks, the device makes it, together with the lists of the mask's group.
  """
  options: dict[str, Any] = {"softcap": call.config.softcap, "is_backward": call.is_backward}
  if call.is_backward:
    options |= {"deterministic": call.config.deterministic, "wants": call.wants}

  def plan(operands: Operands) -> Derived | None:
    return MaskOperand(operands["slices"], call.known).tiles(backend, operands, **options)

  def serves(operands: Operands, part: Operands) -> bool:
    # A device that has only some heads of a group may need a list of other tiles.
    return _group(operands) == _group(part)

  def make(part: Operands) -> Derived:
    own = {"known": call.known, "has_float_grads": call.has_float_grads}
    tile_list, stamp = native.make_tiles(
      backend, part, call.group, **options, **own if call.is_backward else {}
    )
    return {"tile_list": tile_list}, {"tile_stamp": stamp}

  return DerivedOperand(plan, serves, make)


def _group(operands: Operands) -> int:
  """The number of query heads that share a kv head."""
  q, k = operands["q"], operands["k"]
  return int(q.shape[2] // k.shape[2])
