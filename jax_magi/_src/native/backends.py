"""The backends: the platforms that have kernels, and what their kernels support.

Each op has one FFI target name. Each backend registers its handler under that name.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_magi._src.arguments import check_choice, has_symbols


@dataclasses.dataclass(frozen=True)
class Devices:
  """The devices that kernels run on: GPUs of some compute capabilities, or any device.

  Attributes:
    words: a description of the devices.
    least: the lowest compute capability; None for any device.
    is_exact: whether the kernels run only on GPUs of exactly that compute capability.
  """

  words: str = "any device"
  least: tuple[int, int] | None = None
  is_exact: bool = False

  def has(self, compute_capability: str) -> bool:
    """Whether a GPU of this compute capability is one of them."""
    major, minor = (int(x) for x in compute_capability.split("."))
    if self.least is None:
      return True
    return (major, minor) == self.least if self.is_exact else (major, minor) >= self.least

  def obstacle(self, platform: str) -> str | None:
    """Why kernels for these devices cannot be used here; None if they can.

    At least one GPU must be suitable: which GPU a program runs on is unknown when it is traced. If
    there is no GPU, the program may be for export, so nothing prevents it.
    """
    found = () if self.least is None else _compute_capabilities(platform)
    if not found or any(map(self.has, found)):
      return None
    here = ", ".join(found)
    return f"the kernels are for {self.words}, but the GPUs here have compute capability {here}"


def _compute_capabilities(platform: str) -> tuple[str, ...]:
  """The compute capability of JAX's default device, if that is set to a GPU, or of all GPUs."""
  chosen: Any = getattr(jax.default_device, "value", None)
  try:
    is_gpu = hasattr(chosen, "compute_capability")
    devices: list[Any] = [chosen] if is_gpu else jax.devices(platform)
  except RuntimeError:
    return ()
  return tuple(sorted({d.compute_capability for d in devices if hasattr(d, "compute_capability")}))


@dataclasses.dataclass(frozen=True)
class Architecture:
  """The attention kernels of a backend for some devices.

  Attributes:
    name: the name of the architecture, as in `cc/architecture.h`.
    devices: the devices that run the kernels.
    bias_multiple: a bias of 16-bit elements with a row for each query must have a multiple of this
      number of keys.
  """

  name: str = "none"
  devices: Devices = Devices()
  bias_multiple: int = 1


@dataclasses.dataclass(frozen=True)
class Backend:
  """The kernels for one kind of device.

  Attributes:
    platform: the name of the platform in JAX's lowering and in the argument `implementation`.
    ffi_platform: the name of the platform in the FFI's registry.
    module: the extension module with the handlers and `attention_needs`; None if it was not built.
    architectures: the architectures that have attention kernels, the best one first.
    attention_dtypes: the dtypes that the attention kernels take.
    max_head_dim: the largest head dim that they take; None for no limit.
    head_dim_multiple: head dims are padded with zeros to a multiple of this number.
    orders_dq_itself: True if the kernels store a sum of dq over several calls in an order of their
      own, which another kernel undoes. False if each head is `[q_len, head_dim]`.
    sums_bias_in_order: whether the gradient of a bias that batch rows or heads share, but queries
      do not, can be bitwise equal from run to run.
    softmax_devices: the devices that run the softmax kernels.
    max_softmax_rows: the number of rows must be below this for softmax; None for no limit.
  """

  platform: str
  ffi_platform: str
  module: Any
  architectures: tuple[Architecture, ...] = (Architecture(),)
  attention_dtypes: tuple[Any, ...] = (jnp.float32, jnp.bfloat16, jnp.float16)
  max_head_dim: int | None = None
  head_dim_multiple: int = 1
  orders_dq_itself: bool = False
  sums_bias_in_order: bool = True
  softmax_devices: Devices = Devices()
  max_softmax_rows: int | None = None

  def named(self, implementation: str) -> Backend | None:
    """This backend, reduced to the architecture that is named, if any; None for another name."""
    if implementation == self.platform:
      return self
    kept = tuple(a for a in self.architectures if self.name_of(a) == implementation)
    return dataclasses.replace(self, architectures=kept) if kept else None

  def name_of(self, architecture: Architecture) -> str:
    """The name of an architecture's attention kernels in the argument `implementation`."""
    if architecture.name == "none":
      return self.platform
    return f"{self.platform}_{architecture.name}"

  @property
  def architecture(self) -> Architecture:
    """The architecture, after one was chosen."""
    (architecture,) = self.architectures
    return architecture

  def for_attention(self, q: Any, v: Any) -> Backend:
    """This backend, reduced to the architecture whose attention kernels the call uses.

    It is the best one that runs on all GPUs on which the program may run, or on some of them if
    none runs on all. Call this only if `attention_obstacle` is None: then there is one.
    """
    dims = q.shape[-1], v.shape[-1]
    usable = [a for a in self.architectures if self._architecture_obstacle(a, q, dims) is None]
    found = _compute_capabilities(self.platform)
    on_all = [a for a in usable if all(map(a.devices.has, found))]
    return dataclasses.replace(self, architectures=((on_all or usable)[0],))

  @property
  def kernels(self) -> str:
    """The name of the kernels in `implementation`: of the architecture, if one was chosen."""
    return self.platform if len(self.architectures) > 1 else self.name_of(self.architecture)

  def why_this_architecture(self) -> str:
    """A note that explains the choice of the architecture."""
    found = _compute_capabilities(self.platform)
    if not found:
      return f"{self.kernels} has the best kernels, and JAX sees no {self.platform} device to check"
    some = "all" if all(map(self.architecture.devices.has, found)) else "some"
    gpus = f"{some} GPUs here (compute capability {', '.join(found)})"
    return f"{self.kernels} has the best kernels that run on {gpus}"

  def attention_obstacle(self, q: Any, v: Any, *, bias_in_order: Any = None) -> str | None:
    """Why the attention kernels cannot be used for these operands; None if they can.

    Args:
      q: `[..., num_q_heads, head_dim]`.
      v: `[..., value_dim]`.
      bias_in_order: a bias `[batch or 1, num_q_heads or 1, q_len or 1, k_len]` whose gradient must
        be bitwise equal from run to run. None if there is no such bias.
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
          "but queries do not"
        )
    reasons = [self._architecture_obstacle(a, q, dims) for a in self.built_architectures()]
    return None if None in reasons else reasons[-1]  # The last architecture covers most devices.

  def softmax_obstacle(self, x: Any) -> str | None:
    """Why the softmax kernels cannot be used for `x`; None if they can be used."""
    if self.module is None:
      return _NOT_BUILT
    if x.dtype not in _SOFTMAX_DTYPES:
      return f"the kernels take float32, bfloat16 and float16, not {x.dtype}"
    if has_symbols(x.shape):
      return f"the kernels take arrays of known size, not of symbolic shape {list(x.shape)}"
    num_rows = x.size // max(x.shape[-1], 1)
    if self.max_softmax_rows is not None and num_rows >= self.max_softmax_rows:
      return f"the kernels take fewer than {self.max_softmax_rows} rows, not {num_rows}"
    return self._device_obstacle(self.softmax_devices)

  def has_attention_device(self) -> bool:
    """Whether the GPUs here, if any, run attention kernels."""
    if self.module is None:
      return False
    return any(a.devices.obstacle(self.platform) is None for a in self.built_architectures())

  def shared_memory_bytes(self) -> int:
    """The shared memory that a CTA may use on all GPUs that may run the chosen architecture.

    The environment variable JAX_MAGI_SHARED_MEMORY_KB lowers it. The kernels then use the tiles for
    GPUs with less shared memory.
    """
    if self.architecture.devices.least is None:  # The device is no GPU.
      return 0
    found = _compute_capabilities(self.platform)
    running = [x for x in found if self.architecture.devices.has(x)]
    # For 0, `shared_memory_of` returns the minimum over all GPUs.
    numbers = [int(x.replace(".", "")) for x in running] or [0]
    least: int = min(map(self.module.shared_memory_of, numbers))
    return min(least, _shared_memory_cap())

  def built_architectures(self) -> tuple[Architecture, ...]:
    """The architectures that this build has kernels for; all, if it has kernels for none."""
    kept = tuple(a for a in self.architectures if self._variants(a) is not None)
    return kept or self.architectures

  def _architecture_obstacle(
    self, architecture: Architecture, q: Any, dims: tuple[int, int]
  ) -> str | None:
    reason = architecture.devices.obstacle(self.platform)
    return reason or self._build_obstacle(architecture, q, dims)

  def _device_obstacle(self, devices: Devices) -> str | None:
    if self.module is None:
      return _NOT_BUILT
    return devices.obstacle(self.platform)

  def _variants(self, architecture: Architecture) -> list[str] | None:
    """The attention kernels of this build, such as "128 bfloat16"; None if there are none."""
    if architecture.name == "none":
      return []
    found: list[str] | None = self.module.variants().get(f"attention {architecture.name}")
    return found

  def _build_obstacle(
    self, architecture: Architecture, q: Any, dims: tuple[int, int]
  ) -> str | None:
    """Why this build has no kernels for these head dims; None if it has them."""
    if architecture.name == "none":
      return None
    variants = self._variants(architecture)
    if variants is None:
      return f"this build of jax_magi has no kernels for {architecture.devices.words}"
    names = [name.split() for name in variants]
    built = {name: _dims_of(name) for name, dtype in names if dtype == q.dtype.name}

    def has_larger(than: tuple[int, int]) -> bool:
      return any(
        than != both and than[0] <= both[0] and than[1] <= both[1] for both in built.values()
      )

    if dims in built.values() or has_larger(dims):
      return None
    largest = [name for name, both in built.items() if not has_larger(both)]
    has = f"only head dims up to {' and '.join(largest)}" if built else "none"
    return f"kernels were left out of this build: for {q.dtype.name} it has {has}"


def _shared_memory_cap() -> int:
  text = os.environ.get(_SHARED_MEMORY_KB)
  if text is None:
    return sys.maxsize
  if not text.isdecimal() or int(text) < _LEAST_SHARED_MEMORY_KB:
    raise ValueError(
      f"{_SHARED_MEMORY_KB} must be a number of at least {_LEAST_SHARED_MEMORY_KB}, got {text!r}"
    )
  return int(text) << 10


def _dims_of(name: str) -> tuple[int, int]:
  """The head dims of keys and of values from "192/128", or from "128" if they are equal."""
  first, _, second = name.partition("/")
  return int(first), int(second or first)


def _import(name: str) -> Any:
  try:
    return importlib.import_module(f"jax_magi._src.native.{name}")
  except ModuleNotFoundError:  # This build has no CUDA kernels.
    return None


_NOT_BUILT = "this build of jax_magi has no kernels for this platform"
_SOFTMAX_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_SHARED_MEMORY_KB = "JAX_MAGI_SHARED_MEMORY_KB"
_LEAST_SHARED_MEMORY_KB = 99  # See `cc/architecture.h`.

CPU = Backend("cpu", "cpu", _import("_cpu"))
CUDA = Backend(
  "cuda",
  "CUDA",
  _import("_cuda"),
  architectures=(
    Architecture(
      "sm90",
      Devices("Hopper GPUs (compute capability 9.0)", (9, 0), is_exact=True),
      bias_multiple=8,  # TMA moves rows in units of 16 bytes.
    ),
    # GPUs that are newer than the compiled kernels compile them from PTX.
    Architecture("sm80", Devices("GPUs of compute capability 8.0 and later", (8, 0))),
  ),
  attention_dtypes=(jnp.bfloat16, jnp.float16),
  max_head_dim=256,
  head_dim_multiple=8,  # The kernels move rows in units of 16 bytes.
  orders_dq_itself=True,
  sums_bias_in_order=False,
  softmax_devices=Devices("GPUs of compute capability 8.0 and later", (8, 0)),
  max_softmax_rows=2**31,
)

BACKENDS = {backend.platform: backend for backend in (CPU, CUDA)}

for _backend in BACKENDS.values():
  if _backend.module is not None:
    for _name, _handler in _backend.module.handlers().items():
      jax.ffi.register_ffi_target(_name, _handler, platform=_backend.ffi_platform)


def candidates(implementation: str | None) -> dict[str, Backend]:
  """The backends that a call may use, by platform: the one that is named, or all."""
  if implementation is None:
    return dict(BACKENDS)
  named = {platform: backend.named(implementation) for platform, backend in BACKENDS.items()}
  return {platform: backend for platform, backend in named.items() if backend is not None}


def check_implementation(
  implementation: Any,
  plain: str,
  obstacle: Callable[[Backend], str | None],
  *,
  has_architectures: bool = False,
) -> None:
  """Checks that `implementation` is None, the plain path, or a backend that takes the operands.

  Args:
    implementation: the caller's argument.
    plain: the name of the plain path.
    obstacle: why a backend cannot be used; None if it can.
    has_architectures: whether `implementation` may name one of a backend's architectures.
  """
  names = list(BACKENDS)
  if has_architectures:
    names = [n for b in BACKENDS.values() for n in (b.platform, *map(b.name_of, b.architectures))]
  # Attention accepts "xla" as another name of its plain path.
  check_choice("implementation", implementation, tuple(dict.fromkeys((None, *names, plain, "xla"))))
  if implementation not in names:
    return
  (backend,) = candidates(implementation).values()
  reason = obstacle(backend)
  if reason is not None:
    raise NotImplementedError(
      f"implementation={implementation!r} cannot be used: {reason}; "
      f"implementation=None and implementation={plain!r} support all operands"
    )


def log_fallback(operation: str, plain: str, obstacle: Callable[[Backend], str | None]) -> None:
  """Logs once, for each reason, that calls use the plain path although the platform has kernels."""
  backend = BACKENDS.get(default_platform())
  reason = obstacle(backend) if backend is not None else None
  if reason is not None:
    _log_once(
      f"{operation} uses the plain path ({plain!r}), which is slower than the kernels for "
      f"{default_platform()}: {reason}"
    )


@functools.cache
def _log_once(text: str) -> None:
  logging.getLogger("jax_magi").warning("%s", text)


def num_multiprocessors() -> int | None:
  """The number of SMs of the first GPU; None if there is no GPU, or JAX does not know."""
  try:
    devices = jax.devices(CUDA.platform)
  except RuntimeError:
    return None
  return getattr(devices[0], "core_count", None)


def default_platform() -> str:
  """JAX's default platform, under its name in `implementation`."""
  name = jax.default_backend()
  return CUDA.platform if name == "gpu" else name
