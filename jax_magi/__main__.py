"""What this installation has, and what its functions choose here: `python -m jax_magi`."""

import sys

from jax_magi._src.about.command import main

if __name__ == "__main__":
  sys.exit(main())
