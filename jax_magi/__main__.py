"""Reports the build, the devices and the implementations in use: `python -m jax_magi`."""

import sys

from jax_magi._src.about.command import main

if __name__ == "__main__":
  sys.exit(main())
