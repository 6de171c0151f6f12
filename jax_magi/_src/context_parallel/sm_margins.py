"""The number of SMs that kernels leave free for overlapping communication."""

from __future__ import annotations

import os
from typing import Any

from jax_magi._src.attention.checks import check_sm_margin

# For launchers that know what a cluster needs. Read when a step is traced, and then fixed.
ENVIRONMENT = (
  "MAGI_ATTENTION_FFA_FORWARD_SM_MARGIN",
  "MAGI_ATTENTION_FFA_BACKWARD_SM_MARGIN",
)


def sm_margins(sm_margin: Any) -> tuple[int, int]:
  """The margins of forward and backward kernels: from a number, a pair, the environment, or 0."""
  if sm_margin is None:
    forward, backward = (_from_environment(name) for name in ENVIRONMENT)
    return forward, backward
  if not isinstance(sm_margin, tuple):
    sm_margin = (sm_margin, sm_margin)
  if len(sm_margin) != 2:
    raise ValueError(f"sm_margin must be a number or a pair (forward, backward), got {sm_margin!r}")
  forward, backward = (check_sm_margin("sm_margin", x) for x in sm_margin)
  return forward, backward


def _from_environment(name: str) -> int:
  text = os.environ.get(name, "").strip()
  try:
    number = int(text or "0")
  except ValueError:
    raise ValueError(f"{name} must be an integer in the environment, got {text!r}") from None
  return check_sm_margin(name, number)
