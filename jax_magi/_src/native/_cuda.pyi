from jax_magi._src.native._cpu import COMMIT as COMMIT
from jax_magi._src.native._cpu import COMPILER as COMPILER
from jax_magi._src.native._cpu import LEFT_OUT as LEFT_OUT
from jax_magi._src.native._cpu import AttentionNeeds as AttentionNeeds
from jax_magi._src.native._cpu import attention_needs as attention_needs
from jax_magi._src.native._cpu import handlers as handlers
from jax_magi._src.native._cpu import variants as variants

def benchmark_handlers() -> dict[str, object]:
  """Those of targets that benchmarks alone register."""

def read_tile_stamp(stamp: int) -> dict[str, int]:
  """num_rows, num_columns, by_keys, aligns_keys and num_blocks (about; 0: not known)."""

def stamp_of_blocks(num_blocks: int) -> int:
  """The share of a stamp that says how many blocks the tiles of a list have."""

def shared_memory_of(compute_capability: int) -> int:
  """Bytes that a block may use on such a GPU (90 is 9.0), or on any for another number."""
