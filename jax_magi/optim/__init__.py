"""QK-Clip: keeps attention logits at a threshold by scaling query and key projections."""

from jax_magi.optim._clip import apply_qk_clip, qk_clip_gamma
from jax_magi.optim._projections import MlaProjections, Projection, QkProjections
from jax_magi.optim._statistics import reduce_max_logits

__all__ = [
  "MlaProjections",
  "Projection",
  "QkProjections",
  "apply_qk_clip",
  "qk_clip_gamma",
  "reduce_max_logits",
]
