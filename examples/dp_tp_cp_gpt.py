"""Trains the GPT of muon_qk_clip.py on a mesh of data x tensor x context parallel devices.

The step is plain `jit`. Weights are split by heads and hidden units over "tp", rows over "dp", and
the tokens of a row over "cp". XLA moves the operands of matrix products. Attention is one call,
which moves only visible keys. The data loader dispatches the labels, too.

python examples/dp_tp_cp_gpt.py --devices 8              8 virtual CPU devices, 2 x 2 x 2
python examples/dp_tp_cp_gpt.py --devices 8 --compare    and on one, side by side
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
from context_parallel_gpt import CONFIG, make_keys, rotate, to_ranks, train_on_one_device
from muon_qk_clip import Config, init_params, make_batches, make_optimizer, normalize

# The mesh axes over which the axes of each weight are split. The first axis is layers.
SPECS = {
  "query": P(None, None, "tp"),
  "key": P(None, None, "tp"),
  "value": P(None, None, "tp"),
  "out": P(None, "tp"),
  "up": P(None, None, "tp"),
  "down": P(None, "tp"),
}
ROWS = P("dp", "cp")  # For arrays [batch, cp * local, ...].


def param_specs(params) -> dict:
  """The specs of parameters: blocks are split over "tp", embedding and head are replicated."""
  specs = jax.tree.map(lambda _: P(), params)
  return {**specs, "blocks": SPECS}


def host_batch(tokens: np.ndarray, documents: np.ndarray, keys: list) -> dict:
  """The operands of a step, each `[batch, cp * local]`, in the order of ranks."""
  labels = np.roll(tokens, -1, axis=1)
  counts = (np.roll(documents, -1, axis=1) == documents) & (documents > 0)
  counts[:, -1] = False
  return {
    "tokens": to_ranks(tokens, keys),
    "labels": to_ranks(labels, keys),
    "counts": to_ranks(counts, keys),  # False for padding.
    "positions": np.stack([jax_magi.get_position_ids(key) for key in keys]),
  }


def loss_and_max_logits(params, batch, key, mesh):
  """Mean cross entropy of the next byte, and the largest logits `[layers, num_q_heads]`."""
  positions = batch["positions"]

  def block(x, weights):
    y = normalize(x)
    q = rotate(jnp.einsum("bte,ehd->bthd", y, weights["query"]), positions)
    k = rotate(jnp.einsum("bte,ehd->bthd", y, weights["key"]), positions)
    v = jnp.einsum("bte,ehd->bthd", y, weights["value"])
    out, meta = jax_magi.context_parallel_attention(
      q, k, v, key, mesh=mesh, batch_axis="dp", head_axis="tp", return_max_logits=True
    )
    x = x + jnp.einsum("bthd,hde->bte", out, weights["out"])
    return x + jax.nn.gelu(normalize(x) @ weights["up"]) @ weights["down"], meta.max_logits

  x, max_logits = jax.lax.scan(block, params["embedding"][batch["tokens"]], params["blocks"])
  logits = normalize(x) @ params["head"]
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
  counts = batch["counts"]
  return jnp.sum(losses * counts) / jnp.sum(counts), reduce_max_logits(max_logits, 1)


def make_step(mesh, config: Config):
  """The compiled step."""

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, batch, key):
    (loss, max_logits), grads = jax.value_and_grad(loss_and_max_logits, has_aux=True)(
      params, batch, key, mesh
    )
    optimizer = make_optimizer(config, config.threshold)
    updates, state = optimizer.update(grads, state, params, max_logits=max_logits)
    return optax.apply_updates(params, updates), state, loss, max_logits.max()

  return step


def train(config: Config, dp: int, tp: int, cp: int) -> dict:
  """Trains on dp x tp x cp devices; returns losses, largest logits and the last weights."""
  mesh = jax.make_mesh(
    (dp, tp, cp),
    ("dp", "tp", "cp"),
    devices=jax.devices()[: dp * tp * cp],
    axis_types=(AxisType.Auto,) * 3,
  )
  place = functools.partial(NamedSharding, mesh)
  params = init_params(config, jax.random.key(0))
  params = jax.device_put(params, jax.tree.map(place, param_specs(params)))
  # Under jit, the optimizer's arrays get the shardings of the weights that they belong to.
  state = jax.jit(make_optimizer(config, config.threshold).init)(params)
  step = make_step(mesh, config)
  history: dict = {"loss": [], "max_logit": []}
  room = None
  for number, (tokens, documents) in zip(
    range(config.num_steps), make_batches(config), strict=False
  ):
    keys = make_keys(documents, cp, overlap_degree=1)
    room = functools.reduce(operator.or_, (k.capacities for k in keys), room or keys[0].capacities)
    key = jax.device_put(jax_magi.stack_keys(keys, room), place(P("cp", "dp")))
    batch = jax.device_put(host_batch(tokens, documents, keys), place(ROWS))
    params, state, loss, max_logit = step(params, state, batch, key)
    history["loss"].append(float(loss))
    history["max_logit"].append(float(max_logit))
    if number % 5 == 0 or number == config.num_steps - 1:
      print(
        f"dp {dp} x tp {tp} x cp {cp}: step {number}, loss {loss:.4f}, "
        f"largest logit {max_logit:.2f}"
      )
  return {**history, "params": params}


def main() -> None:
  """Entry point."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--devices", type=int, help="virtual CPU devices (default: all devices)")
  parser.add_argument("--tp", type=int, default=2, help="devices that share heads")
  parser.add_argument("--cp", type=int, default=2, help="devices that share a row")
  parser.add_argument("--steps", type=int, default=CONFIG.num_steps)
  parser.add_argument("--compare", action="store_true", help="train on one device, too")
  arguments = parser.parse_args()
  if arguments.devices:  # Before JAX looks for devices.
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_num_cpu_devices", arguments.devices)
  config = dataclasses.replace(CONFIG, num_steps=arguments.steps)
  dp = jax.device_count() // (arguments.tp * arguments.cp)
  if dp == 0 or config.batch % dp or config.num_kv_heads % arguments.tp:
    parser.error(
      f"{jax.device_count()} devices, --tp {arguments.tp} and --cp {arguments.cp} do not split "
      f"{config.batch} rows and {config.num_kv_heads} kv heads evenly"
    )
  history = train(config, dp, arguments.tp, arguments.cp)
  if arguments.compare:
    alone = train_on_one_device(config)
    difference = np.abs(np.subtract(history["loss"], alone["loss"])).max()
    print(f"largest difference of the loss to one device: {difference:.2g}")


if __name__ == "__main__":
  main()
