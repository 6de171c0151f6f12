"""The command: `python -m jax_magi.overlap`."""

import sys

from jax_magi.overlap import main

sys.exit(main())
