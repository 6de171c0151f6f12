import gc
import os
from pathlib import Path

import pytest

from tests.machine import HAS_GPU

_ROOT = Path(__file__).resolve().parent.parent

# Must be set before JAX starts. Several CPU devices, for the sharding tests; and where there are
# only CPUs, XLA compiles as fast as it can: programs run once, and our kernels are not its own.
_FLAGS = ["--xla_force_host_platform_device_count=8"]
if not HAS_GPU:
  _FLAGS += [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
  ]
os.environ.setdefault("XLA_FLAGS", " ".join(_FLAGS))
# Tests run on all cores already: NumPy's threads would only be in their way.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_configure():
  """Strict modes of JAX, and a cache of compiled programs."""
  import jax

  # The package promotes neither ranks nor dtypes behind its users' backs.
  jax.config.update("jax_numpy_rank_promotion", "raise")
  jax.config.update("jax_numpy_dtype_promotion", "strict")
  if not HAS_GPU:
    # Kept between runs: the next run of test_transforms.py took a fifth less.
    jax.config.update("jax_compilation_cache_dir", str(_ROOT / "build" / "compiled_tests"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  # Tracing makes many objects that live long. Looking for garbage among them took 6% of the time.
  gc.set_threshold(200_000, 100, 1_000)


def pytest_collection_finish():
  """What has been imported stays."""
  gc.freeze()


def pytest_collection_modifyitems(items):
  """Tests that need a GPU are skipped, by name, where there is none."""
  import jax

  if any(d.platform == "gpu" for d in jax.devices()):
    return
  for item in items:
    if item.get_closest_marker("gpu"):
      item.add_marker(pytest.mark.skip(reason="needs an NVIDIA Hopper GPU"))


@pytest.fixture
def with_promotion():
  """For tests of code of others, such as Optax's, which needs the promotion."""
  from tests.compilation import promotion

  with promotion():
    yield
