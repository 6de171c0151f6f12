"""What can be said of the machine, and asked of XLA, before JAX starts; and of its kernels."""

import os
from pathlib import Path

from jaxlib.version import __version_info__

# Whether the machine has an NVIDIA GPU, even if JAX does not use it.
HAS_GPU = Path("/dev/nvidiactl").exists()

# With these XLA flags, programs for CPUs compile in less time, and run slower.
QUICK_FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
# XLA ends the process if it does not know a flag. Later versions of jaxlib lack the first of these
# flags, and the second was not tried with them.
if __version_info__ < (0, 11, 1):
  QUICK_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
  # LLVM's: a fifth of the time of test_context_parallel.py.
  QUICK_FLAGS.append("--xla_llvm_disable_expensive_passes=true")


def choose_architecture():
  """Makes JAX_MAGI_TEST_ARCHITECTURE the only architecture of the CUDA kernels, if it is set."""
  name = os.environ.get("JAX_MAGI_TEST_ARCHITECTURE")
  if name is None:
    return
  from jax_magi._src.native import backends

  chosen = backends.CUDA.named(f"cuda_{name}")
  assert chosen is not None, f"there is no architecture {name}"
  backends.BACKENDS["cuda"] = chosen
