"""The fused softmax under JAX's transformations, its donation, explanations and errors."""

import functools
import logging

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_magi import AttentionMask, explain_softmax, fused_scale_mask_softmax
from jax_magi._src.native import backends
from tests.arrays import assert_trees_close
from tests.sizes import in_turns

_FORWARD = "jax_magi_softmax_forward"
_BACKWARD = "jax_magi_softmax_backward"
_close = functools.partial(assert_trees_close, atol=2e-6)


def _arrays():
  """x, a boolean mask, an additive mask, and an offset: a batch of 4."""
  rng = np.random.default_rng(0)
  x, bias = (rng.standard_normal(s).astype(np.float32) for s in ((4, 8, 6, 10), (4, 1, 6, 10)))
  return x, rng.random((4, 1, 6, 10)) < 0.7, bias, rng.standard_normal((4, 8)).astype(np.float32)


def _loss(x, mask, offset, **options):
  y = fused_scale_mask_softmax(x, mask, scale=0.5, is_causal=True, offset=offset, **options)
  return jnp.sum(jnp.sin(3 * y)), y


def _gradients(fun):
  return jax.value_and_grad(fun, argnums=(0, 2), has_aux=True)


_gradients_on_one_device = jax.jit(_gradients(_loss))


# --- vmap ---


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
@pytest.mark.parametrize(
  "axes", [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (0, None, 0), (0, 0, None)]
)
def test_vmap_is_a_loop(implementation, axes):
  x, mask, _, offset = _arrays()
  operands = [a if axis == 0 else a[0] for a, axis in zip((x, mask, offset), axes, strict=True)]
  fun = jax.jit(_gradients(functools.partial(_loss, implementation=implementation)))
  got = jax.jit(jax.vmap(fun, axes))(*operands)
  for i in range(4):
    single = [a[i] if axis == 0 else a for a, axis in zip(operands, axes, strict=True)]
    _close(jax.tree.map(lambda a, i=i: a[i], got), fun(*single))


@pytest.mark.parametrize("mapped", ["outer", "inner", "both", "neither"])
def test_vmap_of_vmap(mapped):
  rng = np.random.default_rng(0)
  x = rng.standard_normal((2, 3, 4, 5, 6)).astype(np.float32)  # Heads of 4.
  mask = rng.random((2, 3, 5, 6)) < 0.7
  outer, inner = mapped in ("outer", "both"), mapped in ("inner", "both")
  mask = mask[slice(None) if outer else 0]
  mask = mask[:, slice(None) if inner else 0] if outer else mask[slice(None) if inner else 0]

  def fun(x, mask):
    return jax.grad(lambda x: _loss(x, mask, None)[0])(x)

  nested = jax.vmap(fun, (0, 0 if inner else None))
  got = jax.jit(jax.vmap(nested, (0, 0 if outer else None)))(x, mask)
  one = jax.jit(fun)
  for i in range(2):
    for j in range(3):
      part = mask[i] if outer else mask
      _close(got[i, j], one(x[i, j], part[j] if inner else part))


def test_vmap_over_another_axis():
  x, mask, _, _ = _arrays()
  got = jax.vmap(lambda x: fused_scale_mask_softmax(x, mask), in_axes=1, out_axes=1)(x[:, :, None])
  _close(got[:, :, 0], fused_scale_mask_softmax(x, mask))


def test_vmap_is_one_kernel_call_and_broadcast_masks_stay_small():
  x, mask, _, _ = _arrays()
  for mapped in (mask, mask[:1]):
    axes = (0, 0 if mapped.shape[0] > 1 else None)
    one = mapped if axes[1] == 0 else mapped[0]
    fun = jax.vmap(lambda x, m: fused_scale_mask_softmax(x, m, implementation="cpu"), axes)
    text = str(jax.make_jaxpr(fun)(x, one))
    assert text.count(f"target_name={_FORWARD}") == 1
    assert "bool[4,8,6,10]" not in text
    assert f"bool[{mapped.shape[0]},1,6,10]" in text


# --- jit, scan, checkpoint ---


def test_one_compilation_for_masks_of_one_shape():
  x, mask, _, offset = _arrays()
  step = jax.jit(_gradients(_loss))
  for m in (mask, ~mask):
    _close(step(x, m, offset[0]), _gradients(_loss)(x, m, offset[0]))
  assert step._cache_size() == 1


def test_backward_needs_only_probabilities():
  x, *_ = _arrays()

  def fun(x):
    return fused_scale_mask_softmax(x, scale=0.5, implementation="cpu")

  residuals = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(fun, x)[1], x))
  assert [r.shape for r in residuals] == [x.shape]


def test_gradient_of_a_mask_costs_nothing_unless_asked_for():
  x, _, bias, _ = _arrays()

  def loss(x, bias):
    return jnp.sum(jnp.sin(3 * fused_scale_mask_softmax(x, bias, implementation="cpu")))

  def compiled(argnums):
    return jax.jit(jax.grad(loss, argnums)).lower(x, bias).compile().as_text()

  without, plain = (
    compiled(0),
    jax.jit(jax.grad(lambda x: loss(x, None))).lower(x).compile().as_text(),
  )
  assert without.count(" reduce(") == plain.count(" reduce(") < compiled((0, 1)).count(" reduce(")


def test_checkpoint_and_scan():
  x, mask, _, offset = _arrays()

  def layer(x, _):
    return 5 * fused_scale_mask_softmax(x, mask, offset=offset[0]), None

  def loss(x, layer):
    return jnp.sin(jax.lax.scan(layer, x, None, length=3)[0]).sum()

  expected = jax.grad(loss)(x, layer)
  _close(jax.jit(jax.grad(lambda x: loss(x, jax.checkpoint(layer))))(x), expected)


# --- Shardings ---


def _mesh(axis_type, shape=(4,), names=("x",)):
  return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))


@pytest.mark.parametrize("implementation", [None, "cpu", "xla"])
def test_shard_map(implementation):
  x, mask, _, offset = _arrays()

  def local(x, mask, offset):
    loss, y = _loss(x, mask, offset, implementation=implementation)
    return jax.lax.psum(loss, "x"), y

  # The offset is replicated: its gradient is a sum over devices.
  sharded = jax.shard_map(
    local,
    mesh=_mesh(AxisType.Auto),
    in_specs=(P("x"), P("x"), P()),
    out_specs=(P(), P("x")),
    check_vma=True,
  )
  got = jax.jit(_gradients(sharded))(x, mask, offset[0])
  _close(got, _gradients_on_one_device(x, mask, offset[0]))


_SPECS = {"batch": P("x"), "heads": P(None, "x"), "batch_and_heads": P("x", "y")}


def _outputs(x, mask, offset):
  y, vjp = jax.vjp(lambda x, o: _loss(x, mask, o, implementation=None)[1], x, offset)
  return y, vjp(jnp.cos(y))


@pytest.mark.parametrize(
  ("operand", "spec"),
  in_turns(["none", "mask_per_batch", "bias_per_head", "shared_mask"], _SPECS),
)
def test_jit_keeps_batch_and_head_shardings(spec, operand):
  x, mask, _, _ = _arrays()
  mask = {
    "none": None,
    "mask_per_batch": mask,
    "bias_per_head": np.random.default_rng(0).standard_normal((1, 8, 6, 10)).astype(np.float32),
    "shared_mask": mask[:1],
  }[operand]
  is_2d = spec == "batch_and_heads"
  mesh = _mesh(AxisType.Auto, *(((2, 2), ("x", "y")) if is_2d else ()))
  sharding = NamedSharding(mesh, _SPECS[spec])

  def fun(x, mask):
    y, vjp = jax.vjp(lambda x: fused_scale_mask_softmax(x, mask, is_causal=True), x)
    return y, vjp(jnp.cos(y))[0]

  sharded = jax.device_put(x, sharding)
  compiled = jax.jit(fun).lower(sharded, mask).compile()
  for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
    assert collective not in compiled.as_text()
  got = compiled(sharded, mask)
  assert all(a.sharding.is_equivalent_to(sharding, 4) for a in got)
  _close(got, jax.jit(fun)(x, mask))


@pytest.mark.parametrize("spec", [P(None, None, "x"), P("x", None, None, None), P(None, "x")])
def test_jit_with_an_offset_is_right_whatever_the_sharding(spec):
  x, mask, _, offset = _arrays()
  x = np.concatenate([x, x], axis=2)[:, :, :8]
  mask = np.concatenate([mask, mask], axis=2)[:, :, :8]
  sharded = jax.device_put(x, NamedSharding(_mesh(AxisType.Auto), spec))
  got = jax.jit(_outputs)(sharded, mask, offset[0])
  _close(got, jax.jit(_outputs)(x, mask, offset[0]))


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
def test_explicit_axes(spec):
  x, mask, _, offset = _arrays()
  mesh = _mesh(AxisType.Explicit)
  expected = jax.jit(_outputs)(x, mask, offset[0])
  with jax.set_mesh(mesh):
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    got = jax.jit(_outputs)(sharded, mask, offset[0])
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
  _close(jax.device_get(got), jax.device_get(expected))


# --- Export, other platforms, donation ---


def test_export_round_trip():
  x, mask, _, offset = _arrays()

  operands = (x, mask, offset[0])
  allowed = [jax.export.DisabledSafetyCheck.custom_call(t) for t in (_FORWARD, _BACKWARD)]
  exported = jax.export.export(_gradients_on_one_device, disabled_checks=allowed)(*operands)
  restored = jax.export.deserialize(exported.serialize())
  _close(restored.call(*operands), _gradients_on_one_device(*operands))


def test_platforms_without_native_kernels_get_plain_jax():
  traced = jax.jit(fused_scale_mask_softmax).trace(_arrays()[0])
  assert _FORWARD not in traced.lower(lowering_platforms=("tpu",)).as_text()
  assert _FORWARD in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("k_len", [10, 40000])
def test_donation_works_in_place(k_len):
  x = np.random.default_rng(0).standard_normal((2, 3, k_len)).astype(np.float32)

  def fun(x, donate):
    y = fused_scale_mask_softmax(x + 1, is_causal=True, donate=donate, implementation="cpu")
    return jax.vjp(
      lambda x: fused_scale_mask_softmax(x, donate=donate, implementation="cpu"), 5 * y
    )[1](jnp.cos(y))

  texts = [jax.jit(fun, static_argnums=1).lower(x, d).compile().as_text() for d in (False, True)]
  calls = [[x for x in text.splitlines() if "jax_magi_softmax_" in x] for text in texts]
  assert len(calls[0]) == len(calls[1]) >= 2  # Forward and backward.
  for lines, is_donated in zip(calls, (False, True), strict=True):
    assert all(("output_to_operand_aliasing" in line) == is_donated for line in lines), lines
  results = [jax.jit(fun, static_argnums=1)(x, d) for d in (False, True)]
  np.testing.assert_array_equal(*results)


def test_donation_of_sharded_arrays():
  x, mask, _, _ = _arrays()
  sharding = NamedSharding(_mesh(AxisType.Auto), P(None, "x"))
  step = jax.jit(functools.partial(fused_scale_mask_softmax, donate=True), donate_argnums=0)
  got = step(jax.device_put(x, sharding), mask)
  assert got.sharding.is_equivalent_to(sharding, 4)
  _close(got, fused_scale_mask_softmax(x, mask))


def test_donated_input_may_be_used_again():
  x, *_ = _arrays()

  @jax.jit
  def fun(x):
    x = 2 * x
    y = fused_scale_mask_softmax(x, donate=True)
    return x, y

  doubled, y = fun(x)
  np.testing.assert_array_equal(doubled, 2 * x)
  _close(y, fused_scale_mask_softmax(2 * x))


# --- Explanations ---


def test_explanation_says_what_is_fused_and_where():
  x, mask, _, _ = _arrays()
  explanation = explain_softmax(
    x, mask, is_causal=True, window=(3, 0), offset="off-by-one", softmax_in_fp32=False
  )
  assert explanation.operation == ("scale + boolean mask + causal mask + window + offset + softmax")
  assert "cpu" in explanation.native and explanation.implementation in ("cpu", "cuda")
  assert any("softmax_in_fp32=False" in note for note in explanation.notes)
  assert "native kernels on cpu" in str(explanation)


def test_explanation_needs_types_alone():
  x, _, bias, (offset, *_) = _arrays()
  types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, bias, offset)]
  for scores, mask, logits in ((x, bias, offset), types):
    explanation = explain_softmax(scores, mask, offset=logits, implementation="xla")
    assert explanation.operation == "scale + additive mask + offset + softmax"
    assert explanation.implementation == "xla" and explanation.native == ()


def test_explanation_of_a_repeated_mask():
  x = np.zeros((2, 3, 4, 5, 6), np.float32)
  for shape, is_repeated in (((2, 1, 1, 5, 6), True), ((2, 3, 1, 5, 6), False), ((5, 6), False)):
    notes = explain_softmax(x, np.ones(shape, bool)).notes
    assert any("repeated" in note for note in notes) == is_repeated


@pytest.mark.parametrize("name", ["explain", "aliases"])
def test_no_keyword_is_hidden(name):
  """Explanations are a function of their own, and memory is given away by `donate`."""
  with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
    fused_scale_mask_softmax(np.zeros((2, 3), np.float32), **{name: True})


def test_fallbacks_are_logged_once(caplog):
  backends._log_once.cache_clear()
  with caplog.at_level(logging.DEBUG, logger="jax_magi"), jax.enable_x64(True):
    for dtype in (np.float32, np.float64, np.float64):
      fused_scale_mask_softmax(np.zeros((2, 3), dtype))
  (record,) = caplog.records
  assert record.levelno == logging.WARNING and "not float64" in record.getMessage()


# --- Errors ---


@pytest.mark.parametrize(
  ("change", "error", "match"),
  [
    ({"x": 3.0}, ValueError, "x must be an array"),
    ({"x": jnp.zeros(3)}, ValueError, r"x must be \[\.\.\., heads, q_len, k_len\].* got \[3\]"),
    ({"x": jnp.zeros((2, 3), jnp.int32)}, ValueError, "floating point numbers, got int32"),
    ({"x": jnp.zeros((2, 3), jnp.float8_e4m3fn)}, NotImplementedError, "float8_e4m3fn"),
    ({"mask": np.zeros((5, 5), bool)}, ValueError, r"mask must broadcast to x's \[2, 3, 4, 5\]"),
    ({"mask": np.zeros((3, 2, 3, 4, 5), bool)}, ValueError, "mask must broadcast"),
    ({"mask": np.zeros(5, np.int32)}, ValueError, "boolean .* got int32; .* mask != 0"),
    ({"mask": AttentionMask.causal(5)}, ValueError, "to_dense"),
    ({"scale": "big"}, ValueError, "scale must be a number"),
    ({"scale": np.inf}, ValueError, "scale must be finite"),
    ({"is_causal": 1}, ValueError, "is_causal must be True or False, got 1"),
    ({"donate": None}, ValueError, "donate must be True or False"),
    ({"window": (1, 2, 3)}, ValueError, "window must be an integer or a pair"),
    ({"window": (-1, 0)}, ValueError, "left must be None or an integer"),
    ({"offset": "off by one"}, ValueError, 'offset must be None, "off-by-one" or an array'),
    ({"offset": np.zeros(4)}, ValueError, r"offset must be \[3\].* got \[4\]"),
    ({"offset": np.zeros(3, int)}, ValueError, "offset must hold floating point"),
    ({"implementation": "tpu"}, ValueError, "implementation must be one of"),
  ],
)
def test_mistakes_are_named(change, error, match):
  arguments = {"x": jnp.zeros((2, 3, 4, 5))} | change
  with pytest.raises(error, match=match):
    fused_scale_mask_softmax(**arguments)


def test_traced_scale_says_what_to_do():
  with pytest.raises(ValueError, match="multiply x by it"):
    jax.jit(lambda x, scale: fused_scale_mask_softmax(x, scale=scale))(jnp.zeros((2, 3)), 1.0)


def test_implementation_that_cannot_be_used_says_why():
  with jax.enable_x64(True), pytest.raises(NotImplementedError, match="not float64"):
    fused_scale_mask_softmax(jnp.zeros((2, 3), np.float64), implementation="cpu")
