_Shape = tuple[int, ...]

def handlers() -> dict[str, object]: ...
def needs(
  q: _Shape,
  k: _Shape,
  value_dim: int,
  slices: _Shape,
  is_bf16: bool,
  has_softcap: bool,
  is_backward: bool,
  deterministic: bool,
  values: bytes | None,
  /,
) -> tuple[int, int, bytes]:
  """Bytes of workspace, parts in which dk and dv come, and the plan of a call with these slices."""
