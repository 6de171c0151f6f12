"""Ways to call attention, and to tell a call what is visible, for random uses."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import jax_magi
from jax_magi import AttentionMask
from tests.accuracy import named_results
from tests.compilation import quick_jit
from tests.random_masks import (
  MAX_SLICES,
  random_cuts,
  random_mask,
  random_ranges,
  random_segment_ids,
)

_ROWS = 3
_TARGETS = tuple(f"jax_magi_attention_{name}" for name in ("forward", "backward", "tile_list"))


# --- how it is called ---
#
# From `call(operands, data)`, which returns ((out, lse), max_logits) of one row, to a function of
# operands, cotangents and data of all rows, which returns all results. `negated` is another `call`
# that computes the same.


def _with_gradients(call, operands, cotangents, data):
  (out, lse), vjp, max_logits = jax.vjp(lambda *x: call(x, data), *operands, has_aux=True)
  return named_results(out, lse, max_logits, vjp(cotangents))


def _row_by_row(one):
  def run(*rows):
    results = [one(*jax.tree.map(lambda x, i=i: x[i], rows)) for i in range(len(rows[0][0]))]
    return jax.tree.map(lambda *x: np.stack(x), *results)

  return run


def _scanned(call):
  """Processes the rows in a scan, with a carry that depends on each of them."""

  def run(operands, data):
    def step(largest, row):
      results, max_logits = call(*row)
      return jnp.maximum(largest, max_logits.max()), (results, max_logits)

    largest, (results, max_logits) = jax.lax.scan(step, -jnp.inf, (operands, data))
    # Of no effect, but the carry is used.
    return results, jnp.minimum(max_logits, largest)

  return run


def _either(call, negated):
  """Chooses at run time between two ways to compute the same result."""

  def run(operands, data):
    flag = operands[0][0, 0, 0] > 0
    return jax.lax.cond(flag, call, negated, operands, data)

  return run


def _exported(fun):
  checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in _TARGETS]
  made = {}

  def run(*rows):
    if not made:
      data = jax.export.export(jax.jit(fun), disabled_checks=checks)(*rows).serialize()
      made["call"] = quick_jit(jax.export.deserialize(data).call)
    return made["call"](*rows)

  return run


def _known(call):
  """The mask is a constant of the program."""

  @functools.cache
  def program(slices: bytes, shape: tuple[int, ...]):
    known = np.frombuffer(slices, np.int32).reshape(shape)
    return quick_jit(
      lambda operands, cotangents: _with_gradients(call, operands, cotangents, known)
    )

  def one(operands, cotangents, slices):
    return program(np.asarray(slices).tobytes(), slices.shape)(operands, cotangents)

  return _row_by_row(one)


_SAVE_NAMED = jax.checkpoint_policies.save_only_these_names(*jax_magi.CHECKPOINT_NAMES)


def _one(call):
  return functools.partial(_with_gradients, call)


def _eager(call, _):
  return _row_by_row(_one(call))


def _jit(call, _):
  return _row_by_row(quick_jit(_one(call)))


def _vmap(call, _):
  return jax.vmap(_one(call))


def _jit_of_vmap(call, _):
  return quick_jit(jax.vmap(_one(call)))


def _vmap_of_jit(call, _):
  return jax.vmap(quick_jit(_one(call)))


def _grad_of_vmap(call, _):
  return quick_jit(_one(jax.vmap(call)))


def _shared_mask(call, _):
  return quick_jit(jax.vmap(_one(call), (0, 0, None)))


def _grad_of_scan(call, _):
  return quick_jit(_one(_scanned(call)))


def _grad_of_checkpointed_scan(call, _):
  return quick_jit(_one(_scanned(jax.checkpoint(call))))


def _vmap_of_checkpoint(call, _):
  return quick_jit(jax.vmap(_one(jax.checkpoint(call, policy=_SAVE_NAMED))))


def _cond(call, negated):
  return quick_jit(_one(_scanned(_either(call, negated))))


def _vmap_of_cond(call, negated):
  return quick_jit(jax.vmap(_one(_either(call, negated))))


def _export(call, _):
  return _exported(jax.vmap(_one(call)))


def _batch(call, _):
  """`call` takes the batch itself."""
  return quick_jit(_one(call))


def _known_mask(call, _):
  return _known(call)


# --- how it is told what is visible: data of the program, and the mask that it stands for ---


def _by_slices(rng, shape):
  mask = random_mask(rng, shape.q_len, shape.k_len)
  return mask.slices, mask


def _by_one_of_few(rng, shape):
  """One of a few masks, each of which is compiled."""
  return _by_slices(np.random.default_rng(int(rng.integers(3))), shape)


def _by_ranges(rng, shape):
  cuts = random_cuts(rng, shape.q_len, MAX_SLICES)
  ranges = np.stack([cuts[:-1], cuts[1:]], axis=1), random_ranges(rng, shape.k_len, MAX_SLICES)
  data = (*(r.astype(np.int32) for r in ranges), rng.integers(0, 4, MAX_SLICES, np.int32))
  return data, AttentionMask.from_ranges(*data, q_len=shape.q_len, k_len=shape.k_len)


_MAX_SEGMENTS = 5


def _by_segments(rng, shape):
  ids = tuple(random_segment_ids(rng, n, _MAX_SEGMENTS) for n in (shape.q_len, shape.k_len))
  return ids, AttentionMask.from_segment_ids(ids[0], _MAX_SEGMENTS, kv_ids=ids[1], causal=True)


_WINDOW = (9, 2)


def _by_segments_of_batch(rng, shape):
  """As in jax.nn, the window refers to positions in the row, not in the document."""
  ids, mask = _by_segments(rng, shape)
  slices = np.array(mask.slices)
  slices[:, 4:] = -_WINDOW[0], _WINDOW[1]
  return ids, AttentionMask(slices, shape.q_len, shape.k_len)


def _by_lengths(rng, shape):
  ends = rng.integers(0, np.array([shape.q_len, shape.k_len]) + 3).astype(np.int32)
  q_end, k_end = np.minimum(ends, [shape.q_len, shape.k_len])
  slices = np.array([[0, q_end, 0, k_end, -(2**30), 0]], np.int32)
  return (ends[0], ends[1]), AttentionMask(slices, shape.q_len, shape.k_len)


def _of_meta(out, meta):
  return (out, meta.lse), meta.max_logits


def _attention(operands, slices, **options):
  q, k, v, sink = operands
  mask = AttentionMask(slices, q.shape[0], k.shape[0])
  return _of_meta(*jax_magi.attention(q, k, v, mask, sink=sink, return_max_logits=True, **options))


def _flex_flash_attn(operands, ranges, **options):
  *qkv, sink = operands
  return _of_meta(
    *jax_magi.flex_flash_attn_func(*qkv, *ranges, sink=sink, return_max_logits=True, **options)
  )


def _segment_attention(operands, ids, **options):
  *qkv, sink = operands
  mask = AttentionMask.from_segment_ids(ids[0], _MAX_SEGMENTS, kv_ids=ids[1], causal=True)
  return _of_meta(*jax_magi.attention(*qkv, mask, sink=sink, return_max_logits=True, **options))


def _dot_product(operands, *, softmax_scale, sink=None, **options):
  return _of_meta(
    *jax_magi.dot_product_attention(
      *operands,
      scale=softmax_scale,
      sink=sink,
      return_meta=True,
      return_max_logits=True,
      **options,
    )
  )


def _dot_product_masks(operands, slices, **options):
  *qkv, sink = operands
  lengths = (qkv[0].shape[1], qkv[1].shape[1])
  # As vmap of a constructor makes it: one mask a row.
  mask = jax.tree.map(lambda _: slices, AttentionMask.full(*lengths))
  return _dot_product(qkv, mask=mask, sink=_one_sink(sink), **options)


def _dot_product_segments(operands, ids, **options):
  *qkv, sink = operands
  segments = {"segment_ids": ids[0], "kv_segment_ids": ids[1], "max_segments": _MAX_SEGMENTS}
  return _dot_product(qkv, sink=_one_sink(sink), local_window_size=_WINDOW, **segments, **options)


def _dot_product_lengths(operands, ends, **options):
  *qkv, sink = operands
  lengths = {"query_seq_lengths": ends[0], "key_value_seq_lengths": ends[1]}
  return _dot_product(qkv, sink=_one_sink(sink), is_causal=True, **lengths, **options)


def _one_sink(sink):
  """The sink of a batch of one. A batch shares it, so its gradient is not that of a row."""
  return None if sink is None else sink[0]


@dataclasses.dataclass(frozen=True)
class Way:
  """How attention is called, and how the call is told what is visible.

  Attributes:
    wrap: from a call of one row, and another that computes the same, to one of all rows.
    call: see above.
    draw_mask: from a random generator and a shape to a row's data, and the mask they stand for.
    num_rows: number of rows.
    is_mask_shared: whether one row's data serve all of them.
    is_sink_shared: whether the sink does.
  """

  wrap: Callable
  call: Callable = _attention
  draw_mask: Callable = _by_slices
  num_rows: int = _ROWS
  is_mask_shared: bool = False
  is_sink_shared: bool = False


WAYS = {
  "eager": Way(_eager, num_rows=1),
  "eager ranges": Way(_eager, _flex_flash_attn, _by_ranges, 1),
  "jit": Way(_jit, num_rows=1),
  "jit, known mask": Way(_known_mask, draw_mask=_by_one_of_few, num_rows=1),
  "vmap": Way(_vmap),
  "vmap of jit": Way(_vmap_of_jit),
  "jit of vmap of grad": Way(_jit_of_vmap),
  "jit of grad of vmap": Way(_grad_of_vmap),
  "vmap, shared mask": Way(_shared_mask, is_mask_shared=True),
  "scan": Way(_grad_of_scan),
  "scan of checkpoint": Way(_grad_of_checkpointed_scan),
  "vmap of checkpoint": Way(_vmap_of_checkpoint),
  "scan of cond": Way(_cond),
  "vmap of cond": Way(_vmap_of_cond),
  "export": Way(_export),
  "ranges": Way(_jit_of_vmap, _flex_flash_attn, _by_ranges),
  "segment ids": Way(_jit_of_vmap, _segment_attention, _by_segments),
  "dot product, masks": Way(_batch, _dot_product_masks, is_sink_shared=True),
  "dot product, segment ids": Way(
    _batch, _dot_product_segments, _by_segments_of_batch, is_sink_shared=True
  ),
  "dot product, lengths": Way(_batch, _dot_product_lengths, _by_lengths, is_sink_shared=True),
}
