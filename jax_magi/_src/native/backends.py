"""The devices that have kernels, and all that Python has to know of each.

Each op has one FFI target name, and each device registers its handler under it for its platform.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_magi._src.arguments import check_choice, has_symbols


@dataclasses.dataclass(frozen=True)
class Backend:
  """The kernels for one kind of device.

  Attributes:
    platform: the platform, as JAX's lowering and our argument `implementation` name it.
    ffi_platform: the same platform, as the FFI's registry names it.
    module: what hands out the handlers, and answers `needs`; None if it was not built.
    attention_dtypes: element types that the attention kernels take.
    max_head_dim: the largest head dim that they take; None is no limit.
    max_head_dim_with_terms: the same, for calls with a bias or ALiBi slopes.
    offers_terms: whether such calls take the kernels without being told to.
    head_dim_multiple: head dims are padded with zeros to a multiple of this.
    bias_multiple: a bias of 16-bit elements for each query has a multiple of so many keys.
    sums_bias_in_order: whether the gradient of a bias that batch rows or heads share, but queries
      do not, can be equal bit for bit from run to run.
    compute_capability: that of the GPUs for which the kernels are built; None is any device.
    devices: those devices, in words.
    max_softmax_rows: the softmax kernels take fewer rows than this; None is no limit.
  """

  platform: str
  ffi_platform: str
  module: Any
  attention_dtypes: tuple[Any, ...] = (jnp.float32, jnp.bfloat16, jnp.float16)
  max_head_dim: int | None = None
  max_head_dim_with_terms: int | None = None
  offers_terms: bool = True
  head_dim_multiple: int = 1
  bias_multiple: int = 1
  sums_bias_in_order: bool = True
  compute_capability: str | None = None
  devices: str = "any device"
  max_softmax_rows: int | None = None

  def attention_obstacle(
    self, q: Any, v: Any, *, has_terms: bool = False, bias_in_order: Any = None
  ) -> str | None:
    """Why the attention kernels cannot be used for these operands; None if they can.

    Args:
      q: `[..., num_q_heads, head_dim]`.
      v: `[..., value_dim]`.
      has_terms: whether there is a bias or ALiBi slopes.
      bias_in_order: a bias `[batch or 1, num_q_heads or 1, q_len or 1, k_len]` whose gradient is
        wanted, and must be equal bit for bit from run to run; None is none.
    """
    dtypes = " and ".join(jnp.dtype(d).name for d in self.attention_dtypes)
    if q.dtype not in self.attention_dtypes:
      return f"the kernels take {dtypes}, not {q.dtype}"
    dims = q.shape[-1], v.shape[-1]
    if self.max_head_dim is not None and max(dims) > self.max_head_dim:
      return f"the kernels take head dims up to {self.max_head_dim}, not {dims[0]} and {dims[1]}"
    limit = self.max_head_dim_with_terms
    if has_terms and limit is not None and max(dims) > limit:
      return (
        f"with a bias or ALiBi slopes the kernels take head dims up to {limit}, "
        f"not {dims[0]} and {dims[1]}"
      )
    if bias_in_order is not None and not self.sums_bias_in_order:
      batch, heads, rows, _ = bias_in_order.shape
      if rows > 1 and (batch, heads) != (q.shape[0], q.shape[2]):
        return (
          "the kernels have no deterministic gradient of a bias that batch rows or heads share "
          "and queries do not"
        )
    return self._device_obstacle()

  def softmax_obstacle(self, x: Any) -> str | None:
    """Why the softmax kernels cannot be used for `x`; None if they can."""
    if x.dtype not in _SOFTMAX_DTYPES:
      return f"the kernels take float32, bfloat16 and float16, not {x.dtype}"
    if has_symbols(x.shape):
      return f"the kernels take arrays of known size, not the symbolic {list(x.shape)}"
    num_rows = x.size // max(x.shape[-1], 1)
    if self.max_softmax_rows is not None and num_rows >= self.max_softmax_rows:
      return f"the kernels take fewer than {self.max_softmax_rows} rows, not {num_rows}"
    return self._device_obstacle()

  def _device_obstacle(self) -> str | None:
    if self.module is None:
      return "this build of jax_magi has no kernels for it"
    others = self._other_devices()
    return f"the kernels are for {self.devices}, and there are {others}" if others else None

  @functools.cache  # noqa: B019 (there are as many backends as lines below)
  def _other_devices(self) -> tuple[str, ...]:
    """What GPUs of another generation are there. Without any GPU, we may be exporting."""
    if self.compute_capability is None:
      return ()
    try:
      devices = jax.devices(self.platform)
    except RuntimeError:
      return ()
    others = tuple(sorted({d.compute_capability for d in devices} - {self.compute_capability}))
    if others:
      warnings.warn(
        f"jax_magi's kernels for {self.platform} are for {self.devices}, and there are "
        f"{others}: plain JAX is used instead, which is slower",
        stacklevel=2,
      )
    return others


def _import(name: str) -> Any:
  try:
    return importlib.import_module(f"jax_magi._src.native.{name}")
  except ModuleNotFoundError:  # It was built without nvcc.
    return None


_SOFTMAX_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

CPU = Backend("cpu", "cpu", _import("_cpu"))
HOPPER = Backend(
  "cuda",
  "CUDA",
  _import("_cuda"),
  attention_dtypes=(jnp.bfloat16, jnp.float16),
  max_head_dim=256,
  max_head_dim_with_terms=128,
  # The tests with more tiles than multiprocessors (tests/test_bias_cuda.py) have not been run yet.
  # Until they have passed, only who names these kernels gets them.
  offers_terms=False,
  head_dim_multiple=8,  # TMA moves rows in units of 16 bytes.
  bias_multiple=8,  # Likewise.
  sums_bias_in_order=False,
  compute_capability="9.0",
  devices="Hopper GPUs (compute capability 9.0)",
  max_softmax_rows=2**31,
)

BACKENDS = {backend.platform: backend for backend in (CPU, HOPPER)}

for _backend in BACKENDS.values():
  if _backend.module is not None:
    for _name, _handler in _backend.module.handlers().items():
      jax.ffi.register_ffi_target(_name, _handler, platform=_backend.ffi_platform)


def check_implementation(
  implementation: Any, plain: str, obstacle: Callable[[Backend], str | None]
) -> None:
  """Raises unless `implementation` is None, the plain path, or a backend that takes the operands.

  Args:
    implementation: the caller's argument.
    plain: the name of the plain path.
    obstacle: why a backend cannot be used; None if it can.
  """
  check_choice("implementation", implementation, (None, *BACKENDS, plain))
  reason = obstacle(BACKENDS[implementation]) if implementation in BACKENDS else None
  if reason is not None:
    raise NotImplementedError(
      f"implementation={implementation!r} cannot be used: {reason}; "
      f"implementation=None or {plain!r} takes everything"
    )


def num_multiprocessors() -> int | None:
  """Of a GPU, if JAX sees one and says so."""
  try:
    devices = jax.devices(HOPPER.platform)
  except RuntimeError:
    return None
  return getattr(devices[0], "core_count", None)


def default_platform() -> str:
  """The platform of JAX's default devices, as `implementation` names it."""
  name = jax.default_backend()
  return HOPPER.platform if name == "gpu" else name
