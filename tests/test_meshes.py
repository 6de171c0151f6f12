"""Every public function on meshes whose axes are Auto, Explicit (JAX's default) or a mixture."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask, optim
from tests.arrays import assert_trees_close, normal

_AUTO, _EXPLICIT = AxisType.Auto, AxisType.Explicit
_MESHES = {
  "explicit": (_EXPLICIT, _EXPLICIT),
  "auto": (_AUTO, _AUTO),
  "explicit_and_auto": (_EXPLICIT, _AUTO),
  "auto_and_explicit": (_AUTO, _EXPLICIT),
}

_Q, _K, _V = normal(4, 32, 8, 8), normal(4, 32, 4, 8, seed=1), normal(4, 32, 4, 8, seed=2)
_IDS = np.stack([np.repeat([1, 2], [n, 32 - n]) for n in (5, 10, 15, 32)]).astype(np.int32)
_LENGTHS = np.array([32, 5, 15, 1], np.int32)
_DENSE = np.random.default_rng(3).random((4, 1, 32, 32)) < 0.5
_SCORES = normal(4, 8, 16, 16)
_KEY = jax_magi.magi_attn_varlen_key([0, 12, 31], causal=True, cp_size=2)
_WHOLE_KEY = jax_magi.magi_attn_varlen_key([0, 12, 32], causal=True, cp_size=2)
_ROWS = jax_magi.dispatch(_Q[0, :31], _KEY)

_BTNH, _THD = P("x", None, "y"), P(None, "y")
_QKV = ((_Q, _BTNH), (_K, _BTNH), (_V, _BTNH))
_ONE = ((_Q[0], _THD), (_K[0], _THD), (_V[0], _THD))
_WEIGHTS = ((normal(16, 8, 4), P("x", "y")), (normal(16, 4, 4, seed=1), P("x", "y")))
_MAXIMA = 3 * np.abs(normal(8))

_CASES = {}


def _case(*operands, name=None):
  """A function of a mesh and of operands, each with its sharding."""

  def add(fun):
    _CASES[name or fun.__name__] = (fun, operands)
    return fun

  return add


def _gradients(fun, *operands):
  def loss(*operands):  # Of a sine, so that gradients differ from place to place.
    return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(fun(*operands)))

  return jax.value_and_grad(loss, tuple(range(len(operands))))(*operands)


@_case(*_QKV, (normal(4, 8, 32, 32, seed=4), P("x", "y")), (normal(8, seed=5), P("y")))
def attention_of_a_batch(_, q, k, v, bias, sink):
  return _gradients(
    lambda q, k, v, bias, sink: jax_magi.dot_product_attention(
      q, k, v, bias, is_causal=True, sink=sink, alibi_slopes=sink
    ),
    *(q, k, v, bias, sink),
  )


@_case((_Q, P(None, "x", None, "y")), (_K, P()), (_V, P("y", None, "x")))
def attention_of_rows_that_are_split(_, q, k, v):
  return _gradients(lambda *x: jax_magi.dot_product_attention(*x, is_causal=True), q, k, v)


@_case(*_QKV, (_DENSE, P("x", None, "y")))
def boolean_mask(_, q, k, v, mask):
  return jax_magi.dot_product_attention(q, k, v, mask=mask)


@_case(*_QKV, (_DENSE, P("x", None, "y")), (normal(1, 8, 32, 1), P(None, "y")))
def boolean_mask_and_bias(_, q, k, v, mask, bias):
  return _gradients(lambda b: jax_magi.dot_product_attention(q, k, v, b, mask=mask), bias)


@_case(*_QKV, (_IDS, P("x", "y")), (_LENGTHS, P("x")))
def documents_and_lengths(_, q, k, v, ids, lengths):
  return jax_magi.dot_product_attention(
    *(q, k, v), segment_ids=ids, max_segments=2, key_value_seq_lengths=lengths
  )


@_case(*_QKV, (_IDS, P("x", "y")))
def documents_and_padding_of_a_pipeline(_, q, k, v, ids):
  """Documents from 0, and padding that is -1; saved under the trainer's own name."""
  ids = jnp.where(ids == 2, -1, ids - 1)
  return _gradients(
    lambda q, k, v: jax_magi.dot_product_attention(
      *(q, k, v), segment_ids=ids, max_segments=1, padding_id=-1, is_causal=True,
      checkpoint_names="context",
    ),
    *(q, k, v),
  )  # fmt: skip


@_case(*_ONE)
def attention_of_one_sequence(_, q, k, v):
  return jax_magi.attention(q, k, v, AttentionMask.causal(32), return_max_logits=True)


@_case(*_ONE, (np.array([[0, 10], [10, 32]], np.int32), P("x")))
def ranges(_, q, k, v, ranges):
  return jax_magi.flex_flash_attn_func(q, k, v, ranges, ranges)


@_case((np.array([[0, 10], [10, 32]], np.int32), P("x", "y")), (_IDS[0, :4].cumsum(), P("x")))
def masks(_, ranges, cu_seqlens):
  mask = AttentionMask.from_ranges(ranges, ranges, q_len=32, k_len=32)
  documents = AttentionMask.from_cu_seqlens(cu_seqlens, q_len=32, causal=True, align="top_left")
  return mask + documents.crop(0, 32, 0, 32), mask.pad(5), mask.to_dense(), mask.area()


@_case(*_ONE, (np.array([7], np.int32), P()))
def part_of_a_mask(_, q, k, v, begin):
  mask = AttentionMask.causal(64).crop(begin[0], begin[0] + 32, 0, 32, q_len=32)
  return _gradients(lambda *x: jax_magi.attention(*x, mask)[0], q, k, v)


@_case((_IDS[0], P("x")), (_IDS[1], P("y")))
def masks_of_documents(_, ids, kv_ids):
  whole = np.ones(32, np.int32)
  return [
    AttentionMask.from_segment_ids(*pair[:1], 2, kv_ids=pair[1], causal=True)
    for pair in ((ids, kv_ids), (whole, kv_ids), (ids, whole))
  ]


@_case(
  *((x.reshape(2, 2, *x.shape[1:]), P(None, "x", None, "y")) for x in (_Q, _K, _V)),
  (_DENSE.reshape(2, 2, 1, 32, 32), P(None, "x")),
)
def flax(_, q, k, v, mask):
  return jax_magi.flax_attention_fn(q, k, v, mask=mask)


@_case(*_QKV, (_DENSE.astype(np.float32), P("x")))
def flax_with_maxima(_, q, k, v, mask):
  maxima = []
  attend = functools.partial(jax_magi.flax_attention_fn, mask=mask, on_max_logits=maxima.append)
  return attend(q, k, v), maxima


@_case((_Q[0], P("x", "y")), (_Q[1], P("x", "y")), (_Q[0, ..., 0], P("x", "y")))
def merged_results(_, out, other, lse):
  return jax_magi.merge_attention([out, other], [lse, 2 * lse])


@_case((_SCORES, P("x", "y", None)), (_DENSE[..., :16, :16], P("x")), (normal(8), P("y")))
def softmax(_, x, mask, offset):
  return _gradients(
    lambda x, offset: jax_magi.fused_scale_mask_softmax(x, mask, offset=offset), x, offset
  )


@_case((_SCORES, P("x", None, "y")), (normal(1, 8, 1, 16), P(None, "y")))
def softmax_of_rows_that_are_split(_, x, mask):
  return _gradients(jax_magi.scaled_masked_softmax, x, mask)


@_case((_SCORES.reshape(2, 2, 8, 16, 16), P(None, "x", "y")), (_DENSE[:2, None, :, :16, :16], P()))
def softmax_of_many_axes(_, x, mask):
  return _gradients(lambda x: jax_magi.scaled_masked_softmax(x, mask), x)


@_case((_SCORES, P("x", "y")))
def softmax_functions(_, x):
  megatron = jax_magi.FusedScaleMaskSoftmax(False, False, "causal", True, None, True, None)
  return (
    jax_magi.scaled_softmax(x),
    jax_magi.scaled_upper_triang_masked_softmax(x),
    megatron(x, x > 0),
  )


@_case((_Q[0, :31], P(None, "y")), (_ROWS, P("x", "y")), (_KEY, P("x")))
def tokens_in_the_order_of_ranks(_, x, rows, key):
  return (
    _gradients(lambda x: jax_magi.dispatch(x, key), x),
    _gradients(lambda x: jax_magi.undispatch(x, _KEY), rows),
    jax_magi.roll(rows, key),
    jax_magi.get_position_ids(key),
  )


def _flow(mesh, q, k, v, **axes):
  key = _WHOLE_KEY
  q, k, v = (jax_magi.dispatch(x, key) for x in (q, k, v))
  out, meta = jax_magi.context_parallel_attention(
    *(q, k, v, key), mesh=mesh, axis_name="x", return_max_logits=True, **axes
  )
  return jax_magi.undispatch(out, key), jax_magi.undispatch(meta.lse, key), meta.max_logits


_case(*((x[0], P()) for x in (_Q, _K, _V)), name="the_flow_of_the_readme")(_flow)


@_case(*((x[0], P("x", "y")) for x in (_Q, _K, _V)))
def context_parallelism(mesh, q, k, v):
  return _gradients(lambda *x: _flow(mesh, *x, head_axis="y")[0], q, k, v)


@_case(*((x, P("y", "x")) for x in (_Q, _K, _V)))
def context_parallelism_of_a_batch(mesh, q, k, v):
  key = jax_magi.stack_keys([_WHOLE_KEY] * 4)
  return jax_magi.context_parallel_attention(
    *(q, k, v, key), mesh=mesh, axis_name="x", batch_axis="y"
  )


def _ranks(keeps):
  def fun(mesh, q, k, v):
    def rank(q, k, v, key):
      return jax_magi.calc_attn(q, k, v, key, axis_name="x", keep_remote_kv=keeps)[0]

    ranks = jax.shard_map(rank, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    return _gradients(lambda *x: ranks(*x, _WHOLE_KEY), q, k, v)

  return fun


_HEADS = tuple((x[0], P("x", "y")) for x in (_Q, _K, _V))
_case(*_HEADS, name="ranks_whose_heads_are_split")(_ranks(keeps=False))
_case(*_HEADS, name="ranks_that_keep_keys")(_ranks(keeps=True))


_LATENT, _WEIGHT = normal(32, 6, seed=6), normal(6, 8, 16, seed=7)


def _expand(rows, weight):
  return jnp.split(jnp.einsum("tr,rhd->thd", rows, weight), 2, axis=-1)


@_case((_Q[0], _THD), (_LATENT, P()), (_WEIGHT, _THD))
def latents(_, q, latent, weight):
  mask = AttentionMask.causal(32)

  def attend(q, latent, weight):
    expand = functools.partial(_expand, weight=weight)
    return jax_magi.latent_attention(q, latent, mask, expand=expand)[0]

  return _gradients(attend, q, latent, weight)


@_case((_Q[0], P("x", "y")), (_LATENT, P("x")), (_WEIGHT, _THD))
def latents_of_ranks(mesh, q, latent, weight):
  def attend(q, latent, weight):
    return jax_magi.context_parallel_latent_attention(
      *(q, latent, _WHOLE_KEY), expand=_expand, params=weight, param_specs=_THD, mesh=mesh,
      axis_name="x", head_axis="y",
    )[0]  # fmt: skip

  return _gradients(attend, q, latent, weight)


@_case((_Q[0], P("x", "y")))
def rows_of_ranks(mesh, rows):
  def rank(rows, key):
    return jax_magi.roll(rows, key, axis_name="x"), jax_magi.get_position_ids(key)

  ranks = jax.shard_map(rank, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
  return ranks(rows, _WHOLE_KEY)


@_case(*_QKV, (_SCORES, P("x", "y")))
def one_manual_axis(mesh, q, k, v, scores):
  def local(q, k, v, scores):
    out = jax_magi.dot_product_attention(q, k, v, is_causal=True)
    return out, jax_magi.scaled_upper_triang_masked_softmax(scores)

  fun = jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
  return _gradients(fun, q, k, v, scores)


def _projections(layout, **options):
  q, k = (optim.Projection(x, layout, options.get(f"{x}_heads")) for x in "qk")
  return optim.QkProjections(q, k)


@_case(*_WEIGHTS, (_MAXIMA, P("y")))
def clipped(_, q, k, max_logits):
  gamma = optim.qk_clip_gamma(max_logits, 1.0)
  projections = _projections("embed -> heads dim")
  return gamma, optim.apply_qk_clip({"q": q, "k": k}, max_logits, projections, 1.0)


@_case(*((x.reshape(16, -1), P("x", "y")) for x, _ in _WEIGHTS), (_MAXIMA, P("y")))
def clipped_with_merged_heads(_, q, k, max_logits):
  projections = _projections("embed -> (heads dim)", q_heads=8, k_heads=4)
  return optim.apply_qk_clip({"q": q, "k": k}, max_logits, projections, 1.0)


@_case((normal(2, 16, 8, 4), P(None, "x", "y")), (_MAXIMA, P("y")))
def clipped_parts(_, fused, max_logits):
  sides = (optim.Projection("fused", "parts embed -> heads dim", index=i) for i in range(2))
  return optim.apply_qk_clip({"fused": fused}, max_logits, optim.QkProjections(*sides), 1.0)


@_case(*_WEIGHTS, (np.tile(_MAXIMA, (2, 2, 1)), P("x", None, "y")))
def clipped_layers(_, q, k, max_logits):
  sides = (optim.Projection(f"{{layer}}/{name}", "embed -> heads dim") for name in "qk")
  params = {str(layer): {"q": q, "k": k} for layer in range(2)}
  max_logits = optim.reduce_max_logits(max_logits, axis=0)
  return optim.apply_qk_clip(params, max_logits, optim.QkProjections(*sides), 1.0)


@_case(*((x, P(None, "y")) for x, _ in _WEIGHTS), (_MAXIMA, P("y")))
def optimizers(_, q, k, max_logits):
  projections = _projections("embed -> heads dim")
  params = {"q": q, "k": k}
  found = []
  for optimizer in (optim.qk_clip(projections, 1.0), optim.muon_clip(0.1, projections, {}, 1.0)):
    grads, state = jax.tree.map(lambda x: 0.1 * x, params), optimizer.init(params)
    found.append(optimizer.update(grads, state, params, max_logits=max_logits))
  return found


@pytest.mark.usefixtures("with_promotion")  # For Optax.
@pytest.mark.parametrize(
  ("mesh", "is_mesh_set"),
  [
    ("explicit", True),
    *(pytest.param(name, name != "explicit", marks=pytest.mark.long) for name in _MESHES),
  ],
)
@pytest.mark.parametrize("case", _CASES)
def test_results_are_those_of_arrays_on_no_mesh(case, mesh, is_mesh_set):
  _, operands = _CASES[case]
  mesh = _make_mesh(mesh)
  expected = _expected(case)
  placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in operands]
  with jax.set_mesh(mesh) if is_mesh_set else contextlib.nullcontext():
    assert_trees_close(_run(case, mesh, *placed), expected)


def _make_mesh(name):
  return jax.make_mesh((2, 2), ("x", "y"), axis_types=_MESHES[name], devices=jax.devices()[:4])


def _run(case, mesh, *operands):
  fun, _ = _CASES[case]
  return jax.device_get(jax.jit(functools.partial(fun, mesh))(*operands))


@functools.cache
def _expected(case):
  """The results without a mesh, to compare all meshes with."""
  _, operands = _CASES[case]
  return _run(case, _make_mesh("auto"), *(x for x, _ in operands))


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x"), P(None, "x")], ids=str)
def test_the_partitioner_that_knows_no_rules(spec):
  """`jax_use_shardy_partitioner=False` ended the process."""
  mesh = jax.make_mesh((4,), ("x",), axis_types=(_AUTO,), devices=jax.devices()[:4])
  sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (_Q, _K, _V)]

  def fun(*x):
    return _gradients(lambda *x: jax_magi.dot_product_attention(*x, is_causal=True), *x)

  jax.config.update("jax_use_shardy_partitioner", False)
  try:
    compiled = jax.jit(fun).lower(*sharded).compile()
  finally:
    jax.config.update("jax_use_shardy_partitioner", True)
  assert ("all-gather" in compiled.as_text()) == (spec == P(None, "x"))
  assert_trees_close(jax.device_get(compiled(*sharded)), jax.jit(fun)(_Q, _K, _V))
