"""Calls on parts of larger arrays. Run as a program, it prints them as compiled for a GPU.

python -m tests.sliced_calls NAME...
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask
from tests.gpu_program import find_devices


def _attend(x):
  """Self-attention over part of the rows."""
  return jax_magi.attention(x, x, x, AttentionMask.full(x.shape[0]))[0]


def _attention_in_place(x):
  return x.at[5:517].set(_attend(x[5:517]))


def _attention_of_flat(x):
  size = 512 * 2 * 64
  return _attend(x.reshape(-1)[3 : 3 + size].reshape(512, 2, 64))


def _attention_backward_in_place(x):
  _, backward = jax.vjp(_attend, x[5:517])
  return x.at[5:517].set(backward(x[7:519])[0])


def _softmax(x):
  return jax_magi.scaled_softmax(x.reshape(-1, 1, 1, 7)[1:257], scale=2.0)


def _softmax_in_place(x):
  x = x.reshape(-1, 4, 8)
  return x.at[1:17].set(jax_magi.scaled_upper_triang_masked_softmax(x[1:17], 2.0))


SHAPE = (700, 2, 64)
CALLS = {
  "attention_in_place": _attention_in_place,
  "attention_of_flat": _attention_of_flat,
  "attention_backward_in_place": _attention_backward_in_place,
  "softmax": _softmax,
  "softmax_in_place": _softmax_in_place,
}


def main(names: list[str]) -> None:
  mesh = Mesh(np.array(find_devices(1, 8)), ("x",), axis_types=(AxisType.Auto,))
  x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=NamedSharding(mesh, P()))
  for name in names:
    print(jax.jit(CALLS[name], donate_argnums=0).lower(x).compile().as_text())


if __name__ == "__main__":
  main(sys.argv[1:])
