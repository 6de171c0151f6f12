"""The devices that have kernels, and all that Python has to know of each.

Each op has one FFI target name, and each device registers its handler under it for its platform.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_magi._src.arguments import check_choice, has_symbols


@dataclasses.dataclass(frozen=True)
class Devices:
  """Devices that kernels are built for: GPUs of some compute capabilities, or any device.

  Attributes:
    words: what they are.
    least: the least compute capability; None is any device.
    is_exact: whether kernels run on GPUs of that one alone.
  """

  words: str = "any device"
  least: tuple[int, int] | None = None
  is_exact: bool = False

  def has(self, compute_capability: str) -> bool:
    """Whether a GPU of this kind, as JAX names it, is among them."""
    major, minor = (int(x) for x in compute_capability.split("."))
    if self.least is None:
      return True
    return (major, minor) == self.least if self.is_exact else (major, minor) >= self.least

  def obstacle(self, platform: str) -> str | None:
    """Why kernels for these devices cannot be used here; None if they can.

    Some GPU must be among them: which of several a program will run on is not known when it is
    traced. Without any GPU, we may be exporting.
    """
    found = () if self.least is None else _compute_capabilities(platform)
    if not found or any(map(self.has, found)):
      return None
    return f"the kernels are for {self.words}, and there are {found}"


def _compute_capabilities(platform: str) -> tuple[str, ...]:
  """Those of the default device, if it is a GPU that was chosen, or else of all GPUs."""
  chosen = getattr(getattr(jax.default_device, "value", None), "compute_capability", None)
  if chosen is not None:
    return (chosen,)
  try:
    return tuple(sorted({d.compute_capability for d in jax.devices(platform)}))
  except RuntimeError:
    return ()


@dataclasses.dataclass(frozen=True)
class Backend:
  """The kernels for one kind of device.

  Attributes:
    platform: the platform, as JAX's lowering and our argument `implementation` name it.
    ffi_platform: the same platform, as the FFI's registry names it.
    module: what hands out the handlers, and answers `needs`; None if it was not built.
    architecture: the architecture of its attention kernels, as cc/architecture.h names it.
    attention_dtypes: element types that the attention kernels take.
    max_head_dim: the largest head dim that they take; None is no limit.
    head_dim_multiple: head dims are padded with zeros to a multiple of this.
    bias_multiple: a bias of 16-bit elements for each query has a multiple of so many keys.
    orders_dq_itself: whether a sum of dq over several calls has an order of the kernels' own, which
      a kernel undoes; else each head is `[q_len, head_dim]`.
    sums_bias_in_order: whether the gradient of a bias that batch rows or heads share, but queries
      do not, can be equal bit for bit from run to run.
    attention_devices: those that the attention kernels are for.
    softmax_devices: those that the softmax kernels are for.
    max_softmax_rows: the softmax kernels take fewer rows than this; None is no limit.
  """

  platform: str
  ffi_platform: str
  module: Any
  architecture: str = "none"
  attention_dtypes: tuple[Any, ...] = (jnp.float32, jnp.bfloat16, jnp.float16)
  max_head_dim: int | None = None
  head_dim_multiple: int = 1
  bias_multiple: int = 1
  orders_dq_itself: bool = False
  sums_bias_in_order: bool = True
  attention_devices: Devices = Devices()
  softmax_devices: Devices = Devices()
  max_softmax_rows: int | None = None

  def attention_obstacle(self, q: Any, v: Any, *, bias_in_order: Any = None) -> str | None:
    """Why the attention kernels cannot be used for these operands; None if they can.

    Args:
      q: `[..., num_q_heads, head_dim]`.
      v: `[..., value_dim]`.
      bias_in_order: a bias `[batch or 1, num_q_heads or 1, q_len or 1, k_len]` whose gradient is
        wanted, and must be equal bit for bit from run to run; None is none.
    """
    if self.module is None:
      return _NOT_BUILT
    dtypes = " and ".join(jnp.dtype(d).name for d in self.attention_dtypes)
    if q.dtype not in self.attention_dtypes:
      return f"the kernels take {dtypes}, not {q.dtype}"
    dims = q.shape[-1], v.shape[-1]
    if self.max_head_dim is not None and max(dims) > self.max_head_dim:
      return f"the kernels take head dims up to {self.max_head_dim}, not {dims[0]} and {dims[1]}"
    if bias_in_order is not None and not self.sums_bias_in_order:
      batch, heads, rows, _ = bias_in_order.shape
      if rows > 1 and (batch, heads) != (q.shape[0], q.shape[2]):
        return (
          "the kernels have no deterministic gradient of a bias that batch rows or heads share "
          "and queries do not"
        )
    return self._device_obstacle(self.attention_devices) or self._build_obstacle(q, dims)

  def softmax_obstacle(self, x: Any) -> str | None:
    """Why the softmax kernels cannot be used for `x`; None if they can."""
    if self.module is None:
      return _NOT_BUILT
    if x.dtype not in _SOFTMAX_DTYPES:
      return f"the kernels take float32, bfloat16 and float16, not {x.dtype}"
    if has_symbols(x.shape):
      return f"the kernels take arrays of known size, not the symbolic {list(x.shape)}"
    num_rows = x.size // max(x.shape[-1], 1)
    if self.max_softmax_rows is not None and num_rows >= self.max_softmax_rows:
      return f"the kernels take fewer than {self.max_softmax_rows} rows, not {num_rows}"
    return self._device_obstacle(self.softmax_devices)

  def has_attention_device(self) -> bool:
    """Whether the GPUs that are there, if any, run the kernels that are not softmax."""
    return self._device_obstacle(self.attention_devices) is None

  def _device_obstacle(self, devices: Devices) -> str | None:
    if self.module is None:
      return _NOT_BUILT
    return devices.obstacle(self.platform)

  def _build_obstacle(self, q: Any, dims: tuple[int, int]) -> str | None:
    """Of a build with some of the kernels: whether those for these dims are among them."""
    if not self.module.LEFT_OUT:
      return None
    names = [name.split() for name in self.module.variants()[f"attention {self.architecture}"]]
    built = {name: _dims_of(name) for name, dtype in names if dtype == q.dtype.name}

    def has_larger(than: tuple[int, int]) -> bool:
      return any(
        than != both and than[0] <= both[0] and than[1] <= both[1] for both in built.values()
      )

    if dims in built.values() or has_larger(dims):
      return None
    largest = [name for name, both in built.items() if not has_larger(both)]
    has = f"head dims up to {' and '.join(largest)} alone" if built else "none"
    return f"kernels were left out of this build: of {q.dtype.name} it has {has}"


def _dims_of(name: str) -> tuple[int, int]:
  """Head dims of keys and of values: "192/128", or "128" where they are the same."""
  first, _, second = name.partition("/")
  return int(first), int(second or first)


def _import(name: str) -> Any:
  try:
    return importlib.import_module(f"jax_magi._src.native.{name}")
  except ModuleNotFoundError:  # It was built without nvcc.
    return None


_NOT_BUILT = "this build of jax_magi has no kernels for it"
_SOFTMAX_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

CPU = Backend("cpu", "cpu", _import("_cpu"))
HOPPER = Backend(
  "cuda",
  "CUDA",
  _import("_cuda"),
  architecture="sm90",
  attention_dtypes=(jnp.bfloat16, jnp.float16),
  max_head_dim=256,
  head_dim_multiple=8,  # TMA moves rows in units of 16 bytes.
  bias_multiple=8,  # Likewise.
  orders_dq_itself=True,
  sums_bias_in_order=False,
  attention_devices=Devices("Hopper GPUs (compute capability 9.0)", (9, 0), is_exact=True),
  # Newer ones than those that they were compiled for compile them from PTX.
  softmax_devices=Devices("GPUs of compute capability 8.0 and later", (8, 0)),
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
  # Attention takes "xla" for its plain path, too.
  choices = dict.fromkeys((None, *BACKENDS, plain, "xla"))
  check_choice("implementation", implementation, tuple(choices))
  reason = obstacle(BACKENDS[implementation]) if implementation in BACKENDS else None
  if reason is not None:
    raise NotImplementedError(
      f"implementation={implementation!r} cannot be used: {reason}; "
      f"implementation=None or {plain!r} takes everything"
    )


def log_fallback(operation: str, plain: str, obstacle: Callable[[Backend], str | None]) -> None:
  """Says once, for each reason, that calls take the plain path where there might be a kernel."""
  backend = BACKENDS.get(default_platform())
  reason = obstacle(backend) if backend is not None else None
  if reason is not None:
    _log_once(
      f"{operation} takes the plain path ({plain!r}), which is slower than the kernels of "
      f"{default_platform()}: {reason}"
    )


@functools.cache
def _log_once(text: str) -> None:
  logging.getLogger("jax_magi").warning("%s", text)


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
