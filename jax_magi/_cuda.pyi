_Shape = tuple[int, ...]

def handlers() -> dict[str, object]: ...
def forward_workspace(
  q: _Shape,
  k: _Shape,
  value_dim: int,
  slices: _Shape,
  is_bf16: bool,
  has_softcap: bool,
  has_plan: bool,
  /,
) -> int: ...
def forward_plan(
  q: _Shape,
  k: _Shape,
  value_dim: int,
  slices: _Shape,
  is_bf16: bool,
  has_softcap: bool,
  values: bytes,
  /,
) -> bytes: ...
