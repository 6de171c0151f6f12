"""Trains a small GPT with Muon, with and without QK-Clip, and plots loss and largest logit.

The model has grouped-query attention without QK-norm, layers under scan, and documents packed into
rows; the learning rate is far too high on purpose. Without QK-Clip the attention logits run away,
attention freezes, and the model falls far behind; with it they stay at the threshold.

python examples/muon_qk_clip.py              with QK-Clip
python examples/muon_qk_clip.py --no-clip    without
python examples/muon_qk_clip.py --compare    one after the other, in one plot

The batch is split over all devices that JAX finds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import random
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi.optim import Projection, QkProjections, muon_clip, raise_if_broken, reduce_max_logits

VOCABULARY = 128  # ASCII.


@dataclasses.dataclass(frozen=True)
class Config:
  """The sizes of the model, and the settings of training."""

  num_layers: int = 4
  embed: int = 64
  num_q_heads: int = 4
  num_kv_heads: int = 2
  head_dim: int = 16
  hidden: int = 256
  length: int = 256  # Tokens in a row.
  batch: int = 8  # Rows in a step.
  max_documents: int = 8  # In a row.
  num_steps: int = 150
  learning_rate: float = 0.3
  threshold: float = 100.0


PRESETS = {
  "small": Config(),
  "large": Config(
    num_layers=8, embed=768, num_q_heads=12, num_kv_heads=4, head_dim=64, hidden=3072,
    length=2048, batch=8, max_documents=32, num_steps=200, learning_rate=0.08,
  ),
}  # fmt: skip


# --- text ---

NAMES = "Ada Ben Cleo Dan Eva Finn Gwen Hugo Iris Jack Kira Liam Mona Nils Olga Paul".split()
THINGS = "apple book coin drum egg flute glove horn ink jar key lamp map net oar pen".split()
PLACES = "attic barn cellar desk engine forest garden hall island jungle kitchen lake".split()


def make_document(rng: random.Random) -> str:
  """Facts, and questions about them. The answers can only be looked up in the text."""
  count = rng.randint(2, 5)
  facts = list(zip(*(rng.sample(words, count) for words in (NAMES, THINGS, PLACES)), strict=True))
  lines = [f"{name} took the {thing} to the {place}." for name, thing, place in facts]
  for name, thing, place in rng.sample(facts, count):
    questions = (
      f"Who has the {thing}? {name}.",
      f"Where is the {thing}? The {place}.",
      f"Where is {name}? The {place}.",
    )
    lines.append(rng.choice(questions))
  return " ".join(lines) + "\n"


def make_batches(config: Config):
  """Yields tokens and document numbers, int32 `[batch, length]` each; 0 is padding."""
  rng = random.Random(0)
  while True:
    tokens = np.zeros((config.batch, config.length), np.int32)
    documents = np.zeros((config.batch, config.length), np.int32)
    for row in range(config.batch):
      begin, number = 0, 1
      while begin < config.length and number <= config.max_documents:
        text = np.frombuffer(make_document(rng).encode(), np.uint8)[: config.length - begin]
        tokens[row, begin : begin + len(text)] = text
        documents[row, begin : begin + len(text)] = number
        begin, number = begin + len(text), number + 1
    yield tokens, documents


# --- model ---

# Where the query and key projections are, and which other kernels are Muon's.
PROJECTIONS = QkProjections(
  q=Projection("blocks/query", "layers embed -> heads dim"),
  k=Projection("blocks/key", "layers embed -> heads dim"),
)
MATRICES = {
  "blocks/value": "layers embed -> heads dim",
  "blocks/out": "layers heads dim -> embed",
  "blocks/up": "layers embed -> hidden",
  "blocks/down": "layers hidden -> embed",
}


def init_params(config: Config, key: jax.Array):
  """Normal, of variance 1 / inputs."""
  c = config
  shapes = {  # Inputs, outputs.
    "query": ((c.embed,), (c.num_q_heads, c.head_dim)),
    "key": ((c.embed,), (c.num_kv_heads, c.head_dim)),
    "value": ((c.embed,), (c.num_kv_heads, c.head_dim)),
    "out": ((c.num_q_heads, c.head_dim), (c.embed,)),
    "up": ((c.embed,), (c.hidden,)),
    "down": ((c.hidden,), (c.embed,)),
  }
  keys = iter(jax.random.split(key, len(shapes) + 2))

  def normal(shape, num_inputs):
    return jax.random.normal(next(keys), shape) * num_inputs**-0.5

  return {
    "embedding": normal((VOCABULARY, c.embed), 1),
    "blocks": {
      name: normal((c.num_layers, *inputs, *outputs), math.prod(inputs))
      for name, (inputs, outputs) in shapes.items()
    },
    "head": normal((c.embed, VOCABULARY), c.embed),
  }


def normalize(x):
  """RMS norm, without a scale."""
  x32 = x.astype(jnp.float32)
  return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def rotate(x):
  """Rotary position embedding of `[batch, length, heads, dim]`."""
  half = x.shape[-1] // 2
  angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
  cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def loss_and_max_logits(params, tokens, documents, config: Config):
  """Mean cross entropy of the next byte, and the largest logits `[layers, num_q_heads]`."""
  # The kernels for GPUs take 16-bit inputs.
  dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32

  def block(x, weights):
    weights = jax.tree.map(lambda w: w.astype(dtype), weights)
    y = normalize(x)
    q = rotate(jnp.einsum("bte,ehd->bthd", y, weights["query"]))
    k = rotate(jnp.einsum("bte,ehd->bthd", y, weights["key"]))
    v = jnp.einsum("bte,ehd->bthd", y, weights["value"])
    out, meta = jax_magi.dot_product_attention(
      q,
      k,
      v,
      is_causal=True,
      segment_ids=documents,
      max_segments=config.max_documents,
      return_meta=True,
      return_max_logits=True,
    )
    x = x + jnp.einsum("bthd,hde->bte", out, weights["out"])
    hidden = jax.nn.gelu(normalize(x) @ weights["up"])
    return x + hidden @ weights["down"], meta.max_logits

  x = params["embedding"].astype(dtype)[tokens]
  x, max_logits = jax.lax.scan(block, x, params["blocks"])
  logits = (normalize(x) @ params["head"].astype(dtype)).astype(jnp.float32)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
  counts = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)
  return jnp.sum(losses * counts) / jnp.sum(counts), reduce_max_logits(max_logits, 1)


# --- training ---


def make_optimizer(config: Config, threshold):
  """Muon, far too fast, for the blocks; Adam, at a tenth of that, for embedding and head."""
  muon_rate, adam_rate = (
    optax.warmup_cosine_decay_schedule(0.0, peak, config.num_steps // 15, config.num_steps)
    for peak in (config.learning_rate, 0.1 * config.learning_rate)
  )
  return muon_clip(
    muon_rate,
    PROJECTIONS,
    MATRICES,
    threshold,
    weight_decay=0.0,
    report=False,  # raise_if_broken does it, and JAX's cache can keep a step without callbacks.
    adam_learning_rate=adam_rate,
  )


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("params", "state"))
def train_step(params, state, batch, threshold, config: Config):
  """One step; max_logits go from the forward pass to the optimizer as values."""
  (loss, max_logits), grads = jax.value_and_grad(loss_and_max_logits, has_aux=True)(
    params, *batch, config
  )
  optimizer = make_optimizer(config, threshold)
  updates, state = optimizer.update(grads, state, params, max_logits=max_logits)
  return optax.apply_updates(params, updates), state, loss, max_logits.max()


def train(config: Config, clip: bool) -> dict:
  """Trains once; returns what happened, step by step."""
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
  replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
  threshold = config.threshold if clip else math.inf
  params = jax.device_put(init_params(config, jax.random.key(0)), replicated)
  state = jax.device_put(make_optimizer(config, threshold).init(params), replicated)
  history = {"clip": clip, "loss": [], "max_logit": []}
  begin = time.perf_counter()
  for _, batch in zip(range(config.num_steps), make_batches(config), strict=False):
    batch = jax.device_put(batch, split)
    params, state, loss, max_logit = train_step(params, state, batch, threshold, config)
    if clip:
      raise_if_broken(state)
    if not jnp.isfinite(loss):
      print(f"\n{name_of(history)}: the loss is {loss}, there is nothing left to train")
      break
    history["loss"].append(float(loss))
    history["max_logit"].append(float(max_logit))
    show_progress(history, config.num_steps)
  return {**history, "seconds": time.perf_counter() - begin}


def name_of(history: dict) -> str:
  """The name of a run in the legend."""
  return "with QK-Clip" if history["clip"] else "without QK-Clip"


def show_progress(history: dict, total: int) -> None:
  """Draws a progress bar. If the output is a file, writes a line now and then."""
  done, loss, max_logit = len(history["loss"]), history["loss"][-1], history["max_logit"][-1]
  bar = "#" * (30 * done // total)
  text = (
    f"{name_of(history):15} [{bar:30}] {done}/{total}  loss {loss:6.3f}  "
    f"largest logit {max_logit:7.1f}"
  )
  if sys.stdout.isatty():
    print(f"\r{text}", end="\n" if done == total else "", flush=True)
  elif done == total or done % max(1, total // 10) == 0:
    print(text, flush=True)


def plot(results: dict, path: Path) -> None:
  """Loss and largest logit over steps."""
  import matplotlib  # Here, so that a machine without it can train and write --json.

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
  for history in results["runs"]:
    left.plot(history["loss"], label=name_of(history))
    right.semilogy(history["max_logit"], label=name_of(history))
  threshold = results["config"]["threshold"]
  right.axhline(threshold, color="gray", linestyle="--", label="threshold")
  left.set(title="loss", xlabel="step")
  right.set(title="largest attention logit", xlabel="step")
  left.legend()
  right.legend()
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=120)
  print(f"plot: {path}")


def main() -> None:
  """Entry point."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  which = parser.add_mutually_exclusive_group()
  which.add_argument("--no-clip", action="store_true", help="train without QK-Clip")
  which.add_argument("--compare", action="store_true", help="train without QK-Clip, then with it")
  which.add_argument("--from-json", type=Path, help="only draw what --json wrote")
  parser.add_argument("--preset", choices=PRESETS, default="small", help="sizes of the model")
  for field in ("num_steps", "batch", "learning_rate", "threshold"):
    kind = type(getattr(Config(), field))
    parser.add_argument(f"--{field.replace('_', '-')}", type=kind, help="instead of the preset's")
  parser.add_argument("--plot", type=Path, default=Path("out/muon_qk_clip.png"))
  parser.add_argument("--json", type=Path, help="where to write all figures")
  arguments = parser.parse_args()
  if arguments.from_json:
    plot(json.loads(arguments.from_json.read_text()), arguments.plot)
    return
  config = PRESETS[arguments.preset]
  given = {f.name: getattr(arguments, f.name, None) for f in dataclasses.fields(Config)}
  config = dataclasses.replace(config, **{k: v for k, v in given.items() if v is not None})
  if config.batch % jax.device_count():
    parser.error(f"--batch must be a multiple of {jax.device_count()} devices")

  device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
  print(f"{config}\non {device}")
  clips = (False, True) if arguments.compare else (not arguments.no_clip,)
  histories = [train(config, clip) for clip in clips]
  for history in histories:
    print(
      f"{name_of(history)}: loss {history['loss'][-1]:.3f}, "
      f"largest logit {history['max_logit'][-1]:.1f} (threshold {config.threshold:.0f}), "
      f"{history['seconds']:.0f} s"
    )
  results = {"config": dataclasses.asdict(config), "device": device, "runs": histories}
  if arguments.json:
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")
  plot(results, arguments.plot)


if __name__ == "__main__":
  main()
