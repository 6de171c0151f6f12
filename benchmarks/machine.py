"""Prints the properties of the machine that figures depend on, as JSON."""

from __future__ import annotations

import json
import os

import jax

from jax_magi._src.about import facts


def describe() -> dict:
  """The devices, the versions, the commit of the kernels, and the options of XLA."""
  versions = facts.versions()
  return {
    "platform": jax.default_backend(),
    "devices": facts.devices(),
    "machine": facts.machine(),
    "num_cpus": os.cpu_count(),
    "commit": versions.pop("commit"),
    "versions": versions,
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }


if __name__ == "__main__":
  print(json.dumps(describe()))
