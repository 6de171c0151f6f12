"""Trains a small transformer with our attention and with JAX's, on the same packed documents.

python -m benchmarks.train_step [--json FILE] [--plot FILE] [--steps N] [--tiny]

Eight layers under `lax.scan` with rematerialisation, 4096 tokens of documents packed in one row,
bf16 compute, float32 weights, Adam. JAX's attention takes the documents as a dense mask, because
its cuDNN path supports no other form. Prints losses, their differences, and the time of a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_magi
from benchmarks.masks import documents


@dataclasses.dataclass(frozen=True)
class Model:
  """The sizes of the transformer."""

  num_layers: int = 8
  width: int = 2048
  num_q_heads: int = 16
  num_kv_heads: int = 4
  head_dim: int = 128
  vocabulary: int = 4096
  length: int = 4096


def init(model: Model, key: jax.Array) -> dict:
  def normal(key, *shape):
    return jax.random.normal(key, shape) * shape[-2] ** -0.5

  # As GPT-2 has it: the residual stream does not grow with depth.
  branch = (2 * model.num_layers) ** -0.5

  def layer(key):
    keys = jax.random.split(key, 6)
    q_dim, kv_dim = (n * model.head_dim for n in (model.num_q_heads, model.num_kv_heads))
    return {
      "q": normal(keys[0], model.width, q_dim),
      "k": normal(keys[1], model.width, kv_dim),
      "v": normal(keys[2], model.width, kv_dim),
      "out": branch * normal(keys[3], q_dim, model.width),
      "up": normal(keys[4], model.width, 4 * model.width),
      "down": branch * normal(keys[5], 4 * model.width, model.width),
    }

  keys = jax.random.split(key, model.num_layers + 1)
  return {
    "embedding": jax.random.normal(keys[0], (model.vocabulary, model.width)) * 0.02,
    "layers": jax.vmap(layer)(keys[1:]),
  }


def _normalise(x: jax.Array) -> jax.Array:
  x = x.astype(jnp.float32)
  return (x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)


def loss_of(model: Model, attention: Callable, params: dict, tokens: jax.Array) -> jax.Array:
  """The next-token loss. `attention` takes q, k, v of shape `[length, heads, head_dim]`."""

  @jax.checkpoint
  def layer(x, weights):
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    y = _normalise(x)
    q, k, v = ((y @ weights[n]).reshape(len(x), -1, model.head_dim) for n in "qkv")
    x = x + attention(q, k, v).reshape(len(x), -1) @ weights["out"]
    y = _normalise(x)
    return x + jax.nn.gelu(y @ weights["up"]) @ weights["down"], None

  x = params["embedding"].astype(jnp.bfloat16)[tokens[:-1]]
  x, _ = jax.lax.scan(layer, x, params["layers"])
  logits = _normalise(x) @ params["embedding"].astype(jnp.bfloat16).T
  losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[1:])
  return losses.mean()


def make_tokens(model: Model, num_steps: int) -> np.ndarray:
  """Text that can be learned: most tokens follow from the token before."""
  rng = np.random.default_rng(0)
  follows = rng.permutation(model.vocabulary)
  tokens = rng.integers(0, model.vocabulary, (num_steps, model.length + 1))
  for i in range(1, model.length + 1):
    is_kept = rng.random(num_steps) < 0.8
    tokens[:, i] = np.where(is_kept, follows[tokens[:, i - 1]], tokens[:, i])
  return tokens.astype(np.int32)


def train(model: Model, attention: Callable, num_steps: int) -> dict:
  # Calm enough that rounding hardly grows: curves show the gradients, not chaos.
  optimizer = optax.adam(optax.warmup_constant_schedule(0.0, 3e-5, warmup_steps=20))
  params = init(model, jax.random.key(0))
  state = optimizer.init(params)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, tokens):
    loss, gradients = jax.value_and_grad(functools.partial(loss_of, model, attention))(
      params, tokens
    )
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state, loss

  losses, times = [], []
  for tokens in jnp.asarray(make_tokens(model, num_steps)):
    start = time.perf_counter()
    params, state, loss = step(params, state, tokens)
    losses.append(float(loss))  # Waits.
    times.append(time.perf_counter() - start)
  return {"losses": losses, "step_ms": 1e3 * statistics.median(times[2:])}


def contenders(model: Model) -> dict[str, Callable]:
  mask = jax_magi.AttentionMask.from_cu_seqlens(documents(model.length), causal=True)

  def dense(q, k, v, implementation):
    options = {"mask": jnp.asarray(mask.to_dense())[None, None], "implementation": implementation}
    return jax.nn.dot_product_attention(q[None], k[None], v[None], **options)[0]

  found = {"ours": lambda q, k, v: jax_magi.attention(q, k, v, mask)[0]}
  if jax.default_backend() == "gpu":
    found["cudnn"] = functools.partial(dense, implementation="cudnn")
  found["xla"] = functools.partial(dense, implementation="xla")
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--json", type=Path)
  parser.add_argument("--plot", type=Path)
  parser.add_argument("--steps", type=int, default=50)
  parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
  arguments = parser.parse_args()
  model = Model()
  if arguments.tiny:
    model = Model(
      num_layers=2, width=64, num_q_heads=4, num_kv_heads=2, head_dim=16, vocabulary=64, length=256
    )
  results = {}
  for name, attention in contenders(model).items():
    results[name] = train(model, attention, arguments.steps)
    losses = results[name]["losses"]
    text = f"loss {losses[0]:.4f} .. {losses[-1]:.4f}, {results[name]['step_ms']:.2f} ms a step"
    print(f"  {name:6} {text}", flush=True)
  for one, other in itertools.combinations(results, 2):
    difference = np.abs(np.subtract(results[one]["losses"], results[other]["losses"])).max()
    print(f"  largest difference of losses, {one} to {other}: {difference:.4f}")
  if arguments.json:
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")
  if arguments.plot:
    plot(results, arguments.plot)


def plot(results: dict, path: Path) -> None:
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
  for (name, result), style in zip(results.items(), ("-", "--", ":"), strict=False):
    ax.plot(result["losses"], style, label=f"{name}, {result['step_ms']:.1f} ms a step")
  ax.set(xlabel="step", ylabel="loss", title="8 layers, 4096 packed tokens")
  ax.legend()
  figure.savefig(path, dpi=120)


if __name__ == "__main__":
  main()
