"""How programs of tests are compiled."""

import contextlib
import functools

import jax

# Test programs run once or a few times. Optimizing them would take most of the tests' time.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

# For reference results: rounded after each operation, as the program says.
jit_as_written = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})


@contextlib.contextmanager
def promotion():
  """Allows implicit promotion, for code of other packages: see `conftest.py`."""
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    yield
