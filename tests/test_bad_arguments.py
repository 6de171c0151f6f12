"""Mistakes that once went unnoticed, or whose error named another argument."""

import ast
import copy
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jax_magi
from jax_magi import AttentionMask, optim
from jax_magi._src.native.backends import CUDA
from tests.arrays import normal

_Q = normal(16, 4, 8)
_MASK = AttentionMask.causal(16)
_KEY = jax_magi.magi_attn_varlen_key([0, 16], cp_size=2)
_SHORT_KEY = jax_magi.magi_attn_varlen_key([0, 15], cp_size=2)


def _attention(**options):
  return jax_magi.attention(_Q, _Q, _Q, _MASK, **options)


def _mesh(**axes):
  types = (AxisType.Auto,) * len(axes)
  devices = jax.devices()[: np.prod(list(axes.values()))]
  return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices)


def _on_mesh(q=_Q, key=_KEY, mesh=None, **axes):
  mesh = _mesh(cp=2, tp=3) if mesh is None else mesh
  return jax_magi.context_parallel_attention(q, q, q, key, mesh=mesh, **axes)


def _projection(**change):
  return optim.Projection(
    **{"path": "q", "layout": "embed -> (heads dim)", "num_heads": 2} | change
  )


def _dot_product(**options):
  x = _Q[None]
  return jax_magi.dot_product_attention(x, x, x, **options)


def _documents(number, kv_number):
  ids, kv_ids = (np.full((1, 16), x, np.int32) for x in (number, kv_number))
  return _dot_product(segment_ids=ids, kv_segment_ids=kv_ids, max_segments=2)


def _muon(**options):
  projections = optim.QkProjections(_projection(), _projection(path="k"))
  return optim.muon_clip(0.1, projections, **{"matrices": {}} | options)


@pytest.mark.parametrize(
  ("call", "match"),
  [
    (lambda: _attention(return_max_logits="no"), "return_max_logits must be True or False"),
    (
      lambda: jax.jit(lambda flag: _attention(return_max_logits=flag)[0])(True),
      "return_max_logits must be True or False, got a traced value",
    ),
    (lambda: _attention(implementation="gpu"), "implementation must be one of .*'xla'"),
    (lambda: _attention(bias="no"), "bias must be an array, got 'no'"),
    (lambda: _attention(bias=[[1.0], [1.0, 2.0]]), "bias must be an array"),
    (lambda: _attention(sink={}), "sink must be an array"),
    (lambda: _attention(alibi_slopes=object()), "alibi_slopes must be an array"),
    (
      lambda: jax_magi.attention(*[_Q.swapaxes(0, 1)] * 3, _MASK),
      r"q must be \[length, num_heads, head_dim\], but \[4, 16, 8\] looks like",
    ),
    (lambda: _on_mesh(mesh="cp"), "mesh must be a jax.sharding.Mesh"),
    (lambda: _on_mesh(mesh=_mesh(cp=4)), "key is for cp_size=2, but the mesh axis 'cp' has size 4"),
    (lambda: _on_mesh(q=_Q[:15]), "q must have the 16 rows that dispatch makes"),
    (lambda: _on_mesh(head_axis="tp"), "q's 4 heads must be a multiple of the 3 devices along"),
    (lambda: _on_mesh(q=np.zeros((0, *_Q.shape), np.float32)), "q's batch must be a positive"),
    (
      lambda: jax_magi.magi_attn_varlen_key([0, 16], cp_size=2, links=3),
      "links must be Links or None, got 3",
    ),
    (
      lambda: jax_magi.magi_attn_varlen_key([0, 16, 8], cp_size=2),
      "cu_seqlens_q must not decrease, got 16 and 8 at 1 and 2",
    ),
    (
      lambda: jax_magi.magi_attn_varlen_key([0, 16], total_seqlen=8, cp_size=2),
      "total_seqlen must be at least the 16 tokens of cu_seqlens_q, got 8",
    ),
    (
      lambda: jax_magi.magi_attn_flex_key([[0, 8]], [[0, 8]], total_seqlen=-1, cp_size=2),
      "total_seqlen must lie in",
    ),
    (
      lambda: jax_magi.Capacities("no", (1,), 2, (), 1),
      "slices must be a static integer, got 'no'",
    ),
    (lambda: jax_magi.Capacities(1, (1,), 2, (("no",),), 1), "hops must list the collectives"),
    (
      lambda: jax_magi.dispatch(np.arange(15), _SHORT_KEY, pad_value=0.5),
      "pad_value must be a scalar of x's dtype int",
    ),
    (lambda: optim.qk_clip_gamma(np.ones(2, np.float32), True), "threshold must be a positive"),
    (lambda: _muon(every_k_schedule=0), "every_k_schedule must be a positive integer"),
    (lambda: _muon(every_k_schedule=2.0), "every_k_schedule must be a positive integer"),
    (lambda: _muon(matrices=["a"]), "matrices must be a dictionary of layouts by path, got list"),
    (lambda: _muon(matrices={"a": 3}), "layout must be a string"),
    (lambda: _projection(layout=["embed"]), "layout must be a string"),
    (lambda: _projection(path=3), "path must be a string"),
    (lambda: _projection(num_heads=0), "num_heads of q must be a positive integer, got 0"),
    (lambda: _projection(num_heads=-2), "num_heads of q must be a positive integer, got -2"),
    (lambda: _projection(num_heads=2.0), "num_heads of q must be a positive integer, got 2.0"),
    (
      lambda: AttentionMask.from_cu_seqlens([0, 4, 20], q_len=10),
      "cu_seqlens_q must end at q_len = 10 or before, got 20",
    ),
    (
      lambda: AttentionMask.from_cu_seqlens([0, 9], [0, 20], q_len=10, k_len=10),
      "cu_seqlens_k must end at k_len = 10 or before, got 20",
    ),
    (
      lambda: _dot_product(checkpoint_names=("context",)),
      r"checkpoint_names must be a name, or those of out and lse, got \('context',\)",
    ),
    (
      lambda: _documents(-3, 1),
      "segment_ids must not be negative, except for padding_id=0, got -3",
    ),
    (
      lambda: _documents(1, -1),
      "kv_segment_ids must not be negative, except for padding_id=0, got",
    ),
    (lambda: _dot_product(mask=[[_MASK]]), "mask must be one AttentionMask, or a list of 1"),
    (lambda: _SHORT_KEY.predict("x"), "links must be Links or None, got 'x'"),
    (lambda: jax_magi.Links("fast"), "near must be a number, got 'fast'"),
    (lambda: jax_magi.Links(far=0.0), "far must be positive, got 0.0"),
    (lambda: jax_magi.Links(latency=float("nan")), "latency must be finite"),
    (lambda: jax_magi.Links(stage_seconds=(1e-3, -1.0)), "stage_seconds must not be negative"),
    (lambda: jax_magi.Links(stage_seconds=1e-3), "stage_seconds must be .forward, backward."),
    (lambda: jax_magi.Capacities(1, 3, 2, (), 1), "rows must be a tuple"),
    (lambda: jax_magi.Capacities(1, (1,), 2, 3, 1), "hops must list the collectives"),
    *(
      (
        lambda x=x, value=value: jax_magi.dispatch(x, _SHORT_KEY, pad_value=value),
        f"pad_value must be a scalar of x's dtype {x.dtype}",
      )
      for x, value in (
        (np.zeros(15, np.int32), float("nan")),
        (np.zeros(15, np.int8), 300),
        (np.zeros(15, bool), 2),
        (np.zeros(15, np.float32), "no"),
      )
    ),
    (lambda: optim.qk_clip_gamma(None, 1.0), "max_logits must be an array, got NoneType"),
    (lambda: _projection(path=""), "path must be a string, keys joined by '/', got ''"),
    (
      lambda: optim.QkProjections("q", "k"),
      "q must be a Projection or a sequence of them, got 'q'",
    ),
    (
      lambda: optim.QkProjections([], _projection()),
      "q must be a Projection or a sequence of them",
    ),
    (lambda: optim.MlaProjections(*[_projection()] * 2, 3), "k_nope must be a Projection"),
    (lambda: _muon(matrices={3: "embed -> mlp"}), "paths of matrices must be strings"),
  ],
)
def test_errors_name_the_argument(call, match):
  with pytest.raises(ValueError, match=match):
    call()


def test_float64_is_told_to_cast():
  with jax.enable_x64(True):
    q = _Q.astype(np.float64)
    with pytest.raises(NotImplementedError, match=r"got float64; cast them, .*q.astype"):
      jax_magi.attention(q, q, q, _MASK)


@pytest.mark.skipif(CUDA.module is not None, reason="they were built")
def test_kernels_that_were_not_built_are_not_a_matter_of_dtype():
  with pytest.raises(
    NotImplementedError, match="this build of jax_magi has no kernels for this platform"
  ):
    _attention(implementation="cuda")
  with pytest.raises(
    NotImplementedError, match="this build of jax_magi has no kernels for this platform"
  ):
    jax_magi.fused_scale_mask_softmax(jnp.zeros((2, 2)), implementation="cuda")


def test_numpy_integers_are_schedules():
  params = {"q": normal(4, 8), "k": normal(4, 8)}
  states = [_muon(every_k_schedule=k).init(params) for k in (2, np.int64(2))]
  assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
  assert jax.tree.structure(_muon(every_k_schedule=np.int64(1)).init(params)) == jax.tree.structure(
    _muon().init(params)
  )


@pytest.mark.parametrize("way", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy])
def test_copies_of_a_mask_cannot_be_written_to(way):
  mask = way(_MASK)
  assert mask == _MASK and hash(mask) == hash(_MASK)
  with pytest.raises(ValueError, match="read-only"):
    mask.slices[0, 0] = 1


def test_random_keys_are_tokens():
  keys = jax.random.split(jax.random.key(0), 15)
  rows = jax_magi.dispatch(keys, _SHORT_KEY)
  data = jax_magi.dispatch(jax.random.key_data(keys), _SHORT_KEY)
  np.testing.assert_array_equal(jax.random.key_data(rows), data)
  np.testing.assert_array_equal(
    jax.random.key_data(jax_magi.undispatch(rows, _SHORT_KEY)), jax.random.key_data(keys)
  )


def test_modules_are_part_of_the_package():
  """Without an import of their own, which other tests make: of the package's own imports."""
  tree = ast.parse(inspect.getsource(jax_magi))
  imported = {x.name for n in tree.body if isinstance(n, ast.ImportFrom) for x in n.names}
  for name in jax_magi.__all__:
    assert name in imported, name


@pytest.mark.parametrize("transport", ["two_level", "ragged", "all_to_all"])
def test_vmap_in_the_place_of_shard_map(transport):
  per_node = 2 if transport == "two_level" else None
  key = jax_magi.magi_attn_flex_key(_MASK, cp_size=4, transport=transport, ranks_per_node=per_node)

  def rank(q, key):
    return jax_magi.calc_attn(q, q, q, jax.tree.map(lambda x: x[None], key))[0]

  ranks = jax.vmap(rank, axis_name="cp")
  rows = jax_magi.dispatch(_Q, key).reshape(4, 4, 4, 8)
  if transport != "all_to_all":
    with pytest.raises(NotImplementedError, match=f"transport='{transport}' needs shard_map"):
      ranks(rows, key)
    return
  out = jax_magi.undispatch(jax.jit(ranks)(rows, key).reshape(_Q.shape), key)
  np.testing.assert_allclose(out, _attention()[0], atol=1e-5)
