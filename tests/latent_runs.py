"""Attention over expanded latents on the ranks of a mesh and on one device, for tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_magi
from tests.compilation import quick_jit
from tests.cp_runs import NATIVE

HEADS, NOPE, ROPE, VALUE, RANK = 4, 8, 4, 8, 16
_MOST_SLICES = 8  # Of a mask.


def make_operands(rng, length, dtype=np.float32):
  """q, latents, parameters, and cotangents of out and lse."""

  def normal(*shape, factor=1.0):
    return (factor * rng.standard_normal(shape)).astype(dtype)

  latent = {"kv": normal(length, RANK), "rope": normal(length, ROPE)}
  params = {
    "scale": (1 + 0.1 * rng.standard_normal(RANK)).astype(np.float32),
    "kv_b": normal(RANK, HEADS, NOPE + VALUE, factor=RANK**-0.5),
  }
  q = normal(length, HEADS, NOPE + ROPE)
  dlse = rng.standard_normal((length, HEADS)).astype(np.float32)
  return q, latent, params, (normal(length, HEADS, VALUE), dlse)


def expand(rows, params):
  """Computes the keys and values of MLA. Without an epsilon, rows of zeros have no finite norm."""
  kv = rows["kv"].astype(np.float32)
  kv = kv * jax.lax.rsqrt(jnp.mean(kv**2, axis=-1, keepdims=True)) * params["scale"][None]
  both = jnp.einsum("tr,rhd->thd", kv.astype(rows["kv"].dtype), params["kv_b"])
  shape = (*both.shape[:2], ROPE)
  rope = jnp.broadcast_to(rows["rope"][:, None].astype(both.dtype), shape)
  return jnp.concatenate([both[..., :NOPE], rope], axis=-1), both[..., NOPE:]


def on_one_device(operands, mask, attend=None, **options):
  """Results and gradients by name. `attend` of q, latent and params replaces expanded attention."""
  q, latent, params, cotangents = operands
  fixed = tuple(sorted(({"implementation": NATIVE} | options).items()))
  # Masks of one length share a program.
  return _on_one_device(attend, fixed, q, latent, params, cotangents, mask.pad(_MOST_SLICES))


@functools.partial(quick_jit, static_argnums=(0, 1))
def _on_one_device(attend, options, q, latent, params, cotangents, mask):
  def expanded(q, latent, params):
    given = dict(options) | {"return_max_logits": True}
    return jax_magi.attention(q, *expand(latent, params), mask, **given)

  def fun(q, latent, params):
    out, meta = (attend or expanded)(q, latent, params)
    return (out, meta.lse), meta.max_logits

  (out, lse), vjp, max_logits = jax.vjp(fun, q, latent, params, has_aux=True)
  return named(out, lse, max_logits, vjp(cotangents))


def named(out, lse, max_logits, gradients):
  dq, dlatent, dparams = gradients
  return {
    "out": out,
    "lse": lse,
    "max_logits": max_logits,
    "dq": dq,
    **{f"latent {name}": x for name, x in dlatent.items()},
    **{f"params {name}": x for name, x in dparams.items()},
  }


@functools.partial(quick_jit, static_argnums=(0, 1))
def _on_ranks(mesh, options, q, latent, params, cotangents, key):
  check_vma = dict(options).get("check_vma", True)
  given = {name: x for name, x in options if name != "check_vma"}
  given.setdefault("implementation", NATIVE)

  def step(q, latent, params, key):
    return jax_magi.calc_latent_attn(
      q, latent, key, expand=lambda rows: expand(rows, params), return_max_logits=True, **given
    )

  attend = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P("cp"), P("cp"), P(), P("cp")),
    out_specs=(P("cp"), jax_magi.AttnForwardMeta(P("cp"), P())),
    check_vma=check_vma,
  )

  def fun(q, latent, params):
    out, meta = attend(q, latent, params, key)
    return (out, meta.lse), meta.max_logits

  (out, lse), vjp, max_logits = jax.vjp(fun, q, latent, params, has_aux=True)
  return named(out, lse, max_logits, vjp(cotangents))


def on_ranks(operands, key, mesh, **options):
  """The same from all ranks of a mesh, in the order of the sequence."""
  q, latent, params, cotangents = operands
  q, latent, cotangents = jax.tree.map(lambda x: jax_magi.dispatch(x, key), (q, latent, cotangents))
  found = _on_ranks(mesh, tuple(sorted(options.items())), q, latent, params, cotangents, key)
  whole = ("max_logits", "params")
  return {
    name: x if name.startswith(whole) else jax_magi.undispatch(np.asarray(x), key)
    for name, x in found.items()
  }


def check_equal(ours, expected):
  """float32: 1e-5 of each result's scale."""
  assert set(ours) == set(expected)
  for name, want in expected.items():
    want, got = np.asarray(want, np.float64), np.asarray(ours[name], np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=name)
    scale = max(np.abs(want[finite]).max(initial=0.0), 1.0)
    error = np.abs(got[finite] - want[finite]).max(initial=0.0)
    assert error <= 1e-5 * scale, f"{name}: error {error:.3g}, scale {scale:.3g}"
