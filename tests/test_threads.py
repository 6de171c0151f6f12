"""Many threads and many calls: results stay right, and memory stays flat.

python -m tests.test_threads --seconds 60 --threads 8
"""

import argparse
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask
from tests.accuracy import DTYPES
from tests.arrays import assert_same_bits, normals

_NUM_CALLS = 2000
_SHAPES = [(40, 4, 16), (40, 2, 16), (40, 2, 16)]


def _gradients(q, k, v, mask):
  def loss(q, k, v):
    out, meta = jax_magi.attention(q, k, v, mask, deterministic=True)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(meta.lse))

  return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


def _softmax(q, k, v, mask):
  scores = jnp.einsum("qhd,khd->hqk", q, jnp.repeat(k, 2, axis=1))
  return jax_magi.fused_scale_mask_softmax(scores, mask.to_dense()[None], scale=0.25)


def _call_in_threads(num_threads: int, seconds: float, dtype: Any = np.float32) -> int:
  """Returns the number of calls, all of which gave what one thread gets."""
  operands = (
    *normals(*_SHAPES, dtype=dtype),
    AttentionMask.from_cu_seqlens([0, 13, 40], causal=True),
  )
  programs = [jax.jit(_gradients), jax.jit(_softmax)]
  expected = [jax.device_get(program(*operands)) for program in programs]
  end, failures, num_calls = time.monotonic() + seconds, [], [0] * num_threads

  def work(number):
    try:
      while time.monotonic() < end:
        i = (number + num_calls[number]) % len(programs)
        assert_same_bits(jax.device_get(programs[i](*operands)), expected[i])
        num_calls[number] += 1
    except BaseException as error:
      failures.append(error)

  # Daemons: one that hangs does not keep the process.
  threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(num_threads)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(timeout=end + 60 - time.monotonic())
  assert not any(thread.is_alive() for thread in threads), "a thread hangs"
  assert not failures, failures[0]
  assert min(num_calls) > 0
  return sum(num_calls)


def test_threads_get_what_one_thread_gets():
  _call_in_threads(num_threads=8, seconds=1.0)


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


def _main() -> None:
  parser = argparse.ArgumentParser(description="Calls attention and softmax from many threads.")
  parser.add_argument("--threads", type=int, default=8)
  parser.add_argument("--seconds", type=float, default=60.0)
  parser.add_argument(
    "--dtype", choices=DTYPES, default="bf16", help="a GPU's kernels need 16 bits"
  )
  arguments = parser.parse_args()
  num_calls = _call_in_threads(arguments.threads, arguments.seconds, DTYPES[arguments.dtype])
  print(f"{num_calls} calls from {arguments.threads} threads, all of them right")


if __name__ == "__main__":
  _main()
