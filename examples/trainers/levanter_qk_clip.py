"""QK-Clip in Levanter, whose modules return nothing but their output: see docs/trainers.md.

Each attention module gets a parameter of zeros, whose gradient is the maxima of the module.

    levanter_qk_clip.install()  # Before a model is made.
    optimizer = levanter_qk_clip.with_qk_clip(optimizer, threshold=100.0)
"""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import optax
from levanter.layers import attention
from levanter.models import llama

from examples.trainers.levanter_attention import attend
from jax_magi.optim import Projection, QkProjections, qk_clip, reduce_max_logits

_slots = []  # That of the module which is being traced.


@jax.custom_vjp
def _tell(out, max_logits, slot):
  """out. The gradient of slot is max_logits."""
  return out


_tell.defvjp(
  lambda out, max_logits, slot: (out, max_logits),
  lambda max_logits, dout: (dout, jnp.zeros_like(max_logits), max_logits),
)


class Attention(attention.Attention):
  """Levanter's, with a place for its maxima."""

  max_logits: hax.NamedArray | None = None

  @staticmethod
  def init(config, *, key):  # noqa: D102
    theirs = attention.Attention.init(config, key=key)
    fields = {field.name: getattr(theirs, field.name) for field in dataclasses.fields(theirs)}
    return Attention(**fields, max_logits=hax.zeros((config.KVHeads, config.QHeadsPerGroup)))

  def __call__(self, x, mask, **options):  # noqa: D102
    _slots.append(self.max_logits)
    try:
      return super().__call__(x, mask, **options)
    finally:
      _slots.pop()


def dot_product_attention(*operands, **options):
  """That of `levanter_attention`, which tells the module's maxima."""
  out, meta = attend(*operands, **options, return_max_logits=True)
  slot = _slots[-1].array
  max_logits = reduce_max_logits(meta.max_logits.reshape(-1, *slot.shape), 0)
  return hax.named(_tell(out.array, max_logits, slot), out.axes)


def install():
  """Makes Llama's attention modules, and those of models built on it, tell their maxima."""
  attention.dot_product_attention = dot_product_attention
  llama.Attention = Attention


def with_qk_clip(optimizer, threshold):
  """An Optax optimizer for models whose attention tells its maxima, followed by QK-Clip."""

  def is_slot(keys):
    return getattr(keys[-2], "name", None) == "max_logits"

  def slots_of(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
      jax.tree_util.keystr(keys[:-2], simple=True, separator="/"): x
      for keys, x in leaves
      if is_slot(keys)
    }

  def clip_of(params):
    projections = {}
    for path, slot in slots_of(params).items():
      layers = "layers " * (slot.ndim - 2)
      # All heads of a group share a factor, so that heads of keys are all that it needs to know.
      q = Projection(f"{path}/q_proj/weight/0", f"{layers}heads group dim -> embed")
      k = Projection(f"{path}/k_proj/weight/0", f"{layers}heads dim -> embed")
      projections[path] = QkProjections(q, k)
    # Without a call of the host, JAX keeps the compiled step.
    return qk_clip(projections, threshold, report=False)

  def init(params):
    return optimizer.init(params), clip_of(params).init(params)

  def update(grads, state, params=None, **more):
    maxima = {path: x.max(-1) for path, x in slots_of(grads).items()}
    grads = jax.tree_util.tree_map_with_path(
      lambda keys, x: jnp.zeros_like(x) if is_slot(keys) else x, grads
    )
    updates, inner = optimizer.update(grads, state[0], params, **more)
    updates, clip = clip_of(params).update(updates, state[1], params, max_logits=maxima)
    return updates, (inner, clip)

  return optax.GradientTransformationExtraArgs(init, update)
