import os

# Several CPU devices, for the sharding tests; must be set before JAX starts.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")


def pytest_collection_modifyitems(items):
  """Tests that need a GPU are skipped, by name, where there is none."""
  import jax
  import pytest

  if any(d.platform == "gpu" for d in jax.devices()):
    return
  for item in items:
    if item.get_closest_marker("gpu"):
      item.add_marker(pytest.mark.skip(reason="needs an NVIDIA Hopper GPU"))
