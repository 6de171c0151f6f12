"""The one accuracy rule, and the machinery to apply it.

With a float64 dense computation as truth, our error is at most twice that of the plain computation
in the same dtype, plus one ulp at the scale of the output. float32 holds 1e-5 instead.
"""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import ml_dtypes
import numpy as np

import jax_magi
from tests import dense
from tests.compilation import quick_jit

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


@dataclasses.dataclass(frozen=True)
class Inputs:
  """The operands of a call, and the cotangents of its results."""

  q: np.ndarray
  k: np.ndarray
  v: np.ndarray
  sink: np.ndarray | None
  dout: np.ndarray
  dlse: np.ndarray
  bias: np.ndarray | None = None
  alibi_slopes: np.ndarray | None = None

  @property
  def operands(self):
    return self.q, self.k, self.v, self.sink

  @property
  def all_operands(self):
    return *self.operands, self.bias, self.alibi_slopes

  @property
  def cotangents(self):
    return self.dout, self.dlse


def make_inputs(
  rng: np.random.Generator,
  dtype,
  q_len: int,
  k_len: int,
  num_q_heads: int,
  num_kv_heads: int,
  head_dim: int,
  value_dim: int,
  num_sinks: int | None = None,
  logit_scale: float = 1.0,
  bias: str | None = None,
  bias_dtype=None,
  has_alibi: bool = False,
) -> Inputs:
  """Random operands; `num_sinks` None is no sink, 0 the one-dimensional form.

  `bias` names the dimensions of one, as "hqk" or "1qk"; None is no bias. A tenth of it is -inf.
  """

  def normal(*shape, factor=1.0):
    return (factor * rng.standard_normal(shape)).astype(dtype)

  sink = None
  if num_sinks is not None:
    shape = (num_q_heads,) if num_sinks == 0 else (num_sinks, num_q_heads)
    sink = rng.standard_normal(shape).astype(np.float32)
  inputs = Inputs(
    q=normal(q_len, num_q_heads, head_dim, factor=logit_scale),
    k=normal(k_len, num_kv_heads, head_dim),
    v=normal(k_len, num_kv_heads, value_dim),
    sink=sink,
    dout=normal(q_len, num_q_heads, value_dim),
    dlse=rng.standard_normal((q_len, num_q_heads)).astype(np.float32),
  )
  if bias is not None:
    sizes = {"h": num_q_heads, "q": q_len, "k": k_len, "1": 1}
    shape = tuple(sizes[letter] for letter in bias)
    values = np.where(rng.random(shape) < 0.1, -np.inf, rng.standard_normal(shape))
    inputs = dataclasses.replace(inputs, bias=values.astype(bias_dtype or dtype))
  if has_alibi:
    slopes = rng.uniform(-0.1, 0.3, num_q_heads).astype(np.float32)
    inputs = dataclasses.replace(inputs, alibi_slopes=slopes)
  return inputs


jit_once = functools.partial(quick_jit, static_argnames=("options",))


def _attention(operands, mask, options):
  q, k, v, sink, bias, slopes = operands
  terms = {"sink": sink, "bias": bias, "alibi_slopes": slopes}
  return jax_magi.attention(q, k, v, mask, return_max_logits=True, **terms, **dict(options))


@jit_once
def _ours(operands, cotangents, mask, options):
  def fun(*operands):
    out, meta = _attention(operands, mask, options)
    return (out, meta.lse), meta.max_logits

  (out, lse), vjp, max_logits = jax.vjp(fun, *operands, has_aux=True)
  return named_results(out, lse, max_logits, vjp(cotangents))


def named_results(out, lse, max_logits, gradients) -> dict[str, Any]:
  """The results of a call and the gradients of its operands, by name."""
  names = ("dq", "dk", "dv", "dsink", "dbias", "dslopes")
  grads = {n: g for n, g in zip(names, gradients, strict=False) if g is not None}
  return {"out": out, "lse": lse, "max_logits": max_logits, **grads}


@jit_once
def _ours_forward(operands, mask, options):
  out, meta = _attention(operands, mask, options)
  return named_results(out, meta.lse, meta.max_logits, ())


def run_attention(
  inputs: Inputs,
  mask: jax_magi.AttentionMask,
  *,
  forward_only=False,
  is_mask_known=False,
  **options,
) -> dict[str, Any]:
  """Results of ours, forward and backward, by name.

  The mask is an argument of the program, or a constant of it: `is_mask_known`.
  """
  fixed = tuple(sorted(options.items()))
  if forward_only:
    ours = _ours_forward(inputs.all_operands, mask, fixed)
  elif is_mask_known:
    known = functools.partial(_ours.__wrapped__, mask=mask)
    ours = jit_once(known)(inputs.all_operands, inputs.cotangents, options=fixed)
  else:
    ours = _ours(inputs.all_operands, inputs.cotangents, mask, fixed)
  assert ours["out"].dtype == inputs.q.dtype
  assert ours["lse"].dtype == ours["max_logits"].dtype == np.float32
  return ours


def check_attention(
  inputs: Inputs,
  mask: jax_magi.AttentionMask,
  implementation,
  *,
  forward_only=False,
  deterministic=False,
  sm_margin=0,
  is_mask_known=False,
  **options,
):
  """Runs ours as `run_attention` does, and holds every result to the rule."""
  ours = run_attention(
    inputs,
    mask,
    forward_only=forward_only,
    is_mask_known=is_mask_known,
    implementation=implementation,
    deterministic=deterministic,
    sm_margin=sm_margin,
    **options,
  )
  check_results(ours, inputs, mask, **options)


def check_results(ours: dict[str, Any], inputs: Inputs, mask: jax_magi.AttentionMask, **options):
  """Holds results, by name, to the rule: those of a call with these inputs, however it was made."""
  truth, plain = expected_results(inputs, mask, **options)
  for name, value in ours.items():
    check_close(name, value, truth[name], plain[name], inputs.q.dtype)


# The last expected results, by a digest of what they are of: neighbours often test the same call in
# several ways.
_last_expected: dict[bytes, tuple[dict[str, Any], dict[str, Any]]] = {}


def expected_results(
  inputs: Inputs, mask: jax_magi.AttentionMask, **options
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The truth, and what the plain computation in the inputs' dtype makes of it."""
  shown = mask.to_dense()
  digest = hashlib.blake2b(repr(sorted(options.items())).encode())
  for operand in (*inputs.all_operands, *inputs.cotangents, shown):
    x = np.asarray(0 if operand is None else operand)
    digest.update(f"{x.shape} {x.dtype}".encode() + x.tobytes())
  if (key := digest.digest()) not in _last_expected:
    _last_expected.clear()
    _last_expected[key] = _expected(inputs, shown, options)
  return _last_expected[key]


def _expected(
  inputs: Inputs, shown: np.ndarray, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
  def computed_in(dtype):
    return dense.attention(
      *inputs.operands[:3],
      shown,
      dtype=dtype,
      cotangents=inputs.cotangents,
      sink=inputs.sink,
      bias=inputs.bias,
      alibi_slopes=inputs.alibi_slopes,
      **options,
    )

  truth = computed_in(np.float64)
  # float32 is not compared with the plain computation.
  return truth, truth if inputs.q.dtype == np.float32 else computed_in(inputs.q.dtype)


def check_close(name: str, ours, truth, plain, dtype) -> None:
  """Holds one result to the rule. Infinities must be the same in ours and the truth."""
  ours, truth, plain = (np.asarray(x).astype(np.float64) for x in (ours, truth, plain))
  assert ours.shape == truth.shape, f"{name}: {ours.shape} is not {truth.shape}"
  if truth.size == 0:
    return
  finite = np.isfinite(truth)
  np.testing.assert_array_equal(ours[~finite], truth[~finite], err_msg=f"{name}: infinities")
  error = np.abs(np.where(finite, ours - np.where(finite, truth, 0), 0)).max()
  scale = np.abs(truth[finite]).max(initial=0.0)
  if dtype == np.float32:
    allowed = 1e-5 * max(scale, 1.0)
  else:
    comparable = finite & np.isfinite(plain)
    plain_error = np.abs(plain[comparable] - truth[comparable]).max(initial=0.0)
    allowed = 2 * plain_error + float(ml_dtypes.finfo(dtype).eps) * scale
  assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g} (scale {scale:.3g})"
