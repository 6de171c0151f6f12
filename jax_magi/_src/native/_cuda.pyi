from jax_magi._src.native._cpu import COMMIT as COMMIT
from jax_magi._src.native._cpu import COMPILER as COMPILER
from jax_magi._src.native._cpu import LEFT_OUT as LEFT_OUT
from jax_magi._src.native._cpu import AttentionNeeds as AttentionNeeds
from jax_magi._src.native._cpu import attention_needs as attention_needs
from jax_magi._src.native._cpu import handlers as handlers
from jax_magi._src.native._cpu import variants as variants

def benchmark_handlers() -> dict[str, object]:
  """The handlers of targets that only benchmarks register."""

def read_tile_stamp(stamp: int) -> dict[str, int]:
  """num_rows, num_columns, by_keys, aligns_keys, and the approximate num_blocks (0: unknown)."""

def stamp_of_blocks(num_blocks: int) -> int:
  """The part of a stamp that encodes the number of blocks of all tiles of a list."""

def shared_memory_of(compute_capability: int) -> int:
  """The shared memory of a CTA on such a GPU (90 is 9.0), or on any GPU for other numbers."""
