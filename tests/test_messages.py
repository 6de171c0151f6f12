"""Errors for common mistakes name the argument, and say what to do instead."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask
from tests.arrays import assert_trees_close, normals

_CAUSAL = AttentionMask.causal(8)


@pytest.mark.parametrize(
  ("window", "match"),
  [
    ((4, 2, 0, 8), r"q_end - q_begin must lie in \[0, 2\*\*30\), got -2"),
    ((0, 8, 5, 0), r"k_end - k_begin must lie in \[0, 2\*\*30\), got -5"),
    ((0, 2**30 + 1, 0, 8), "q_end must lie within .* got 1073741825"),
    ((0, 8, -(2**40), 8), "k_begin must lie within"),
    ((0, 8, -1, 2**30 - 1), "k_end - k_begin must lie in"),
    ((-(2**30), -8, 8, 16), "k_begin - q_begin must lie within"),
    ((0.0, 8, 0, 8), "q_begin must be a static integer, got 0.0"),
    ((0, 8, 0, True), "k_end must be a static integer, got True"),
  ],
)
def test_bad_crop_is_named(window, match):
  with pytest.raises(ValueError, match=match):
    _CAUSAL.crop(*window)


@pytest.mark.parametrize("index", range(4))
def test_crop_with_traced_bounds_needs_a_length(index):
  def crop(bound):
    window = [0, 8, 0, 8]
    window[index] = bound
    return _CAUSAL.crop(*window)

  with pytest.raises(ValueError, match=f"^{'qqkk'[index]}_len must be given if"):
    jax.jit(crop)(4)


@pytest.mark.parametrize("begin", [2**30 - 2, -(2**30)])
def test_crop_far_outside_shows_nothing(begin):
  for mask in (_CAUSAL, AttentionMask(jnp.asarray(_CAUSAL.slices), 8, 8)):
    assert mask.crop(begin, begin + 2, begin, begin + 2).area() == 0
    assert mask.crop(0, 8, 2**30 - 2, 2**30).area() == 0


def test_crop_of_traced_slices_clips_them_first():
  edge = 2**31 - 1

  @jax.jit
  def crop(slices):
    return AttentionMask(slices, 8, 8).crop(-2, 6, 1, 7).to_dense()

  got = crop(np.array([[-edge, edge, -edge, edge, -edge, 0]], np.int32))
  np.testing.assert_array_equal(got, _CAUSAL.crop(-2, 6, 1, 7).to_dense())


@pytest.mark.parametrize(
  ("make", "match"),
  [
    (
      lambda: AttentionMask.from_ranges([[0, 4], [4]], [[0, 4], [4, 8]]),
      r"q_ranges must be \[n, 2\], got rows of different lengths: \[\[0, 4\], \[4\]\]",
    ),
    (
      lambda: AttentionMask.from_ranges([[0, 4], [4, 8]], [[0, 4], []]),
      r"k_ranges must be \[2, 2\], got rows of different lengths",
    ),
    (lambda: AttentionMask([[0, 8, 0, 8, 0], [0]], 8, 8), "slices must be .* different lengths"),
  ],
  ids=["q_ranges", "k_ranges", "slices"],
)
def test_ragged_lists_are_named(make, match):
  with pytest.raises(ValueError, match=match):
    make()


def _dot_product(**flags):
  x = jnp.zeros((1, 8, 2, 16))
  return jax_magi.dot_product_attention(x, x, x, **flags)


@pytest.mark.parametrize(
  ("name", "call"),
  [
    ("is_causal", lambda x: _dot_product(is_causal=x)),
    ("is_causal", lambda x: _dot_product(is_causal=x, mask=_CAUSAL)),
    ("return_meta", lambda x: _dot_product(return_meta=x)),
    ("is_causal", lambda x: jax_magi.fused_scale_mask_softmax(jnp.zeros((8, 8)), is_causal=x)),
    ("causal", lambda x: AttentionMask.from_segment_ids(np.ones(8, int), 1, causal=x)),
    ("causal", lambda x: AttentionMask.from_cu_seqlens([0, 8], causal=x)),
  ],
)
def test_traced_flag_is_named(name, call):
  match = f"^{name} must be True or False, got a traced value; .* static_argnames"
  with pytest.raises(ValueError, match=match):
    jax.jit(call)(True)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_integer_masks_are_told_both_readings(dtype):
  x, mask = jnp.zeros((1, 1, 8, 8)), np.tril(np.ones((8, 8), dtype))
  match = "mask != 0 if 1 means visible, or mask == 0 if 1 means masked out"
  with pytest.raises(ValueError, match=match):
    jax_magi.fused_scale_mask_softmax(x, mask)
  fused = jax_magi.FusedScaleMaskSoftmax(False, False, "padding", True, None, True, None)
  with pytest.raises(ValueError, match="mask != 0 if 1 means masked out"):
    fused(x, mask)


@pytest.mark.parametrize("is_mesh_set", [False, True], ids=["", "mesh_set"])
@pytest.mark.parametrize("on_mesh", ["qkv", "kv", "k", "v", "q"])
def test_arrays_beside_those_on_an_explicit_mesh(on_mesh, is_mesh_set):
  mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
  arrays = dict(zip("qkv", normals((4, 8, 4, 16), (4, 8, 2, 16), (4, 8, 2, 16)), strict=True))
  lengths = np.array([8, 3, 5, 1], np.int32)

  @jax.jit
  def run(q, k, v, lengths):
    def loss(q, k, v):
      out = jax_magi.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)
      return jnp.sum(out**2), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

  expected = run(*arrays.values(), lengths)
  sharding = NamedSharding(mesh, P("x", None, "y"))
  placed = {n: jax.device_put(x, sharding) if n in on_mesh else x for n, x in arrays.items()}
  with jax.set_mesh(mesh) if is_mesh_set else contextlib.nullcontext():
    got = run(*placed.values(), jax.device_put(lengths, NamedSharding(mesh, P("x"))))
  assert got[0][1].sharding.is_equivalent_to(sharding, 4)
  assert_trees_close(jax.device_get(got), jax.device_get(expected))
