"""Calls on parts of larger arrays: XLA must not pass those parts to kernels in place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import sliced_calls
from tests.gpu_compiler import needs_compiler, run_compiler


@needs_compiler
def test_no_call_is_fused_with_slices():
  text = run_compiler("tests.sliced_calls", *sliced_calls.CALLS)
  texts = re.split(r"^(?=HloModule )", text, flags=re.MULTILINE)[1:]
  for name, program in zip(sliced_calls.CALLS, texts, strict=True):
    # XLA's fusions are computations of their own.
    target = 'custom_call_target="jax_magi_'
    num_calls = program.count(target)
    assert num_calls > 0, name
    assert program[program.index("\nENTRY ") :].count(target) == num_calls, name


@pytest.mark.parametrize("name", sliced_calls.CALLS)
def test_results_are_those_of_a_copy(name):
  fun = sliced_calls.CALLS[name]
  x = jax.random.normal(jax.random.key(0), sliced_calls.SHAPE, jnp.bfloat16)
  with jax.disable_jit():  # Without fusions, the kernel's operands are separate arrays.
    expected = np.asarray(fun(x), np.float32)
  got = np.asarray(jax.jit(fun, donate_argnums=0)(x), np.float32)
  np.testing.assert_array_equal(got, expected)
