"""Forward calls on a GPU with any list of tiles: one made for another call, or a wrong one.

`python -m tests.list_calls other_length` makes a call whose list is of another mask, and
`lacks_tiles` one whose list may lack tiles without blocks: the kernels end both.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi import AttentionMask
from jax_magi._src.native.call import native_call
from tests.needs import HEADER_WORDS, LACKS, TILE_WORDS, hopper_needs


def needs_of(mask):
  """The needs of the calls below."""
  return hopper_needs(mask, is_backward=False, group=2, head_dim=64)


def call_with_list(mask, tile_list, *, tile_stamp=None, shared_memory_kb=99):
  """out `[1, q_len, 4, 64]` and lse of a forward call with this list, and q, k and v."""
  rng = np.random.default_rng(0)
  q, k, v = (
    jnp.asarray(rng.standard_normal((1, length, heads, 64)), jnp.bfloat16)
    for length, heads in ((mask.q_len, 4), (mask.k_len, 2), (mask.k_len, 2))
  )
  needs = needs_of(mask)

  @jax.jit
  def call(q, k, v, tile_list):
    sink = jnp.full((1, 4), -jnp.inf, np.float32)
    terms = jnp.zeros((0, 0, 0, 0), np.float32), jnp.zeros((0, 0), np.float32)
    return native_call(
      "jax_magi_attention_forward",
      (q, k, v, mask.slices[None], sink, *terms, tile_list),
      [
        (q.shape, q.dtype),
        (q.shape[:3], np.float32),
        ((1, 4), np.float32),
        ((needs.workspace_bytes,), np.uint8),
      ],
      softmax_scale=np.float32(0.125),
      softcap=np.float32(0.0),
      sm_margin=np.int32(0),
      tile_stamp=np.int32(needs.tile_stamp if tile_stamp is None else tile_stamp),
      architecture="sm90",
      shared_memory_bytes=np.int32(shared_memory_kb << 10),
    )

  out, lse, *_ = jax.block_until_ready(call(q, k, v, jnp.asarray(tile_list)))
  return out, lse, (q, k, v)


def forward_with_list(mask, tile_list, **options):
  """The results of `call_with_list` without the axis of the batch."""
  return jax.tree.map(lambda x: x[0], call_with_list(mask, tile_list, **options))


def list_of(mask) -> np.ndarray:
  return np.frombuffer(needs_of(mask).tile_list, np.int32).copy()


def forged_list(mask) -> np.ndarray:
  """A list whose header is right for the mask, but whose tiles exceed the arrays."""
  words = list_of(mask)
  tiles = words[HEADER_WORDS:].reshape(-1, TILE_WORDS)
  tiles[:, 0] = 7  # batch
  tiles[:, 1] += 10 * mask.q_len  # begin
  tiles[:, 2] = 1 << 20  # num_rows
  tiles[:, 3] = 0  # num_blocks: none is waited for.
  tiles[:, 4:6] = [-5, 1 << 20]  # slice_begin, slice_end
  return words


if __name__ == "__main__":
  wrong = list_of(AttentionMask.causal(190))
  if sys.argv[1] == "lacks_tiles":
    wrong = list_of(AttentionMask.causal(180))
    wrong[LACKS] = 1
  else:
    assert sys.argv[1] == "other_length"
  forward_with_list(AttentionMask.causal(180), wrong)
