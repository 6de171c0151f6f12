"""QK-Clip's statistics over microbatches, batch and devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi.optim import apply_qk_clip, muon_clip, reduce_max_logits
from tests.arrays import normal
from tests.clip_model import (
  EMBED,
  HEADS,
  LAYERS,
  MATRICES,
  PROJECTIONS,
  broken_statistics,
  make_grads,
  make_params,
)
from tests.compilation import quick_jit

pytestmark = pytest.mark.usefixtures("with_promotion")  # Optax needs it.


def test_reduce_keeps_layers_and_passes_no_gradient():
  x = normal(5, LAYERS, 7, HEADS, seed=0)
  np.testing.assert_array_equal(reduce_max_logits(x, (0, 2)), x.max(axis=(0, 2)))
  np.testing.assert_array_equal(reduce_max_logits({"a": x}, 0)["a"], x.max(axis=0))
  np.testing.assert_array_equal(reduce_max_logits(x), x)
  assert not jax.grad(lambda x: reduce_max_logits(x, 0).sum())(x).any()
  np.testing.assert_array_equal(reduce_max_logits(x[:0], 0), np.full(x.shape[1:], -np.inf))


def _mesh(**axes):
  types = (AxisType.Auto,) * len(axes)
  return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def test_reduce_over_devices_keeps_dtypes():
  x = {"a": normal(4, HEADS).astype(jnp.bfloat16), "b": normal(4, HEADS, seed=1)}
  reduce = functools.partial(reduce_max_logits, axis_name="data")
  found = jax.shard_map(reduce, mesh=_mesh(data=4), in_specs=P("data"), out_specs=P())(x)
  for name, value in x.items():
    assert found[name].dtype == value.dtype
    np.testing.assert_array_equal(found[name], value.max(axis=0, keepdims=True))


@pytest.mark.parametrize("device", range(4))
def test_nan_on_one_device_is_not_lost(device):
  """XLA's maximum over devices drops NaN."""
  mesh = _mesh(data=4)
  x = np.ones((4, HEADS), np.float32)
  x[device, 2] = np.nan
  x = jax.device_put(x, NamedSharding(mesh, P("data")))
  expected = [1.0, 1.0, np.inf, 1.0]
  np.testing.assert_array_equal(jax.jit(lambda x: reduce_max_logits(x, 0))(x), expected)
  over_devices = jax.shard_map(
    lambda x: reduce_max_logits(x[0], axis_name="data"),
    mesh=mesh,
    in_specs=P("data"),
    out_specs=P(),
  )
  np.testing.assert_array_equal(jax.jit(over_devices)(x), expected)


def _qkv(params, x):
  """q, k and v of one layer, for a batch."""
  return [jnp.einsum("bte,ehd->bthd", x, params[name]) for name in ("q", "k", "v")]


def _batch_statistics(params, x):
  """[layers, batch, heads] of a scan over layers; each layer's input is the output before it."""

  def layer(x, params):
    q, k, v = _qkv(params, x)
    out, meta = jax_magi.dot_product_attention(
      q, k, v, is_causal=True, return_meta=True, return_max_logits=True
    )
    return jnp.einsum("bthd,hde->bte", out, params["o"]), meta.max_logits

  layers = {name: params[name] for name in ("q", "k", "v", "o")}
  return lax.scan(layer, 0.1 * x, layers)[1]


def test_data_parallel_clips_as_one_device_does():
  params, (grads,), x = make_params(), make_grads(1), normal(8, 20, EMBED, seed=7)
  optimizer = muon_clip(0.1, PROJECTIONS, MATRICES, threshold=1.0)

  @quick_jit
  def step(params, state, x):
    max_logits = reduce_max_logits(_batch_statistics(params, x), 1)
    updates, state = optimizer.update(grads, state, params, max_logits=max_logits)
    return optax.apply_updates(params, updates), max_logits

  expected, max_logits = step(params, optimizer.init(params), x)
  assert (max_logits > 1.0).any() and (max_logits < 1.0).any()
  mesh = _mesh(data=4)
  whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
  got, sharded = step(
    jax.device_put(params, whole), jax.device_put(optimizer.init(params), whole),
    jax.device_put(x, split),
  )  # fmt: skip
  np.testing.assert_allclose(sharded, max_logits, rtol=1e-5)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, expected)


def test_data_and_context_parallel_maximum_is_the_global_one():
  """The batch is split over one mesh axis, and queries over another: only both together count."""
  params, x = make_params(), 0.1 * normal(4, 32, EMBED, seed=7)
  layer = {name: params[name][0] for name in ("q", "k", "v")}
  q, k, v = _qkv(layer, x)
  _, meta = jax_magi.dot_product_attention(q, k, v, return_meta=True, return_max_logits=True)
  expected = meta.max_logits.max(axis=0)

  def local(q, k, v):
    _, meta = jax_magi.dot_product_attention(q, k, v, return_meta=True, return_max_logits=True)
    return reduce_max_logits(meta.max_logits, 0, axis_name=("data", "cp"))

  specs = (P("data", "cp"), P("data"), P("data"))
  over_devices = jax.shard_map(local, mesh=_mesh(data=2, cp=2), in_specs=specs, out_specs=P())
  np.testing.assert_allclose(jax.jit(over_devices)(q, k, v), expected, rtol=1e-6)


def test_sharded_weights_stay_sharded():
  mesh = _mesh(data=4)
  params = jax.device_put(make_params(), NamedSharding(mesh, P(None, "data")))
  clip = jax.jit(lambda p, m: apply_qk_clip(p, m, PROJECTIONS))
  clipped = clip(params, broken_statistics(0.0))
  assert clipped["q"].sharding.is_equivalent_to(params["q"].sharding, 4)
  text = clip.lower(params, broken_statistics(0.0)).compile().as_text()
  assert "all-gather" not in text and "all-reduce" not in text
