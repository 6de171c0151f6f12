"""Muon QK-Clip: keeps attention logits at a threshold by scaling query and key projections.

Only `qk_clip` and `muon_clip` need Optax.
"""

from jax_magi._src.optim.clip import apply_qk_clip, qk_clip_gamma
from jax_magi._src.optim.optax_transforms import QkClipState, muon_clip, qk_clip, raise_if_broken
from jax_magi._src.optim.projections import MlaProjections, Projection, QkProjections
from jax_magi._src.optim.statistics import reduce_max_logits

__all__ = [
  "MlaProjections",
  "Projection",
  "QkClipState",
  "QkProjections",
  "apply_qk_clip",
  "muon_clip",
  "qk_clip",
  "qk_clip_gamma",
  "raise_if_broken",
  "reduce_max_logits",
]
