"""Mistakes with keys, dispatched arrays and meshes are named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask, magi_attn_flex_key, magi_attn_varlen_key, stack_keys
from tests.cp_runs import make_mesh

_MASK = AttentionMask.causal(64)


def _key(**options):
  return magi_attn_flex_key(_MASK, cp_size=2, **options)


def _traced(fun):
  """Calls a function of slices under jit."""
  return lambda: jax.jit(fun)(_MASK.slices)


def _rank(key):
  """The part of a key that the first rank has."""
  return jax.tree.map(lambda x: x[:1], key)


def _capacities(**changes):
  return dataclasses.replace(_key(transport="all_to_all").capacities, **changes)


@pytest.mark.parametrize(
  ("make", "match"),
  [
    (lambda: magi_attn_flex_key([[0, 64]], cp_size=2), "k_ranges must be given with q_ranges"),
    (_traced(lambda s: magi_attn_flex_key(AttentionMask(s, 64, 64), cp_size=2)), "outside of jit"),
    (_traced(lambda s: _key(dispatch=s[0, :2])), "dispatch must be known, got a traced array"),
    (lambda: _key(dispatch=[0, 1], chunk_size=16), "2 chunks of 16 tokens, too few for .*=64"),
    (
      lambda: _key(capacities=_capacities(), transport="all_gather"),
      "capacities are of transport 'all_to_all', but transport is 'all_gather'",
    ),
    (lambda: jax_magi.key_for_new_mask(_rank(_key()), _MASK), "known and of all 2 ranks"),
    (lambda: stack_keys([]), "keys must hold at least one key"),
    (lambda: stack_keys([_key(), _key(overlap_degree=2)]), "have no union"),
    (
      lambda: stack_keys([_key(chunk_size=16), _key(chunk_size=32)]),
      r"equal shapes, but key 0 is DistAttnKey\(64 x 64",
    ),
    (
      lambda: stack_keys([_key(transport="all_gather"), _key(transport="all_to_all")]),
      "use other collectives than",
    ),
    (
      lambda: stack_keys([_key(transport="all_to_all")], _capacities(rows=(1,))),
      "which do not fit in",
    ),
    (lambda: _rank(_key()).stats(), "stats needs one known key of all 2 ranks"),
  ],
)
def test_bad_key_is_named(make, match):
  with pytest.raises(ValueError, match=match):
    make()


def test_ranges_without_lengths_end_with_the_last_token():
  key = magi_attn_flex_key([[0, 48]], [[0, 64]], cp_size=2)
  assert (key.spec.q_len, key.spec.k_len, key.spec.is_cross) == (64, 64, False)


@pytest.mark.parametrize(
  ("call", "match"),
  [
    (lambda x, key: jax_magi.dispatch(x, _rank(key)), "dispatch needs a key of all 2 ranks"),
    (lambda x, key: jax_magi.undispatch(x, stack_keys([key])), "one key of a stack"),
    (lambda x, key: jax_magi.roll(x[:32], key), r"key has 2 ranks, but x is \[32\]; inside sh"),
    (lambda x, key: jax_magi.roll(x, _rank(key)), "x must have the 32 rows of one rank, got"),
    (
      lambda x, key: jax_magi.roll(x, key, segment_ids=np.ones(3, int)),
      r"segment_ids must be \[64\], got \[3\]",
    ),
  ],
)
def test_bad_rows_are_named(call, match):
  with pytest.raises(ValueError, match=match):
    call(np.zeros(64), _key())


@pytest.mark.parametrize(
  ("shape", "key", "options", "match"),
  [
    ((64, 16), _key(), {}, r"q must be \[length, num_heads, head_dim\], or with a leading batch"),
    ((64, 2, 16), _key(), {"batch_axis": "data"}, "batch_axis is 'data', but q has no batch"),
    ((64, 2, 16), stack_keys([_key()]), {}, "key is a stack of keys, but q has no batch"),
  ],
)
def test_bad_whole_array_is_named(shape, key, options, match):
  x = np.zeros(shape, np.float32)
  with pytest.raises(ValueError, match=match):
    jax_magi.context_parallel_attention(x, x, x, key, mesh=make_mesh(data=2, cp=2), **options)


def test_part_of_a_key_is_named():
  """Of four ranks, a call needs the part of one, or all."""
  key = magi_attn_flex_key(_MASK, cp_size=4)
  half = jax.tree.map(lambda x: x[:2], key)
  fun = jax.shard_map(
    lambda x: jax_magi.calc_attn(x, x, x, half)[0],
    mesh=make_mesh(cp=4),
    in_specs=P("cp"),
    out_specs=P("cp"),
  )
  with pytest.raises(ValueError, match="leaves of 4 ranks or of one, got 2"):
    jax.eval_shape(fun, jnp.zeros((64, 2, 16)))


def test_documents_shorter_than_the_sequence_are_no_cross_attention():
  cu_seqlens = [0, 120, 300]
  for other in (None, cu_seqlens, np.array(cu_seqlens)):
    spec = magi_attn_varlen_key(cu_seqlens, other, total_seqlen=512, cp_size=2).spec
    assert (spec.q_len, spec.k_len, spec.is_cross) == (512, 512, False)
  lengths = {"total_seqlen": 512, "total_seqlen_k": 640}
  spec = magi_attn_varlen_key(cu_seqlens, [0, 10, 200], **lengths, cp_size=2).spec
  assert (spec.q_len, spec.k_len, spec.is_cross) == (512, 640, True)
