"""Reports which implementation attention takes, and why."""

from __future__ import annotations

from typing import Any

import jax

from jax_magi._src.arguments import check_flag
from jax_magi._src.attention import checks
from jax_magi._src.attention.kernel_call import PLAIN
from jax_magi._src.native.explanation import Explanation as Explanation  # The result, exported.
from jax_magi._src.native.explanation import explain


def explain_attention(
  q: Any,
  k: Any,
  v: Any,
  *,
  bias: Any = None,
  alibi_slopes: Any = None,
  deterministic: bool = False,
  implementation: str | None = None,
) -> Explanation:
  """Reports which implementation a call of `attention` would take, and why. Computes nothing.

  Operands may be arrays or `jax.ShapeDtypeStruct`s. If a call takes plain JAX although JAX's
  default platform has kernels, `attention` itself logs that under "jax_magi", once per reason.

  Args:
    q: `[q_len, num_q_heads, head_dim]`, or with a leading batch.
    k: `[k_len, num_kv_heads, head_dim]`, or with a leading batch.
    v: `[k_len, num_kv_heads, value_dim]`, or with a leading batch.
    bias: as in `attention`, or with a leading batch.
    alibi_slopes: as in `attention`.
    deterministic: as in `attention`. With True, the gradient of the bias is considered too.
    implementation: as in `attention`.
  """
  for name, x in (("q", q), ("k", k), ("v", v)):
    if len(getattr(x, "shape", ())) not in (3, 4):
      raise ValueError(f"{name} must be [length, num_heads, head_dim], or with a leading batch")
  q, k, v = (jax.ShapeDtypeStruct((1, *x.shape)[-4:], x.dtype) for x in (q, k, v))
  q_row, k_row, v_row = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (q, k, v))
  checks.check_qkv(q_row, k_row, v_row)
  implementation = checks.plain_as(implementation)
  bias_type = None
  if bias is not None:
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    checks.check_broadcastable("bias", bias, shape)
    bias_type = jax.ShapeDtypeStruct((1,) * (4 - len(bias.shape)) + tuple(bias.shape), bias.dtype)
  in_order = bias_type if check_flag("deterministic", deterministic) else None
  terms = {"bias": bias, "ALiBi slopes": alibi_slopes}
  return explain(
    " + ".join(["attention", *(name for name, x in terms.items() if x is not None)]),
    implementation,
    PLAIN,
    lambda backend: backend.attention_obstacle(q, v, bias_in_order=in_order),
    kernels_of=lambda backend: backend.for_attention(q, v),
  )
