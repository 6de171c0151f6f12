"""From checked operands over a batch to the op."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_magi._src.attention import ops
from jax_magi._src.attention.mask_operand import MaskOperand
from jax_magi._src.transforms.staging import is_staged
from jax_magi._src.transforms.varying import vary_together


def attend(config: ops.AttentionConfig, q, k, v, slices, sink, *, bias=None, alibi_slopes=None):
  """`ops.attention` for operands as callers have them: any scale, mesh axes of any type.

  Operands and results are those of `ops.forward`; slices may be numpy. max_logits has no gradient.
  """
  q, config = with_positive_scale(q, config)
  # Only in a program that is compiled as a whole: elsewhere, each new mask would be a new program.
  known = None
  if isinstance(slices, np.ndarray) and slices.shape[0] == 1 and any(map(is_staged, (q, k, v))):
    known = slices.tobytes()
  # Before the custom derivative, so that the gradient of a replicated operand is summed.
  terms = {"bias": bias, "alibi_slopes": alibi_slopes}
  names = [name for name, x in terms.items() if x is not None]
  q, k, v, slices, sink, *rest = vary_together(
    q, k, v, slices, sink, *(terms[name] for name in names)
  )
  given = dict(zip(names, rest, strict=True))
  mask = MaskOperand(slices, known)
  out, lse, max_logits = ops.attention(config, q, k, v, mask, sink, given)
  return out, lse, lax.stop_gradient(max_logits)


def with_positive_scale(q, config: ops.AttentionConfig):
  """The same logits: kernels take positive scales, under which the largest score is the largest."""
  if config.softmax_scale < 0.0:
    return -q, dataclasses.replace(config, softmax_scale=-config.softmax_scale)
  if config.softmax_scale == 0.0:
    return jnp.zeros_like(q), dataclasses.replace(config, softmax_scale=1.0)
  return q, config
