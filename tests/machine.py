"""What can be said of the machine, and asked of XLA, before JAX starts."""

from pathlib import Path

from jaxlib.version import __version_info__

# Whether it has an NVIDIA GPU, whatever JAX will make of it.
HAS_GPU = Path("/dev/nvidiactl").exists()

# With these XLA flags, programs for CPUs compile in less time, and run slower.
QUICK_FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
# Later versions of jaxlib do not have this flag, and XLA ends the process over an unknown one.
if __version_info__ < (0, 11, 1):
  QUICK_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
