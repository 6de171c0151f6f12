"""QK-Clip on parameters: gamma, clipped weights, reports."""

import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

import jax_magi
from jax_magi.optim import (
  MlaProjections,
  Projection,
  QkProjections,
  apply_qk_clip,
  qk_clip,
  qk_clip_gamma,
  raise_if_broken,
)
from tests.arrays import assert_same_bits, normal
from tests.qk_kernels import DIM, EMBED, STACKED, make_kernels, make_projections

F32_EPS = np.finfo(np.float32).eps


# --- gamma ---


def test_gamma_is_the_float64_ratio_above_the_threshold_and_one_elsewhere():
  # 100 * (1 + eps) is the next float32 above the threshold.
  above = np.array([100.0 * (1 + F32_EPS), 123.4, 1e4, 3e38], np.float32)
  below = np.array([100.0, 99.9, 1e-30, 0.0, -0.0, -5.0, -1e30, -np.inf], np.float32)
  gamma = qk_clip_gamma(np.concatenate([above, below]))
  assert gamma.dtype == np.float32 and gamma.shape == (12,)
  np.testing.assert_allclose(gamma[:4], 100.0 / above.astype(np.float64), rtol=F32_EPS, atol=0)
  np.testing.assert_array_equal(gamma[4:], 1.0)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0, 3)], ids=str)
def test_gamma_has_the_shape_of_max_logits(shape):
  gamma = jax.jit(qk_clip_gamma)(np.full(shape, 40.0, np.float32), 20.0)
  np.testing.assert_array_equal(gamma, np.full(shape, 0.5, np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gamma_of_a_broken_head_is_an_error(value):
  max_logits = np.array([[1.0, 200.0], [value, 200.0]], np.float32)
  with pytest.raises(FloatingPointError, match=r"NaN or \+inf at layer 1 head 0$"):
    qk_clip_gamma(max_logits)
  traced = jax.jit(qk_clip_gamma)(max_logits)
  np.testing.assert_array_equal(traced, np.array([[1.0, 0.5], [np.nan, 0.5]], np.float32))


def test_broken_maxima_are_raised_outside_the_step():
  sound = np.array([[1.0, 200.0], [-np.inf, 3.0]], np.float32)
  broken = np.where(np.eye(2), np.nan, sound)
  for maxima in (sound, jnp.asarray(sound), {"a": sound, "b": sound}):
    raise_if_broken(maxima)
  with pytest.raises(FloatingPointError, match=r"at layer 0 head 0, layer 1 head 1$"):
    raise_if_broken(broken)
  with pytest.raises(FloatingPointError, match=r"at b layer 0 head 0, b layer 1 head 1$"):
    raise_if_broken({"a": sound, "b": jnp.asarray(broken)})


@pytest.mark.parametrize("threshold", [0.0, -1.0, -np.inf, np.nan, np.ones(2)], ids=str)
def test_gamma_needs_a_positive_threshold(threshold):
  with pytest.raises(ValueError, match="threshold must be a positive number"):
    qk_clip_gamma(np.ones(2, np.float32), threshold)


def test_infinite_threshold_never_clips():
  np.testing.assert_array_equal(qk_clip_gamma(np.array([1e38, -1.0], np.float32), np.inf), 1.0)


# --- clipped weights, compared with float64 and with recomputed logits ---


def _mha_logits(params, x, num_heads):
  """[heads, q, k] in float64, GQA included, from kernels of shape [embed, heads, dim]."""
  q, k = (
    np.einsum("te,ehd->thd", x, params[name]["kernel"].astype(np.float64))
    + params[name].get("bias", np.zeros(1)).astype(np.float64)
    for name in ("q", "k")
  )
  k = np.repeat(k, num_heads // k.shape[1], axis=1)
  return np.einsum("qhd,khd->hqk", q, k) * DIM**-0.5


def _measure(params, x, num_heads):
  return _mha_logits(params, x, num_heads).max(axis=(1, 2))


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1], ids=lambda n: f"kv{n}")
@pytest.mark.parametrize("has_bias", [False, True], ids=["kernel", "kernel_and_bias"])
def test_hot_head_comes_down_to_the_threshold_and_others_keep_every_bit(num_kv_heads, has_bias):
  num_heads, tau = 4, 30.0
  params = make_kernels(num_heads, num_kv_heads)
  roles = {name: [Projection(f"{name}/kernel", "embed -> heads dim")] for name in "qk"}
  if has_bias:
    for name, heads in (("q", num_heads), ("k", num_kv_heads)):
      params[name]["bias"] = normal(heads, DIM, seed=7)
      roles[name].append(Projection(f"{name}/bias", "-> heads dim"))
  x = normal(50, EMBED, seed=2, dtype=np.float64) * 0.3
  params["q"]["kernel"][:, 1] *= 8.0  # The hot head.
  max_logits = _measure(params, x, num_heads)
  assert max_logits[1] > tau and np.delete(max_logits, 1).max() < tau

  clipped = apply_qk_clip(params, max_logits.astype(np.float32), QkProjections(**roles), tau)
  clipped = jax.tree.map(np.asarray, clipped)

  size = num_heads // num_kv_heads
  group = slice(1 // size * size, 1 // size * size + size)
  root = np.sqrt(tau / max_logits[1])
  for name, heads in (("q", group), ("k", slice(1 // size, 1 // size + 1))):
    for part, old in params[name].items():
      new = clipped[name][part]
      expected = old.astype(np.float64)
      expected[..., heads, :] *= root
      np.testing.assert_allclose(new, expected, rtol=4 * F32_EPS, atol=0)
      untouched = np.delete(np.arange(old.shape[-2]), heads)
      assert_same_bits(new[..., untouched, :], old[..., untouched, :])
  again = _measure(clipped, x, num_heads)
  np.testing.assert_allclose(again[1], tau, rtol=8 * F32_EPS)
  outside = np.delete(np.arange(num_heads), group)
  np.testing.assert_array_equal(again[outside], max_logits[outside])


def test_group_takes_the_gamma_of_its_hottest_head():
  params = make_kernels(num_q_heads=4, num_kv_heads=2)
  max_logits = np.array([50.0, 80.0, 30.0, 10.0], np.float32)
  clipped = apply_qk_clip(params, max_logits, make_projections(), 40.0)
  root = np.sqrt(0.5)
  for name, heads in (("q", 2), ("k", 1)):
    old, new = params[name]["kernel"], np.asarray(clipped[name]["kernel"])
    np.testing.assert_allclose(new[:, :heads], old[:, :heads] * root, rtol=4 * F32_EPS)
    assert_same_bits(new[:, heads:], old[:, heads:])


NOPE, ROPE, VALUE, RANK, MLA_HEADS = 6, 4, 5, 12, 3


def _mla(is_merged):
  """Parameters as in practice: the parts of q in one kernel, those of k and v in another."""
  params = {
    "q_b": {"kernel": normal(RANK, MLA_HEADS, NOPE + ROPE, seed=0)},
    "kv_b": {"kernel": normal(RANK, MLA_HEADS, NOPE + VALUE, seed=1)},
    "k_rope": {"kernel": normal(EMBED, ROPE, seed=2)},
  }
  layout, options = "rank -> heads dim", {}
  if is_merged:
    for name in ("q_b", "kv_b"):
      params[name]["kernel"] = params[name]["kernel"].reshape(RANK, -1)
    layout, options = "rank -> (heads dim)", {"num_heads": MLA_HEADS}
  projections = MlaProjections(
    q_nope=Projection("q_b/kernel", layout, dims=(0, NOPE), **options),
    q_rope=Projection("q_b/kernel", layout, dims=(NOPE, NOPE + ROPE), **options),
    k_nope=Projection("kv_b/kernel", layout, dims=(0, NOPE), **options),
  )
  return params, projections


def _mla_max(params, x, latent):
  q_b, kv_b = (
    params[name]["kernel"].reshape(RANK, MLA_HEADS, -1).astype(np.float64)
    for name in ("q_b", "kv_b")
  )
  q = np.einsum("tr,rhd->htd", latent, q_b)
  k_nope = np.einsum("tr,rhd->htd", latent, kv_b[..., :NOPE])
  k_rope = x @ params["k_rope"]["kernel"].astype(np.float64)
  logits = q[..., :NOPE] @ k_nope.swapaxes(1, 2) + q[..., NOPE:] @ k_rope.T
  return (logits * (NOPE + ROPE) ** -0.5).max(axis=(1, 2))


@pytest.mark.parametrize(
  ("is_merged", "alpha"), [(False, 0.5), (True, 0.5), (False, 0.2), (True, 1.0)], ids=str
)
def test_mla_splits_gamma_between_its_parts(is_merged, alpha):
  params, projections = _mla(is_merged)
  x = normal(40, EMBED, seed=3, dtype=np.float64)
  latent = normal(40, RANK, seed=4, dtype=np.float64)
  max_logits = _mla_max(params, x, latent)
  hot = int(max_logits.argmax())
  tau = float(np.sort(max_logits)[-2:].mean())
  clipped = apply_qk_clip(params, max_logits.astype(np.float32), projections, tau, alpha=alpha)
  clipped = jax.tree.map(np.asarray, clipped)

  gamma = tau / max_logits[hot]
  q, kv = (np.ones((MLA_HEADS, NOPE + n)) for n in (ROPE, VALUE))
  q[hot, :NOPE], kv[hot, :NOPE] = gamma**alpha, gamma ** (1 - alpha)
  q[hot, NOPE:] = gamma
  for name, factor in (("q_b", q), ("kv_b", kv)):
    old, new = (p[name]["kernel"].reshape(RANK, MLA_HEADS, -1) for p in (params, clipped))
    np.testing.assert_allclose(new, old * factor, rtol=4 * F32_EPS, atol=0)
    assert_same_bits(new[:, factor == 1.0], old[:, factor == 1.0])
  assert_same_bits(clipped["k_rope"]["kernel"], params["k_rope"]["kernel"])
  again = _mla_max(clipped, x, latent)
  np.testing.assert_allclose(again[hot], tau, rtol=8 * F32_EPS)
  np.testing.assert_array_equal(np.delete(again, hot), np.delete(max_logits, hot))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_alpha_divides_the_correction_between_queries_and_keys(alpha):
  params = make_kernels()
  statistics = np.array([50.0, 400.0, 100.0, 120.0], np.float32)
  gamma = np.minimum(100.0 / statistics.astype(np.float64), 1.0)
  clipped = apply_qk_clip(params, statistics, make_projections(), alpha=alpha)
  for name, power in (("q", alpha), ("k", 1 - alpha)):
    expected = params[name]["kernel"] * (gamma**power)[:, None]
    np.testing.assert_allclose(clipped[name]["kernel"], expected, rtol=4 * F32_EPS, atol=0)
  chained = qk_clip(make_projections(), alpha=alpha)
  zeros = jax.tree.map(np.zeros_like, params)
  updates, _ = chained.update(zeros, chained.init(params), params, max_logits=statistics)
  for name in params:
    updated = params[name]["kernel"] + updates[name]["kernel"]
    np.testing.assert_allclose(updated, clipped[name]["kernel"], rtol=4 * F32_EPS, atol=1e-7)


@pytest.mark.parametrize("alpha", [-0.1, 1.5, np.nan, True, None], ids=str)
def test_alpha_is_a_number_from_0_to_1(alpha):
  with pytest.raises(ValueError, match="alpha must be a number from 0 to 1"):
    apply_qk_clip(make_kernels(), np.ones(4, np.float32), make_projections(), alpha=alpha)


# How to get from [layers, embed, heads, dim] to the layout, and the axis to merge with its next.
LAYOUTS = {
  "embed -> heads dim": ("ehd->ehd", None),
  "embed -> dim heads": ("ehd->edh", None),
  "embed -> (heads dim)": ("ehd->ehd", 1),
  "embed -> (dim heads)": ("ehd->edh", 1),
  "layers embed -> heads dim": ("lehd->lehd", None),
  "embed layers -> heads dim": ("lehd->elhd", None),
  "embed -> heads dim layers": ("lehd->ehdl", None),
  "layers embed -> (heads dim)": ("lehd->lehd", 2),
  "embed layers -> (dim heads)": ("lehd->eldh", 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_name_the_same_heads(layout):
  einsum, axis = LAYOUTS[layout]

  def arrange(x):
    x = np.einsum(einsum, x)
    return x if axis is None else x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

  layers = (3,) if "layers" in layout else ()
  params = make_kernels(layers=layers)
  max_logits = np.full((*layers, 4), 5.0, np.float32)
  max_logits[..., 2] = 20.0
  expected = jax.tree.map(np.copy, params)
  for name in "qk":
    expected[name]["kernel"][..., 2, :] *= np.sqrt(np.float32(0.5))
  got = apply_qk_clip(
    jax.tree.map(arrange, params), max_logits, make_projections(layout, num_heads=4), 10.0
  )
  assert_same_bits(jax.tree.map(np.asarray, got), jax.tree.map(arrange, expected))


def test_layers_that_are_not_stacked_are_counted():
  params = {f"block_{i}": make_kernels() for i in range(11)}  # 10 sorts before 2.
  projections = QkProjections(
    q=Projection("block_{layer}/q/kernel", "embed -> heads dim"),
    k=Projection("block_{layer}/k/kernel", "embed -> heads dim"),
  )
  max_logits = np.full((11, 4), 1.0, np.float32)
  max_logits[2, 3] = 400.0
  clipped = jax.tree.map(np.asarray, apply_qk_clip(params, max_logits, projections))
  hot, expected = clipped.pop("block_2"), params.pop("block_2")
  assert_same_bits(clipped, params)
  np.testing.assert_array_equal(hot["q"]["kernel"][:, 3], expected["q"]["kernel"][:, 3] * 0.5)


def test_a_layer_that_is_named_twice_is_one_number():
  """Other parameters may have two numbers in their paths."""
  params = {f"block_{i}": {f"attention_{i}": make_kernels()} for i in range(3)}
  projections = QkProjections(
    q=Projection("block_{layer}/attention_{layer}/q/kernel", "embed -> heads dim"),
    k=Projection("block_{layer}/attention_{layer}/k/kernel", "embed -> heads dim"),
  )
  max_logits = np.full((3, 4), 400.0, np.float32)
  expected = apply_qk_clip(params, max_logits, projections)
  params["block_1"]["attention_2"] = other = make_kernels()
  clipped = apply_qk_clip(params, max_logits, projections)
  assert_same_bits(clipped["block_1"].pop("attention_2"), other)
  assert_same_bits(clipped, expected)


def test_parameters_in_boxes_have_the_same_paths():
  params = make_kernels()
  boxed = jax.tree.map(lambda x: nn.Partitioned(x, names=("embed", "heads", None)), params)
  max_logits = np.array([1.0, 400.0, 1.0, 1.0], np.float32)
  clipped = nn.unbox(apply_qk_clip(boxed, max_logits, make_projections()))
  assert_same_bits(clipped, apply_qk_clip(params, max_logits, make_projections()))


def test_kinds_of_layers_have_their_own_statistics():
  params = {"window": make_kernels(layers=(2,)), "full": make_kernels(4, 2)}
  projections = {
    "window": QkProjections(
      q=Projection("window/q/kernel", "layers embed -> heads dim"),
      k=Projection("window/k/kernel", "layers embed -> heads dim"),
    ),
    "full": QkProjections(
      q=Projection("full/q/kernel", "embed -> heads dim"),
      k=Projection("full/k/kernel", "embed -> heads dim"),
    ),
  }
  max_logits = {"window": np.ones((2, 4), np.float32), "full": np.ones(4, np.float32)}
  max_logits["window"][1, 0] = 400.0
  clipped = jax.tree.map(np.asarray, apply_qk_clip(params, max_logits, projections))
  assert_same_bits(clipped["full"], params["full"])
  touched = (clipped["window"]["k"]["kernel"] != params["window"]["k"]["kernel"]).any(axis=(1, 3))
  np.testing.assert_array_equal(np.argwhere(touched), [[1, 0]])
  max_logits["full"][2] = np.nan
  with pytest.raises(FloatingPointError, match=r"at full head 2$"):
    apply_qk_clip(params, max_logits, projections)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "f16"])
def test_low_precision_weights_are_rounded_once(dtype):
  params = make_kernels(dtype=dtype)
  clipped = apply_qk_clip(params, np.array([1, 130, 1, 1], np.float32), make_projections(), 100.0)
  old, new = params["q"]["kernel"], np.asarray(clipped["q"]["kernel"])
  root = np.sqrt(np.float32(100.0) / np.float32(130.0))
  assert_same_bits(new[:, 1], (old[:, 1].astype(np.float32) * root).astype(dtype))
  assert_same_bits(np.delete(new, 1, 1), np.delete(old, 1, 1))


def test_measured_by_attention_and_clipped_under_scan_over_layers():
  """The whole loop: max_logits of our attention, clip, our attention again."""
  num_layers, num_heads, tau = 3, 4, 30.0
  params = make_kernels(num_heads, 2, layers=(num_layers,))
  params["q"]["kernel"][1, :, 2] *= 40.0
  x = jnp.asarray(normal(64, EMBED, seed=2)) * 0.2
  mask = jax_magi.AttentionMask.from_cu_seqlens([0, 20, 64], causal=True)

  @jax.jit
  def measure(params):
    def layer(x, kernels):
      q, k = (jnp.einsum("te,ehd->thd", x, kernels[name]["kernel"]) for name in "qk")
      _, meta = jax_magi.attention(q, k, k, mask, return_max_logits=True)
      return x, meta.max_logits

    return lax.scan(layer, x, params)[1]

  max_logits = measure(params)
  assert max_logits.shape == (num_layers, num_heads)
  assert max_logits[1, 2] > tau and np.sort(max_logits.ravel())[-2] < tau
  clipped = jax.jit(lambda p, m: apply_qk_clip(p, m, STACKED, tau))(params, max_logits)
  again = np.asarray(measure(clipped))
  np.testing.assert_allclose(again[1, 2], tau, rtol=1e-5)
  for layer in (0, 2):
    assert_same_bits(again[layer], np.asarray(max_logits[layer]))


# --- errors of other implementations ---


def test_one_hot_layer_under_scan_clips_only_that_layer():
  params = make_kernels(layers=(4,))
  max_logits = np.full((4, 4), 60.0, np.float32)
  max_logits[2, 1] = 250.0
  clipped = jax.jit(lambda p, m: apply_qk_clip(p, m, STACKED))(params, max_logits)
  for name in "qk":
    old, new = params[name]["kernel"], np.asarray(clipped[name]["kernel"])
    touched = (new != old).any(axis=(1, 3))
    np.testing.assert_array_equal(np.argwhere(touched), [[2, 1]])
    np.testing.assert_allclose(new[2, :, 1], old[2, :, 1] * np.sqrt(0.4), rtol=4 * F32_EPS)


@pytest.mark.parametrize("value", [-1.0, -1e30, -np.inf, 0.0, -0.0, 100.0])
def test_maximum_that_is_not_above_the_threshold_clips_nothing(value):
  params = make_kernels(num_q_heads=4, num_kv_heads=2, layers=(2,))
  params["q"]["kernel"][0, 0] = 1e-40  # Subnormal: a product with 1 may flush it to 0.
  max_logits = np.full((2, 4), value, np.float32)
  for clip in (apply_qk_clip, jax.jit(apply_qk_clip, static_argnums=2)):
    assert_same_bits(jax.tree.map(np.asarray, clip(params, max_logits, STACKED)), params)


# --- NaN and +inf ---


def _broken(value):
  """Head 1 of 4 is invalid, head 3 is above the threshold; pairs of heads share a key head."""
  return np.array([10.0, value, 10.0, 400.0], np.float32)


def _assert_only_the_sound_group_is_clipped(params, clipped):
  for name, heads in (("q", 2), ("k", 1)):
    old, new = params[name]["kernel"], np.asarray(clipped[name]["kernel"])
    assert_same_bits(new[:, :heads], old[:, :heads])
    np.testing.assert_allclose(new[:, heads:], old[:, heads:] * 0.5, rtol=4 * F32_EPS)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_head_is_an_error_outside_jit(value):
  with pytest.raises(FloatingPointError, match=r"NaN or \+inf at head 1$"):
    apply_qk_clip(make_kernels(4, 2), _broken(value), make_projections())
  stacked = np.stack([_broken(0.0), _broken(value)])
  with pytest.raises(FloatingPointError, match=r"at layer 1 head 1$"):
    apply_qk_clip(make_kernels(4, 2, layers=(2,)), stacked, STACKED)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_head_is_logged_under_jit_and_keeps_its_weights(value, caplog):
  params = make_kernels(4, 2)
  clip = jax.jit(lambda p, m: apply_qk_clip(p, m, make_projections(), report=True))
  clip(params, _broken(0.0))
  jax.effects_barrier()
  assert not caplog.records
  clipped = clip(params, _broken(value))
  jax.effects_barrier()
  (record,) = caplog.records
  assert record.levelno == logging.ERROR and record.name == "jax_magi"
  assert "NaN or +inf at head 1;" in record.getMessage()
  _assert_only_the_sound_group_is_clipped(params, clipped)


def test_without_report_the_program_never_calls_the_host():
  """JAX exports such programs, and keeps them in its persistent compilation cache."""
  params, max_logits = make_kernels(4, 2), _broken(0.0)

  def export(report):
    clip = jax.jit(lambda p, m: apply_qk_clip(p, m, make_projections(), report=report))
    return jax.export.export(clip)(params, max_logits).serialize

  with pytest.raises(NotImplementedError, match="callback"):
    export(True)()
  assert export(False)()


@pytest.mark.parametrize("directory", ["somewhere", None])
def test_default_reports_unless_programs_are_kept(directory):
  """JAX's persistent compilation cache does not keep programs that call the host."""
  params, max_logits = make_kernels(4, 2), _broken(0.0)
  before = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", directory)
  try:
    clip = jax.jit(lambda p, m: apply_qk_clip(p, m, make_projections()))
    calls_host = "callback" in clip.lower(params, max_logits).as_text()
  finally:
    jax.config.update("jax_compilation_cache_dir", before)
  assert calls_host == (directory is None)
  with pytest.raises(FloatingPointError, match=r"at head 1$"):  # Known values are always reported.
    apply_qk_clip(params, _broken(np.nan), make_projections())
