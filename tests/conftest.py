import collections
import gc
import os
from pathlib import Path

import pytest

from tests.machine import HAS_GPU, QUICK_FLAGS, choose_architecture

_ROOT = Path(__file__).resolve().parent.parent

# These must be set before JAX starts. The sharding tests need several CPU devices. On machines
# without a GPU, XLA skips most optimizations: test programs run only once or a few times, and XLA
# does not compile our kernels.
_FLAGS = ["--xla_force_host_platform_device_count=8"]
if not HAS_GPU:
  _FLAGS += QUICK_FLAGS
os.environ.setdefault("XLA_FLAGS", " ".join(_FLAGS))
# Several test processes already keep all cores busy, so NumPy's threads would only slow them down.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_configure():
  """Turns on JAX's strict promotion modes and its cache of programs, and chooses kernels."""
  import jax

  # Implicit promotion of ranks or dtypes is an error: the package must work in users' strict modes.
  jax.config.update("jax_numpy_rank_promotion", "raise")
  jax.config.update("jax_numpy_dtype_promotion", "strict")
  # Source locations in the programs took 5% of the time.
  jax.config.update("jax_traceback_in_locations_limit", 0)
  if not HAS_GPU:
    # The cache is kept between runs. It made the second run of test_transforms.py a fifth shorter.
    jax.config.update("jax_compilation_cache_dir", str(_ROOT / "build" / "compiled_tests"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  choose_architecture()
  # Tracing creates many long-lived objects. With Python's default thresholds, the garbage collector
  # took 6% of the time to go through them.
  gc.set_threshold(200_000, 100, 1_000)


def pytest_collection_finish():
  """Exempts everything imported so far from garbage collection."""
  gc.freeze()


@pytest.hookimpl(trylast=True)  # What `-k` and `-m` leave out is gone by then.
def pytest_collection_modifyitems(config, items):
  """Without a GPU, skips tests marked `gpu`: the first of each file, which stands for the others.

  There are thousands, and each skip takes two milliseconds.
  """
  import jax

  if any(d.platform == "gpu" for d in jax.devices()):
    return
  kept, others = [], []
  first_of = {}
  for item in items:
    needs_gpu = item.get_closest_marker("gpu") is not None
    stands_behind = needs_gpu and first_of.setdefault(item.path, item) is not item
    (others if stands_behind else kept).append(item)
  counts = collections.Counter(item.path for item in others)
  for path, item in first_of.items():
    more = f", as do {counts[path]} more tests of the file" if counts[path] else ""
    item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU{more}"))
  items[:] = kept
  config.hook.pytest_deselected(items=others)


@pytest.fixture
def with_promotion():
  """Allows implicit promotion, for tests that call packages which rely on it, such as Optax."""
  from tests.compilation import promotion

  with promotion():
    yield


@pytest.fixture
def without_kept_programs():
  """Compiles everything anew and keeps nothing, for tests that observe the compilation."""
  import jax

  name = "jax_persistent_cache_min_compile_time_secs"
  before = getattr(jax.config, name)
  jax.config.update(name, 1e9)
  yield
  jax.config.update(name, before)
