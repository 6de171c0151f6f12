"""The command line: `python -m jax_magi`."""

from __future__ import annotations

import argparse
import itertools
import textwrap
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_magi._src.about import facts
from jax_magi._src.native.backends import BACKENDS, Backend, default_platform


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the report, and returns the exit status: 0, or 1 if JAX finds no device."""
  argparse.ArgumentParser(
    prog="python -m jax_magi",
    description="Reports which kernels this installation of jax_magi has, which devices JAX sees, "
    "and which implementation each function chooses on them.",
    epilog="Exit status: 0, or 1 if JAX finds no device.",
  ).parse_args(arguments)
  error = facts.start_error()
  print(report(error))
  return 1 if error else 0


def report(error: str | None = None) -> str:
  """The text of the report. `error` is JAX's message if it finds no device."""
  sections = [_versions(), _devices(error), _kernels()]
  if error is None:
    sections.append(_choices())
  return "\n\n".join(sections)


def _versions() -> str:
  versions = facts.versions()
  head = f"jax_magi {versions.pop('jax_magi')}, built from commit {versions.pop('commit')}"
  words = [f"{name} {version}" for name, version in versions.items()]
  return "\n".join([head, *_wrapped("  ", [facts.machine(), *words])])


def _devices(error: str | None) -> str:
  if error is not None:
    return f"devices: JAX finds none. Its message:\n{textwrap.indent(error, '  ')}"
  lines = [f"devices: JAX's default platform is {default_platform()}"]
  for name, kinds in facts.devices().items():
    lines += [f"  {name}: {count} x {kind}" for kind, count in Counter(kinds).items()]
  return "\n".join(lines)


def _kernels() -> str:
  seen = facts.devices()
  lines = ["kernels of this build"]
  for name, backend in BACKENDS.items():
    lines += _kernels_of(name, backend)
    if backend.module is not None and name not in seen:
      lines.append(f"    JAX sees no {name} device: these kernels can be exported but not run here")
  return "\n".join(lines)


def _kernels_of(name: str, backend: Backend) -> list[str]:
  if backend.module is None:
    return [f"  {name}: none (README.md, Install, shows how to build them)"]
  compiled = f"compiled by {backend.module.COMPILER}"
  if all(a.devices == backend.softmax_devices for a in backend.architectures):
    lines = [f"  {name}: for {backend.softmax_devices.words}, {compiled}"]
  else:
    lines = _wrapped("  ", compiled.split(", "), f"{name}: ")
    for architecture in backend.built_architectures():
      lines.append(f"    attention {architecture.name} is for {architecture.devices.words}")
    lines.append(f"    softmax is for {backend.softmax_devices.words}")
    q = jax.ShapeDtypeStruct((1, 1024, 8, 64), jnp.bfloat16)
    if name in facts.devices() and backend.attention_obstacle(q, q) is None:
      lines.append(f"    {backend.for_attention(q, q).why_this_architecture()}")
  for what, variants in backend.module.variants().items():
    lines += _wrapped("    ", variants, f"{what}: ")
  if backend.module.LEFT_OUT:
    left_out = backend.module.LEFT_OUT.split(", ")
    lines += _wrapped("    ", left_out, "attention, left out of this build: ")
  return lines


def _choices() -> str:
  lines = ["implementations that calls use on this platform, if implementation=None"]
  for functions, group in itertools.groupby(facts.choices(), key=lambda choice: choice.functions):
    lines += _wrapped("  ", functions)
    for choice in group:
      where = f"native kernel ({choice.implementation})"
      if choice.reason is not None:
        where = f'"{choice.implementation}", plain JAX: {choice.reason}'
      lines.append(f"    {choice.operands:<24}{where}")
  return "\n".join(lines)


def _wrapped(indent: str, words: Sequence[str], start: str = "") -> list[str]:
  text = start + ", ".join(word.replace(" ", "\0") for word in words)  # Do not break inside a word.
  lines = textwrap.wrap(
    text, 100, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
  )
  return [line.replace("\0", " ") for line in lines]
