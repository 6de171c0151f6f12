"""QK-Clip: every mistake of a caller is named."""

import numpy as np
import pytest

from jax_magi.optim import MlaProjections, Projection, QkProjections, apply_qk_clip
from tests.qk_kernels import STACKED, make_kernels, make_projections


def _projection(path="q/kernel", layout="embed -> heads dim", **options):
  return lambda: Projection(path, layout, **options)


@pytest.mark.parametrize(
  ("make", "match"),
  [
    (_projection(layout="embed heads dim"), "inputs -> outputs"),
    (_projection(layout="embed -> (heads dim"), "inputs -> outputs"),
    (_projection(layout="embed -> ((heads dim))"), "has '\\(' in a place"),
    (_projection(layout="embed -> heads -> dim"), "has '->' in a place"),
    (_projection(layout="embed -> heads, dim"), "has ',' in a place"),
    (_projection(layout="embed -> heads embed"), "names an axis twice"),
    (_projection(layout="embed -> (layers heads) dim"), "merges layers"),
    (_projection(layout="embed -> dim"), "must name heads"),
    (_projection(layout="embed -> (heads dim)"), "needs num_heads"),
    (_projection(path="{layer}/q", layout="layers embed -> heads dim"), "cannot name layers"),
    (_projection(layout="embed -> heads", dims=(0, 2)), "needs dim"),
    (_projection(dims=(3, 3)), r"must be \(begin, end\)"),
  ],
)
def test_bad_projection_is_named(make, match):
  with pytest.raises(ValueError, match=match):
    make()


def test_only_heads_and_dim_can_be_merged():
  with pytest.raises(NotImplementedError, match="only heads and dim"):
    Projection("q", "(embed heads) -> dim", num_heads=4)


@pytest.mark.parametrize(
  ("projections", "max_logits", "match"),
  [
    (STACKED, np.ones((3, 4)), r"= \[2, 4\], as the projections are, got \[3, 4\]"),
    (STACKED, np.ones(4), r"got \[4\]"),
    (STACKED, np.ones((2, 5)), r"got \[2, 5\]"),
    (STACKED, np.ones((2, 7, 4)), "reduces over batch and microbatches"),
    (STACKED, np.ones((2, 4), int), "floating point"),
    (STACKED, None, "must be an array, got NoneType"),
    (STACKED, {"a": np.ones((2, 4))}, "must be an array, got dict"),
    ({"a": STACKED}, np.ones((2, 4)), "must be a dictionary with the keys"),
    ({"a": STACKED}, {}, "no entry for 'a'"),
    ({"a": STACKED}, {"a": np.ones((2, 4)), "b": np.ones(4)}, "'b', which projections do not have"),
    ("q/kernel", np.ones((2, 4)), "must be QkProjections, MlaProjections, or a dictionary"),
    (make_projections(), np.ones(4), "does not fit its layout"),
    (
      QkProjections(q=Projection("q/weight", "embed -> heads dim"), k=STACKED.k),
      np.ones((2, 4)),
      "no parameter q/weight; there are k/kernel, q/kernel",
    ),
    (
      QkProjections(q=Projection("q_{layer}/kernel", "embed -> heads dim"), k=STACKED.k),
      np.ones((2, 4)),
      "no parameter q_{layer}/kernel, for any layer",
    ),
    (QkProjections(q=STACKED.q, k=STACKED.q), np.ones((2, 4)), "q/kernel is named twice"),
    (QkProjections(q=STACKED.k, k=STACKED.q), np.ones((2, 4)), "q's heads must be a multiple"),
    (
      MlaProjections(q_nope=STACKED.q, q_rope=STACKED.q, k_nope=STACKED.k),
      np.ones((2, 4)),
      "same number of heads",
    ),
    (
      QkProjections(
        q=Projection("q/kernel", "layers embed -> heads dim", num_heads=3), k=STACKED.k
      ),
      np.ones((2, 4)),
      "has 4 heads, but num_heads is 3",
    ),
    (
      QkProjections(
        q=Projection("q/kernel", "layers embed kind -> (heads dim)", num_heads=3), k=STACKED.k
      ),
      np.ones((2, 4)),
      "not a multiple of 3",
    ),
    (
      QkProjections(
        q=Projection("q/kernel", "layers embed -> heads dim", dims=(0, 99)), k=STACKED.k
      ),
      np.ones((2, 4)),
      "has heads of 8, but dims is",
    ),
  ],
)
def test_bad_arguments_are_named(projections, max_logits, match):
  with pytest.raises(ValueError, match=match):
    apply_qk_clip(make_kernels(4, 2, layers=(2,)), max_logits, projections)


def test_layers_must_agree():
  params = {"q": make_kernels(layers=(2,))["q"], "k": make_kernels(layers=(3,))["k"]}
  with pytest.raises(ValueError, match="same number of layers, got q/kernel 2, k/kernel 3"):
    apply_qk_clip(params, np.ones((2, 4)), STACKED)
  params = {"0": make_kernels(), "1": make_kernels(), "3": make_kernels()}
  counted = QkProjections(
    q=Projection("{layer}/q/kernel", "embed -> heads dim"),
    k=Projection("{layer}/k/kernel", "embed -> heads dim"),
  )
  with pytest.raises(
    ValueError, match=r"/q/kernel for layer 2, but there are parameters of later layers"
  ):
    apply_qk_clip(params, np.ones((3, 4)), counted)
  # If either side has a layer too many, no layer is skipped silently.
  params = {"0": make_kernels(), "1": make_kernels()}
  for num_layers in (1, 3):
    with pytest.raises(ValueError, match=r"must be .* = \[2, 4\]"):
      apply_qk_clip(params, np.ones((num_layers, 4)), counted)
