"""jax.export of attention, and programs for platforms without kernels."""

import jax
import jax.export
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask
from tests.arrays import normals

_TARGET = "jax_magi_attention_forward"
_BATCH = normals((4, 64, 8, 16), (4, 64, 4, 16), (4, 64, 4, 16))
_SLICES = AttentionMask.from_cu_seqlens([0, 20, 64], causal=True).slices


def _exportable(q, k, v, slices):
  mask = AttentionMask(slices, q.shape[0], k.shape[0])
  return jax_magi.attention(q, k, v, mask)[0]


def test_export_round_trip():
  arguments = (*(x[0] for x in _BATCH), _SLICES)
  allowed = [jax.export.DisabledSafetyCheck.custom_call(_TARGET)]
  exported = jax.export.export(jax.jit(_exportable), disabled_checks=allowed)(*arguments)
  restored = jax.export.deserialize(exported.serialize())
  np.testing.assert_array_equal(restored.call(*arguments), _exportable(*arguments))


def test_export_of_shard_map():
  mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
  q, k, v = (jax.device_put(x, NamedSharding(mesh, P("x"))) for x in _BATCH)
  slices = _SLICES

  def local(q, k, v, slices):
    return jax.vmap(_exportable, (0, 0, 0, None))(q, k, v, slices)

  specs = (P("x"), P("x"), P("x"), P())
  fun = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("x")))
  allowed = [jax.export.DisabledSafetyCheck.custom_call(_TARGET)]
  exported = jax.export.export(fun, disabled_checks=allowed)(q, k, v, slices)
  restored = jax.export.deserialize(exported.serialize())
  got = jax.jit(restored.call)(q, k, v, slices)
  np.testing.assert_array_equal(got, fun(q, k, v, slices))


def test_platforms_without_native_kernels_get_the_blockwise_path():
  arguments = (*(x[0] for x in _BATCH), _SLICES)
  traced = jax.jit(_exportable).trace(*arguments)
  assert _TARGET not in traced.lower(lowering_platforms=("tpu",)).as_text()
  assert _TARGET in traced.lower(lowering_platforms=("cpu",)).as_text()
