_Shape = tuple[int, ...]

class AttentionNeeds:
  """What a device needs from the caller: the struct of this name in `cc/attention.h`."""

  @property
  def workspace_bytes(self) -> int: ...
  @property
  def num_dkv_parts(self) -> int: ...
  @property
  def is_dq_summed(self) -> bool: ...
  @property
  def dq_sum_words(self) -> int: ...
  @property
  def is_dbias_summed(self) -> bool: ...
  @property
  def tile_list(self) -> bytes: ...
  @property
  def tile_list_words(self) -> int: ...
  @property
  def tile_cost(self) -> int: ...
  @property
  def tile_stamp(self) -> int: ...

COMMIT: str  # The commit of the sources; "unknown" if they were no git checkout.
COMPILER: str
LEFT_OUT: str  # The kernels that were left out of this build.

def variants() -> dict[str, list[str]]:
  """The kernels of this build, in words: the list of "attention sm90" has "HEAD_DIM DTYPE"."""

def handlers() -> dict[str, object]: ...
def attention_needs(
  *,
  q_shape: _Shape,
  k_shape: _Shape,
  value_dim: int,
  slices_shape: _Shape,
  dtype: str,
  has_softcap: bool,
  is_backward: bool,
  deterministic: bool,
  static_slices: bytes | None,
  bias_shape: _Shape | None = None,
  bias_dtype: str = "float32",
  has_alibi: bool = False,
  wants_dbias: bool = False,
  wants_dslopes: bool = False,
  sums_dq: bool = False,
  has_float_grads: bool = False,
  num_sms: int = 0,
  architecture: str = "none",
  shared_memory_bytes: int = 99 << 10,
) -> AttentionNeeds:
  """The needs of a call with these operands. Known `static_slices` determine its tile list."""
