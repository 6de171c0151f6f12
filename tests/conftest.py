import os

from tests.machine import HAS_GPU

# Must be set before JAX starts. Several CPU devices, for the sharding tests; and where only CPUs
# are, XLA compiles for a short time: programs are run once, and our kernels are not its own.
_FLAGS = ["--xla_force_host_platform_device_count=8"]
if not HAS_GPU:
  _FLAGS += ["--xla_backend_optimization_level=0"]
os.environ.setdefault("XLA_FLAGS", " ".join(_FLAGS))


def pytest_collection_modifyitems(items):
  """Tests that need a GPU are skipped, by name, where there is none."""
  import jax
  import pytest

  if any(d.platform == "gpu" for d in jax.devices()):
    return
  for item in items:
    if item.get_closest_marker("gpu"):
      item.add_marker(pytest.mark.skip(reason="needs an NVIDIA Hopper GPU"))
