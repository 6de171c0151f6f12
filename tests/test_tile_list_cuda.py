"""Kernels take no list of tiles but their call's own."""

import subprocess
import sys

import jax
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask
from tests.list_calls import forged_list, forward_with_list, list_of, needs_of

pytestmark = pytest.mark.gpu


def test_own_list_is_taken():
  mask = AttentionMask.causal(180)
  out, _, operands = forward_with_list(mask, list_of(mask))
  np.testing.assert_array_equal(out, jax_magi.attention(*operands, mask)[0])


def test_list_of_another_tiling_is_refused():
  """A program may outlive the build that made its list."""
  mask = AttentionMask.causal(180)
  with pytest.raises(jax.errors.JaxRuntimeError, match="tile list of another version"):
    forward_with_list(mask, list_of(mask), tile_stamp=needs_of(mask).tile_stamp + 1)


def test_list_with_more_tiles_than_the_call_may_have_is_refused():
  long, short = AttentionMask.causal(4000), AttentionMask.causal(180)
  with pytest.raises(jax.errors.JaxRuntimeError, match="tile_list is of another call"):
    forward_with_list(short, list_of(long))


def test_list_of_another_length_ends_the_program():
  """Both have as many tiles; the list's rows past the end must not be written."""
  command = [sys.executable, "-m", "tests.list_calls"]
  assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_tiles_out_of_the_arrays_are_moved_into_them():
  """Under memcheck, `tests/sanitizer_cases.py` shows that nothing else is touched."""
  mask = AttentionMask.causal(180)
  out, lse, operands = forward_with_list(mask, forged_list(mask))
  assert out.shape == (180, 4, 64) and lse.shape == (180, 4)
  np.testing.assert_array_equal(  # And the next call is right.
    forward_with_list(mask, list_of(mask))[0], jax_magi.attention(*operands, mask)[0]
  )
