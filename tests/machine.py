"""What can be said of the machine before JAX starts."""

from pathlib import Path

# Whether it has an NVIDIA GPU, whatever JAX will make of it.
HAS_GPU = Path("/dev/nvidiactl").exists()
