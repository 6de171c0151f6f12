"""Many threads and many calls: results stay right, and memory stays flat."""

import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask
from tests.arrays import assert_same_bits, normals

_NUM_THREADS, _SECONDS = 8, 5.0
_NUM_CALLS = 2000
_SHAPES = [(40, 4, 16), (40, 2, 16), (40, 2, 16)]


def _gradients(q, k, v, mask):
  def loss(q, k, v):
    out, meta = jax_magi.attention(q, k, v, mask)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(meta.lse))

  return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


def _softmax(q, k, v, mask):
  scores = jnp.einsum("qhd,khd->hqk", q, jnp.repeat(k, 2, axis=1))
  return jax_magi.fused_scale_mask_softmax(scores, mask.to_dense()[None], scale=0.25)


def test_threads_get_what_one_thread_gets():
  operands = (*normals(*_SHAPES), AttentionMask.from_cu_seqlens([0, 13, 40], causal=True))
  programs = [jax.jit(_gradients), jax.jit(_softmax)]
  expected = [jax.device_get(program(*operands)) for program in programs]
  end, failures, num_calls = time.monotonic() + _SECONDS, [], [0] * _NUM_THREADS

  def work(number):
    try:
      while time.monotonic() < end:
        i = (number + num_calls[number]) % len(programs)
        assert_same_bits(jax.device_get(programs[i](*operands)), expected[i])
        num_calls[number] += 1
    except BaseException as error:
      failures.append(error)

  threads = [threading.Thread(target=work, args=(i,)) for i in range(_NUM_THREADS)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(timeout=60)
  assert not any(thread.is_alive() for thread in threads), "a thread hangs"
  assert not failures, failures[0]
  assert min(num_calls) > 0


def _resident_bytes() -> int:
  pages = int(Path("/proc/self/statm").read_text().split()[1])
  return pages * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_is_flat_over_many_calls():
  q, k, v = normals(*_SHAPES)
  rng = np.random.default_rng(0)
  step = jax.jit(_gradients)

  def call():  # A new packing each time, as a data loader has it.
    cut = int(rng.integers(1, 40))
    jax.block_until_ready(step(q, k, v, AttentionMask.from_cu_seqlens([0, cut, 40], causal=True)))

  for _ in range(_NUM_CALLS // 4):
    call()
  before = _resident_bytes()
  for _ in range(_NUM_CALLS):
    call()
  assert step._cache_size() == 1
  assert _resident_bytes() - before < 8 * 2**20
