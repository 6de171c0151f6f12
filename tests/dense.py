"""Dense attention and softmax in NumPy, with their gradients: what results are compared with.

In float64 they are the truth. In a 16-bit dtype they are the plain computation whose error sets the
tolerance: every operation is rounded to that dtype, as in a program of XLA that computes
`jax_magi.reference` and its derivative. There, products of matrices and the sum of a softmax are
accumulated in float32, and sums of gradients in the dtype itself, a few terms in a row.
Nothing here is compiled. `tests/test_dense.py` holds it to `jax_magi.reference`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

Rounding = Callable[[np.ndarray], np.ndarray]


def _arithmetic(dtype) -> tuple[np.dtype, Rounding]:
  """The dtype that arrays are kept in, and what is done to the result of each operation."""
  if dtype == np.float64:
    return np.dtype(np.float64), lambda x: x

  def rounded(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # What is too large for 16 bits becomes infinite, as in XLA.
      return x.astype(dtype).astype(np.float32)

  return np.dtype(np.float32), rounded


def attention(
  q,
  k,
  v,
  dense_mask,
  *,
  dtype,
  cotangents=None,
  softmax_scale=None,
  softcap=0.0,
  sink=None,
  bias=None,
  alibi_slopes=None,
) -> dict[str, np.ndarray]:
  """Attention as `jax_magi.reference.attention` defines it, and its gradients.

  Args:
    q: `[q_len, num_q_heads, head_dim]`.
    k: `[k_len, num_kv_heads, head_dim]`.
    v: `[k_len, num_kv_heads, value_dim]`.
    dense_mask: bool, broadcast to `[num_q_heads, q_len, k_len]`; True is visible.
    dtype: what to compute in: float64, or a 16-bit dtype.
    cotangents: (dout, dlse); None computes no gradients. dlse may be None.
    softmax_scale: None is `head_dim ** -0.5`.
    softcap: 0 is none.
    sink: `[num_q_heads]` or `[num_sink, num_q_heads]`.
    bias: broadcast to `[num_q_heads, q_len, k_len]`; -inf hides a pair.
    alibi_slopes: `[num_q_heads]`.

  Returns:
    out, lse and max_logits, and dq, dk, dv, dsink, dbias and dslopes of operands that are there.
  """
  kept, rounded = _arithmetic(dtype)

  def operand(x):
    return None if x is None else rounded(np.asarray(x).astype(kept))

  num_heads, group = q.shape[1], q.shape[1] // k.shape[1]
  q, k, v = (operand(x).transpose(1, 0, 2) for x in (q, k, v))  # [heads, length, dim]
  bias, slopes = operand(bias), operand(alibi_slopes)
  sinks = np.zeros((0, num_heads), kept) if sink is None else np.atleast_2d(operand(sink))
  dout, dlse = (None, None) if cotangents is None else map(operand, cotangents)

  # One head at a time: its arrays of pairs fit the caches, or at least the memory of one process
  # of many.
  heads = []
  for h in range(num_heads):
    one = slice(h, h + 1)
    of_head = {"sinks": sinks[:, one], "slopes": None if slopes is None else slopes[one]}
    of_head |= {name: _of_head(x, h) for name, x in (("mask", dense_mask), ("bias", bias))}
    if cotangents is not None:
      of_head["dout"] = dout[:, one].transpose(1, 0, 2)
      of_head["dlse"] = None if dlse is None else dlse[:, one].T
    kv_head = slice(h // group, h // group + 1)
    scale = operand(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    numbers = {"scale": scale, "softcap": operand(softcap), "rounded": rounded}
    heads.append(_attention_of_heads(q[one], k[kv_head], v[kv_head], **of_head, **numbers))
  found = {name: np.concatenate([head[name] for head in heads]) for name in heads[0]}

  results = {"out": found["out"].transpose(1, 0, 2), "lse": found["lse"].T}
  results["max_logits"] = found["max_logits"]
  if cotangents is None:
    return results

  def summed_by_group(x):
    """From `[num_q_heads, k_len, dim]` to `[k_len, num_kv_heads, dim]`."""
    return _summed(x.reshape(-1, group, *x.shape[1:]), (1,), rounded).transpose(1, 0, 2)

  if sink is not None:
    results["dsink"] = found["dsink"].T.reshape(np.shape(sink))
  if bias is not None:
    results["dbias"] = _summed_to(bias.shape, found["dlogits"], rounded)
  if slopes is not None:
    results["dslopes"] = found["dslopes"]
  results["dq"] = found["dq"].transpose(1, 0, 2)
  return results | {name: summed_by_group(found[name]) for name in ("dk", "dv")}


def _of_head(x, h: int) -> np.ndarray | None:
  """What head `h` has of an array that is broadcast to `[heads, q_len, k_len]`."""
  if x is None or np.ndim(x) < 3 or x.shape[0] == 1:
    return x
  return x[h : h + 1]


def _attention_of_heads(
  q, k, v, *, mask, bias, slopes, sinks, scale, softcap, rounded, dout=None, dlse=None
) -> dict[str, np.ndarray]:
  """`attention` of heads in front, each with a kv head of its own."""
  k_len = k.shape[1]
  logits = rounded(rounded(q @ k.transpose(0, 2, 1)) * scale)
  mask = np.broadcast_to(mask, logits.shape)
  if bias is not None:
    logits, mask = rounded(logits + bias), mask & (bias != -np.inf)
  distances = np.arange(k_len)[None, :] - np.arange(q.shape[1])[:, None]
  distances = rounded(distances.astype(q.dtype))
  if slopes is not None:
    logits = rounded(logits + rounded(slopes[:, None, None] * distances))
  max_logits = np.where(mask, logits, -np.inf).max(axis=(1, 2), initial=-np.inf)
  if softcap:
    capped = rounded(np.tanh(rounded(logits / softcap)))
    logits = rounded(softcap * capped)
  columns = np.broadcast_to(sinks.T[:, None, :], (*logits.shape[:2], len(sinks)))
  softmax = MaskedSoftmax(
    np.concatenate([logits, columns], axis=-1),
    np.concatenate([mask, columns > -np.inf], axis=-1),
    rounded,
  )
  shown = softmax.probabilities[..., :k_len]
  results = {"out": rounded(shown @ v), "lse": softmax.lse, "max_logits": max_logits}
  if dout is None:
    return results

  dshown = np.zeros_like(softmax.probabilities)
  dshown[..., :k_len] = rounded(dout @ v.transpose(0, 2, 1))
  dlogits = softmax.gradient(dshown, dlse)
  if len(sinks):
    results["dsink"] = _summed(dlogits[..., k_len:], (1,), rounded)
  dlogits = dlogits[..., :k_len]
  if softcap:
    dlogits = rounded(rounded(dlogits * softcap) * rounded(1 - capped))
    dlogits = rounded(rounded(dlogits + rounded(dlogits * capped)) / softcap)
  if bias is not None:
    results["dlogits"] = dlogits
  if slopes is not None:
    results["dslopes"] = _summed(rounded(dlogits * distances), (1, 2), rounded)
  dscores = rounded(dlogits * scale)
  results["dq"] = rounded(dscores @ k)
  results["dk"] = rounded(dscores.transpose(0, 2, 1) @ q)
  results["dv"] = rounded(shown.transpose(0, 2, 1) @ dout)
  return results


def softmax(
  x, dy=None, *, dtype, scale=1.0, mask=None, bias=None, offset=None
) -> dict[str, np.ndarray]:
  """Scale, mask, softmax as `jax_magi.reference.softmax` defines them, and the gradients.

  Args:
    x: `[..., heads, q_len, k_len]` or `[q_len, k_len]`.
    dy: cotangent, like x; None computes no gradients.
    dtype: what to compute in: float64, or a 16-bit dtype.
    scale: factor of x.
    mask: bool, True is visible; broadcast to x.
    bias: added to the scaled x, likewise.
    offset: `[heads]`, one more logit in each row.

  Returns:
    y, and dx, dbias and doffset of operands that are there.
  """
  kept, rounded = _arithmetic(dtype)

  def operand(x):
    return rounded(np.asarray(x).astype(kept))

  logits = rounded(operand(x) * operand(scale))
  if bias is not None:
    logits = rounded(logits + operand(bias))
  mask = np.broadcast_to(True if mask is None else mask, logits.shape) & (logits != -np.inf)
  extra = np.full((*logits.shape[:-1], 1), -np.inf, kept)
  if offset is not None:
    extra[:] = operand(offset).reshape(-1, *[1] * min(logits.ndim - 1, 2))
  softmax = MaskedSoftmax(
    np.concatenate([logits, extra], axis=-1),
    np.concatenate([mask, extra > -np.inf], axis=-1),
    rounded,
  )
  results = {"y": softmax.probabilities[..., :-1]}
  if dy is None:
    return results
  padded = np.zeros_like(softmax.probabilities)
  padded[..., :-1] = operand(dy)
  dlogits = softmax.gradient(padded, None)
  results["dx"] = rounded(dlogits[..., :-1] * operand(scale))
  if bias is not None:
    results["dbias"] = _summed_to(np.shape(bias), dlogits[..., :-1], rounded)
  if offset is not None:
    doffset = _summed(dlogits[..., -1], (-1,), rounded)  # [..., heads], or no dimension at all.
    results["doffset"] = _summed_to(np.shape(offset), np.atleast_1d(doffset), rounded)
  return results


class MaskedSoftmax:
  """Softmax and logsumexp over the last axis, of what the mask shows."""

  def __init__(self, logits: np.ndarray, mask: np.ndarray, rounded: Rounding):
    """`rounded` is what is done to the result of each operation."""
    self._rounded = rounded
    largest = np.where(mask, logits, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
    largest = np.where(largest == -np.inf, 0, largest)
    shifted = np.where(mask, logits, largest) - largest
    self._weights = np.where(mask, rounded(np.exp(rounded(shifted))), 0)
    total = rounded(self._weights.sum(axis=-1, keepdims=True))
    self._sees_nothing = total == 0
    self._total = np.where(self._sees_nothing, 1, total)
    lse = rounded(largest + rounded(np.log(self._total)))
    self.lse = np.where(self._sees_nothing, -np.inf, lse)[..., 0]
    self.probabilities = rounded(self._weights / self._total)

  def gradient(self, dprobabilities: np.ndarray, dlse: np.ndarray | None) -> np.ndarray:
    """Of the logits; zero where they are hidden."""
    rounded, weights, total = self._rounded, self._weights, self._total
    inverse_square = rounded(1 / rounded(total * total))
    products = rounded(rounded(-dprobabilities * weights) * inverse_square)
    dtotal = _summed(products, (-1,), rounded)[..., None]
    if dlse is not None:
      dtotal = rounded(dtotal + rounded(dlse[..., None] / total))
    dtotal = np.where(self._sees_nothing, 0, dtotal)
    dweights = rounded(rounded(dprobabilities / total) + dtotal)
    return rounded(dweights * weights)


def _summed(x: np.ndarray, axes: tuple[int, ...], rounded: Rounding) -> np.ndarray:
  """The sum over some axes. Each addition is rounded."""
  if x.dtype == np.float64:
    return x.sum(axis=axes)
  terms = np.moveaxis(x, axes, range(len(axes)))
  terms = terms.reshape(-1, *terms.shape[len(axes) :])
  # XLA's CPU compiler adds up to 32 terms along each axis in sequence, and then adds those sums in
  # the same way. With half as many terms in sequence, our sums are at least as exact as XLA's.
  in_a_row = np.clip(np.prod([min(x.shape[axis], 32) for axis in axes]) // 2, 16, 512)
  while len(terms) > 1:
    num_lanes = -(-len(terms) // in_a_row)
    padding = np.zeros((-len(terms) % num_lanes, *terms.shape[1:]), terms.dtype)
    rows = np.concatenate([terms, padding]).reshape(-1, num_lanes, *terms.shape[1:])
    terms = functools.reduce(lambda total, row: rounded(total + row), rows)
  return terms.sum(axis=0)


def _summed_to(shape: tuple[int, ...], x: np.ndarray, rounded: Rounding) -> np.ndarray:
  """The sum of `x` over the axes along which an array of this shape was broadcast to it."""
  new = x.ndim - len(shape)
  axes = [new + axis for axis, size in enumerate(shape) if size == 1 != x.shape[new + axis]]
  return _summed(x, (*range(new), *axes), rounded).reshape(shape) if new or axes else x
