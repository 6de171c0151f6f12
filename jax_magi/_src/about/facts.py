"""The installed packages, the build, the devices, and the chosen implementations, as data."""

from __future__ import annotations

import dataclasses
import platform
import sys
from typing import Any

import jax
import jax.numpy as jnp

from jax_magi._src.native.backends import BACKENDS, default_platform
from jax_magi._src.version import __version__, version_of

# Packages whose versions belong in a bug report or beside a measurement, if they are installed.
_PACKAGES = (
  "jax",
  "jaxlib",
  "jax-cuda13-plugin",
  "jax-cuda12-plugin",
  "nvidia-cudnn-cu13",
  "nvidia-cudnn-cu12",
  "numpy",
  "flax",
  "optax",
)

_ATTENTION = (
  "attention",
  "flex_flash_attn_func",
  "dot_product_attention",
  "flax_attention_fn",
  "latent_attention",
  "calc_attn",
  "context_parallel_attention",
  "calc_latent_attn",
  "context_parallel_latent_attention",
)
_SOFTMAX = (
  "scaled_softmax",
  "scaled_masked_softmax",
  "scaled_upper_triang_masked_softmax",
  "fused_scale_mask_softmax",
  "FusedScaleMaskSoftmax",
)
_NO_KERNELS = f"there are kernels for {' and '.join(BACKENDS)} only"


@dataclasses.dataclass(frozen=True)
class Choice:
  """The implementation that some functions choose for some operands, if none is named.

  Attributes:
    functions: the names of the functions.
    operands: the operands in words.
    implementation: the name of the chosen implementation.
    reason: why no native kernel can be used; None if one is chosen.
  """

  functions: tuple[str, ...]
  operands: str
  implementation: str
  reason: str | None


def versions() -> dict[str, str]:
  """The versions of jax_magi, Python and related packages, and the commit of the build."""
  found = {package: version_of(package) for package in _PACKAGES}
  return {
    "jax_magi": __version__,
    "commit": commit(),
    "python": platform.python_version(),
    **{package: version for package, version in found.items() if version is not None},
  }


def commit() -> str:
  """The commit that the native modules were built from.

  It is "unknown" if there are no native modules, or if they were built from a source archive.
  """
  found = {b.module.COMMIT for b in BACKENDS.values() if b.module is not None}
  return " and ".join(sorted(found)) or "unknown"


def machine() -> str:
  """The operating system and the processor."""
  return f"{sys.platform} {platform.machine()}"


def devices() -> dict[str, list[str]]:
  """The kinds of devices that JAX sees, by platform; empty if JAX cannot start."""
  found = {}
  for name in dict.fromkeys((*BACKENDS, _default_platform())):
    try:
      found[name] = [_device_in_words(d) for d in jax.devices(name)] if name else []
    except RuntimeError:  # There is no device of this platform.
      found[name] = []
  return {name: kinds for name, kinds in found.items() if kinds}


def start_error() -> str | None:
  """JAX's message if it finds no device, or not those of JAX_PLATFORMS; None otherwise."""
  try:
    jax.devices()
  except RuntimeError as error:
    return str(error)
  return None


def _default_platform() -> str:
  return "" if start_error() else default_platform()


def _device_in_words(device: Any) -> str:
  capability = getattr(device, "compute_capability", None)
  cores = getattr(device, "core_count", None)
  details = [f"compute capability {capability}"] if capability else []
  details += [f"{cores} multiprocessors"] if capability and cores else []
  return f"{device.device_kind} ({', '.join(details)})" if details else device.device_kind


def choices(platform_name: str | None = None) -> list[Choice]:
  """The implementations that the public functions choose on a platform (JAX's default: None)."""
  name = platform_name or _default_platform()
  found = []
  for dtype, head_dim in (
    (jnp.bfloat16, 64),
    (jnp.bfloat16, 128),
    (jnp.bfloat16, 256),
    (jnp.float16, 128),
    (jnp.float32, 128),
    (jnp.bfloat16, 512),
  ):
    q = jax.ShapeDtypeStruct((1, 1024, 8, head_dim), dtype)
    words = f"{jnp.dtype(dtype).name}, head dim {head_dim}"
    found.append(_attention_choice(name, words, q))
  for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
    x = jax.ShapeDtypeStruct((1, 8, 1024, 1024), dtype)
    words = jnp.dtype(dtype).name
    found.append(_softmax_choice(name, words, x))
  return found


def _attention_choice(platform_name: str, operands: str, q: jax.ShapeDtypeStruct) -> Choice:
  backend = BACKENDS.get(platform_name)
  reason = _NO_KERNELS if backend is None else backend.attention_obstacle(q, q)
  if backend is None or reason is not None:
    return Choice(_ATTENTION, operands, "blockwise", reason)
  return Choice(_ATTENTION, operands, backend.for_attention(q, q).kernels, None)


def _softmax_choice(platform_name: str, operands: str, x: jax.ShapeDtypeStruct) -> Choice:
  backend = BACKENDS.get(platform_name)
  reason = _NO_KERNELS if backend is None else backend.softmax_obstacle(x)
  return Choice(_SOFTMAX, operands, platform_name if reason is None else "xla", reason)
