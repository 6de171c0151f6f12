"""QK-Clip in MaxText, for grouped and latent attention: see docs/trainers.md.

python -m examples.trainers.maxtext_qk_clip base.yml attention=jax_magi qk_clip_threshold=100 ...
"""

import sys

from flax import nnx, traverse_util
from maxtext.trainers.pre_train import train
from maxtext.utils import qk_clip_utils

from examples.trainers.maxtext_attention import install
from jax_magi.optim import (
  MlaProjections,
  Projection,
  QkProjections,
  apply_qk_clip,
  reduce_max_logits,
)


def projections_of(path, shapes, layers, nope):
  """The projections of one attention module, or of all that a scan has stacked on axis 1."""

  def named(name, dims=None):
    kernel = Projection(f"{path}/{name}/kernel", f"embed {layers}-> heads dim", dims=dims)
    bias = Projection(f"{path}/{name}/bias", f"-> heads {layers}dim", dims=dims)
    return (kernel, bias) if bias.path in shapes else kernel

  if f"{path}/wkv_b/kernel" not in shapes:
    return QkProjections(named("query"), named("key"))
  query = "wq_b" if f"{path}/wq_b/kernel" in shapes else "query"
  end = shapes[f"{path}/{query}/kernel"][-1]
  return MlaProjections(
    named(query, (0, nope)), named(query, (nope, end)), named("wkv_b", (0, nope))
  )


def apply_qk_clip_nnx(state, intermediates, config):
  """What `qk_clip_utils.apply_qk_clip_nnx` does, for every kind of attention, layer by layer."""
  params = nnx.state(state.model, nnx.Param)
  tree = nnx.to_pure_dict(params)
  shapes = {"/".join(map(str, k)): x.shape for k, x in traverse_util.flatten_dict(tree).items()}
  maxima, projections = {}, {}
  for keys, x in traverse_util.flatten_dict(intermediates).items():
    if keys[-1] == "max_logits":
      path, layers = "/".join(map(str, keys[:-2])), "layers " * (x.ndim - 2)
      maxima[path] = reduce_max_logits(x, -2)
      projections[path] = projections_of(path, shapes, layers, config.qk_nope_head_dim)
  if not maxima:
    raise ValueError("no attention has recorded max_logits; choose attention=jax_magi")
  # Without a call of the host, JAX keeps the compiled step; MaxText logs the maxima itself.
  clipped = apply_qk_clip(tree, maxima, projections, config.qk_clip_threshold, report=False)
  nnx.replace_by_pure_dict(params, clipped)
  nnx.update(state.model, params)
  return state


def main(argv):
  """Trains with QK-Clip."""
  install()
  qk_clip_utils.apply_qk_clip_nnx = apply_qk_clip_nnx
  config, recorder = train.initialize(argv)
  if config.gradient_accumulation_steps > 1:
    raise NotImplementedError("MaxText adds up maxima over the steps of gradient accumulation")
  config.get_keys()["use_qk_clip"] = True  # MaxText allows it for latent attention alone.
  train.run(config, recorder)


if __name__ == "__main__":
  main(sys.argv)
