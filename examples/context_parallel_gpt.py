"""Trains the GPT of muon_qk_clip.py with its rows split over devices: data x context parallel.

Every row of the batch is a sequence of packed documents with its own mask. The data loader plans
each mask on the host and dispatches the tokens. For the compiled step, a plan is data. QK-Clip gets
the largest logit of each head over all devices.

python examples/context_parallel_gpt.py --devices 8 --cp 4              8 virtual CPU devices
python examples/context_parallel_gpt.py --devices 8 --cp 4 --compare    and on one, side by side
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import operator
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi.optim import reduce_max_logits

sys.path.insert(0, str(Path(__file__).parent))
from muon_qk_clip import Config, init_params, make_batches, make_optimizer, normalize, train_step

# With this rate, logits grow, but slowly enough that rounding does not change what is learned.
CONFIG = dataclasses.replace(
  Config(), num_layers=2, num_steps=30, learning_rate=0.03, threshold=8.0
)


# --- on the host ---


def make_keys(documents: np.ndarray, cp_size: int, overlap_degree: int) -> list:
  """A plan for each row's mask."""
  keys = []
  for row in documents:
    mask = jax_magi.AttentionMask.from_segment_ids(row, int(row.max()), causal=True)
    # One kind of exchange, so that one program serves all batches.
    keys.append(
      jax_magi.magi_attn_flex_key(
        mask, cp_size=cp_size, overlap_degree=overlap_degree, transport="all_to_all"
      )
    )
  return keys


def to_ranks(tokens: np.ndarray, keys: list) -> np.ndarray:
  """`[batch, length]`, each row in the order of its plan."""
  return np.stack([jax_magi.dispatch(row, key) for row, key in zip(tokens, keys, strict=True)])


# --- on the devices ---


def rotate(x, positions):
  """Rotary embedding of `[batch, local, heads, dim]`, by each token's place in its row."""
  half = x.shape[-1] // 2
  angle = positions[..., None, None] * 10000.0 ** (-jnp.arange(half) / half)
  a, b = jnp.split(x, 2, axis=-1)
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def local_loss(params, tokens, documents, key):
  """The loss, summed over the rows and tokens of all devices, and the largest logits."""
  over_rows = functools.partial(jax.vmap, in_axes=(0, 1))
  positions = jax.vmap(jax_magi.get_position_ids, in_axes=1)(key)
  attend = jax.vmap(
    functools.partial(jax_magi.calc_attn, return_max_logits=True, reduce_max_logits=False),
    in_axes=(0, 0, 0, 1),
  )

  def block(x, weights):
    y = normalize(x)
    q = rotate(jnp.einsum("bte,ehd->bthd", y, weights["query"]), positions)
    k = rotate(jnp.einsum("bte,ehd->bthd", y, weights["key"]), positions)
    v = jnp.einsum("bte,ehd->bthd", y, weights["value"])
    out, meta = attend(q, k, v, key)
    x = x + jnp.einsum("bthd,hde->bte", out, weights["out"])
    return x + jax.nn.gelu(normalize(x) @ weights["up"]) @ weights["down"], meta.max_logits

  x, max_logits = jax.lax.scan(block, params["embedding"][tokens], params["blocks"])
  # The next token of a chunk's last one is on another device.
  labels, next_documents = (over_rows(jax_magi.roll)(x, key) for x in (tokens, documents))
  counts = (next_documents == documents) & (documents > 0)
  counts &= positions + 1 < key.spec.q_len
  losses = optax.softmax_cross_entropy_with_integer_labels(normalize(x) @ params["head"], labels)
  devices = ("dp", "cp")
  loss = jax.lax.psum(jnp.sum(losses * counts), devices) / jax.lax.psum(counts.sum(), devices)
  # All layers' maxima, over rows and devices, in one collective.
  return loss, reduce_max_logits(max_logits, 1, axis_name=devices)


def make_step(mesh, config: Config):
  """The compiled step."""
  rows = P("dp", "cp")
  loss = jax.shard_map(
    local_loss, mesh=mesh, in_specs=(P(), rows, rows, P("cp", "dp")), out_specs=(P(), P())
  )

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, tokens, documents, key):
    (value, max_logits), grads = jax.value_and_grad(loss, has_aux=True)(
      params, tokens, documents, key
    )
    optimizer = make_optimizer(config, config.threshold)
    updates, state = optimizer.update(grads, state, params, max_logits=max_logits)
    return optax.apply_updates(params, updates), state, value, max_logits.max()

  return step


def train(config: Config, dp: int, cp: int, overlap_degree: int = 1) -> dict:
  """Trains on dp x cp devices; returns losses, largest logits, and the number of compilations."""
  devices = jax.devices()[: dp * cp]
  mesh = jax.make_mesh((dp, cp), ("dp", "cp"), devices=devices, axis_types=(AxisType.Auto,) * 2)
  everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("dp", "cp"))
  params = jax.device_put(init_params(config, jax.random.key(0)), everywhere)
  state = jax.device_put(make_optimizer(config, config.threshold).init(params), everywhere)
  step = make_step(mesh, config)
  history: dict = {"loss": [], "max_logit": []}
  room = None
  for number, (tokens, documents) in zip(
    range(config.num_steps), make_batches(config), strict=False
  ):
    keys = make_keys(documents, cp, overlap_degree)
    # Room for every mask so far: the step is compiled anew only when it grows.
    room = functools.reduce(
      operator.or_, (key.capacities for key in keys), room or keys[0].capacities
    )
    key = jax.device_put(jax_magi.stack_keys(keys, room), NamedSharding(mesh, P("cp", "dp")))
    batch = [jax.device_put(to_ranks(x, keys), rows) for x in (tokens, documents)]
    params, state, loss, max_logit = step(params, state, *batch, key)
    history["loss"].append(float(loss))
    history["max_logit"].append(float(max_logit))
    if number % 5 == 0 or number == config.num_steps - 1:
      print(f"dp {dp} x cp {cp}: step {number}, loss {loss:.4f}, largest logit {max_logit:.2f}")
  return {**history, "compilations": step._cache_size()}


def train_on_one_device(config: Config) -> dict:
  """Trains the same model on the same data, with the step of muon_qk_clip.py."""
  params = init_params(config, jax.random.key(0))
  state = make_optimizer(config, config.threshold).init(params)
  history: dict = {"loss": [], "max_logit": []}
  for _, batch in zip(range(config.num_steps), make_batches(config), strict=False):
    params, state, loss, max_logit = train_step(params, state, batch, config.threshold, config)
    history["loss"].append(float(loss))
    history["max_logit"].append(float(max_logit))
  return history


def main() -> None:
  """Entry point."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--devices", type=int, help="virtual CPU devices (default: all devices)")
  parser.add_argument("--cp", type=int, default=4, help="devices that share a row")
  parser.add_argument("--overlap-degree", type=int, default=1)
  parser.add_argument("--steps", type=int, default=CONFIG.num_steps)
  parser.add_argument("--compare", action="store_true", help="train on one device, too")
  arguments = parser.parse_args()
  if arguments.devices:  # Before JAX looks for devices.
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_num_cpu_devices", arguments.devices)
  config = dataclasses.replace(CONFIG, num_steps=arguments.steps)
  dp = jax.device_count() // arguments.cp
  if dp == 0 or config.batch % dp:
    parser.error(f"{jax.device_count()} devices do not make rows of --cp {arguments.cp}")
  history = train(config, dp, arguments.cp, arguments.overlap_degree)
  print(f"{history['compilations']} compilations for {config.num_steps} batches of masks")
  if arguments.compare:
    alone = train_on_one_device(config)
    difference = np.abs(np.subtract(history["loss"], alone["loss"])).max()
    print(f"largest difference of the loss to one device: {difference:.2g}")


if __name__ == "__main__":
  main()
