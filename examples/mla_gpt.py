"""Trains a GPT with multi-head latent attention (MLA): packed documents, data x context parallel.

Layers keep, and devices exchange, only the latent and the rotary key of each token. Each device
expands the keys and values that its queries see. Muon trains the matrices. QK-Clip scales the parts
of a head's query and key with and without rotation, each by its own factor, and does not change the
rotary key, which all heads share. Labels stop at the ends of documents.

python examples/mla_gpt.py                              one device: a GPU, or the CPU
python examples/mla_gpt.py --compare                    without QK-Clip, and with it
python examples/mla_gpt.py --preset large --compare     the sizes of a real layer, for a GPU
python examples/mla_gpt.py --devices 8 --cp 4           8 virtual CPU devices
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import operator
import os
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
from jax_magi.optim import MlaProjections, Projection, muon_clip, raise_if_broken, reduce_max_logits

sys.path.insert(0, str(Path(__file__).parent))
from context_parallel_gpt import make_keys, rotate, to_ranks
from muon_qk_clip import VOCABULARY, make_batches, name_of, normalize, show_progress


@dataclasses.dataclass(frozen=True)
class Config:
  """The sizes of the model, and the settings of training. Dims are those of one head."""

  num_layers: int = 3
  embed: int = 64
  num_heads: int = 4
  nope_dim: int = 16  # Of queries and keys, without rotation.
  rope_dim: int = 8  # Of queries, and of the rotary key that all heads share.
  value_dim: int = 16
  q_rank: int = 32
  kv_rank: int = 32
  hidden: int = 256
  length: int = 256  # Tokens in a row.
  batch: int = 8  # Rows in a step.
  max_documents: int = 8  # In a row.
  num_steps: int = 150
  learning_rate: float = 0.3
  threshold: float = 30.0
  alpha: float = 0.5  # The queries' part of a correction.


PRESETS = {
  "small": Config(),
  "large": Config(
    num_layers=8, embed=1024, num_heads=16, nope_dim=128, rope_dim=64, value_dim=128, q_rank=384,
    kv_rank=512, hidden=4096, length=4096, batch=8, max_documents=64, num_steps=300,
    learning_rate=0.08, threshold=100.0,
  ),
}  # fmt: skip


# --- model ---

# Kernels of Muon besides those that QK-Clip scales.
MATRICES = {
  "blocks/q_a": "layers embed -> rank",
  "blocks/kv_a": "layers embed -> rank",
  "blocks/out": "layers heads dim -> embed",
  "blocks/up": "layers embed -> hidden",
  "blocks/down": "layers hidden -> embed",
}


def make_projections(config: Config) -> MlaProjections:
  """The three parts that QK-Clip scales. Values share a kernel with keys."""
  nope, both = config.nope_dim, config.nope_dim + config.rope_dim
  layout = "layers rank -> heads dim"
  return MlaProjections(
    q_nope=Projection("blocks/q_b", layout, dims=(0, nope)),
    q_rope=Projection("blocks/q_b", layout, dims=(nope, both)),
    k_nope=Projection("blocks/kv_b", layout, dims=(0, nope)),
  )


def init_params(config: Config, key: jax.Array):
  """Normal, of variance 1 / inputs."""
  c = config
  shapes = {  # Inputs, outputs.
    "q_a": ((c.embed,), (c.q_rank,)),
    "q_b": ((c.q_rank,), (c.num_heads, c.nope_dim + c.rope_dim)),
    "kv_a": ((c.embed,), (c.kv_rank + c.rope_dim,)),
    "kv_b": ((c.kv_rank,), (c.num_heads, c.nope_dim + c.value_dim)),
    "out": ((c.num_heads, c.value_dim), (c.embed,)),
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


def model(params, tokens, positions, attend, config: Config):
  """float32 logits of the next byte, and the largest attention logits `[layers, batch, heads]`.

  `attend(q, latent, expand)` returns out and max_logits of a batch of rows.
  """
  # The kernels for GPUs take 16-bit inputs.
  dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32

  def block(x, weights):
    weights = jax.tree.map(lambda w: w.astype(dtype), weights)
    y = normalize(x)
    q = jnp.einsum("btr,rhd->bthd", normalize(y @ weights["q_a"]), weights["q_b"])
    q_nope, q_rope = jnp.split(q, [config.nope_dim], axis=-1)
    q = jnp.concatenate([q_nope, rotate(q_rope, positions).astype(dtype)], axis=-1)
    kv, k_rope = jnp.split(y @ weights["kv_a"], [config.kv_rank], axis=-1)
    k_rope = rotate(k_rope[:, :, None], positions)[:, :, 0].astype(dtype)
    latent = {"kv": normalize(kv), "k_rope": k_rope}

    def expand(rows):
      """k and v of some rows of `latent`."""
      k_nope, v = jnp.split(
        jnp.einsum("tr,rhd->thd", rows["kv"], weights["kv_b"]), [config.nope_dim], axis=-1
      )
      shape = (*k_nope.shape[:2], config.rope_dim)
      k_rope = jnp.broadcast_to(rows["k_rope"][:, None], shape)
      return jnp.concatenate([k_nope, k_rope], axis=-1), v

    out, max_logits = attend(q, latent, expand)
    x = x + jnp.einsum("bthd,hde->bte", out, weights["out"])
    return x + jax.nn.gelu(normalize(x) @ weights["up"]) @ weights["down"], max_logits

  x = params["embedding"].astype(dtype)[tokens]
  x, max_logits = jax.lax.scan(block, x, params["blocks"])
  return (normalize(x) @ params["head"].astype(dtype)).astype(jnp.float32), max_logits


def loss_on_one_device(params, tokens, documents, config: Config):
  """Mean cross entropy inside of documents, and the largest logits `[layers, heads]`."""

  def attend(q, latent, expand):
    def row(q, latent, documents):
      mask = jax_magi.AttentionMask.from_segment_ids(documents, config.max_documents, causal=True)
      out, meta = jax_magi.latent_attention(q, latent, mask, expand=expand, return_max_logits=True)
      return out, meta.max_logits

    return jax.vmap(row)(q, latent, documents)

  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  logits, max_logits = model(params, tokens, positions, attend, config)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
  counts = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)
  return jnp.sum(losses * counts) / jnp.sum(counts), reduce_max_logits(max_logits, 1)


def local_loss(params, tokens, documents, key, config: Config):
  """The same on one of dp x cp devices, over the rows and tokens of all of them."""
  over_rows = functools.partial(jax.vmap, in_axes=(0, 1))

  def attend(q, latent, expand):
    def row(q, latent, key):
      out, meta = jax_magi.calc_latent_attn(
        q, latent, key, expand=expand, return_max_logits=True, reduce_max_logits=False
      )
      return out, meta.max_logits

    return jax.vmap(row, in_axes=(0, 0, 1))(q, latent, key)

  positions = jax.vmap(jax_magi.get_position_ids, in_axes=1)(key)
  logits, max_logits = model(params, tokens, positions, attend, config)
  # The next token of a chunk's last one is on another device.
  labels, next_documents = (over_rows(jax_magi.roll)(x, key) for x in (tokens, documents))
  counts = (next_documents == documents) & (documents > 0) & (positions + 1 < key.spec.q_len)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  devices = ("dp", "cp")
  loss = jax.lax.psum(jnp.sum(losses * counts), devices) / jax.lax.psum(counts.sum(), devices)
  # All layers' maxima, over rows and devices, in one collective.
  return loss, reduce_max_logits(max_logits, 1, axis_name=devices)


# --- training ---


def make_optimizer(config: Config, threshold):
  """Muon, far too fast, for the blocks; Adam, at a tenth of that, for embedding and head."""
  muon_rate, adam_rate = (
    optax.warmup_cosine_decay_schedule(0.0, peak, config.num_steps // 15, config.num_steps)
    for peak in (config.learning_rate, 0.1 * config.learning_rate)
  )
  return muon_clip(
    muon_rate,
    make_projections(config),
    MATRICES,
    threshold,
    alpha=config.alpha,
    weight_decay=0.0,
    report=False,  # raise_if_broken does it, and JAX's cache can keep a step without callbacks.
    adam_learning_rate=adam_rate,
  )


def make_step(config: Config, threshold: float, mesh=None):
  """The compiled step; of dp x cp devices if there is a mesh."""
  loss = functools.partial(loss_on_one_device, config=config)
  if mesh is not None:
    rows = P("dp", "cp")
    loss = jax.shard_map(
      functools.partial(local_loss, config=config),
      mesh=mesh,
      in_specs=(P(), rows, rows, P("cp", "dp")),
      out_specs=(P(), P()),
    )

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, *batch):
    (value, max_logits), grads = jax.value_and_grad(loss, has_aux=True)(params, *batch)
    optimizer = make_optimizer(config, threshold)
    updates, state = optimizer.update(grads, state, params, max_logits=max_logits)
    return optax.apply_updates(params, updates), state, value, max_logits.max(axis=1)

  return step


def batches_of_ranks(config: Config, mesh, overlap_degree: int):
  """Tokens and documents in the order of ranks, and the plans of their masks, on the devices."""
  dp_cp, room = NamedSharding(mesh, P("dp", "cp")), None
  for tokens, documents in make_batches(config):
    keys = make_keys(documents, mesh.shape["cp"], overlap_degree)
    # Room for every mask so far: the step is compiled anew only when it grows.
    room = functools.reduce(
      operator.or_, (key.capacities for key in keys), room or keys[0].capacities
    )
    key = jax.device_put(jax_magi.stack_keys(keys, room), NamedSharding(mesh, P("cp", "dp")))
    yield *(jax.device_put(to_ranks(x, keys), dp_cp) for x in (tokens, documents)), key


def train(config: Config, clip: bool = True, dp: int = 1, cp: int = 1, overlap_degree: int = 1):
  """Trains once; returns the loss and each layer's largest logit, step by step."""
  threshold = config.threshold if clip else math.inf
  mesh, batches = None, make_batches(config)
  params = init_params(config, jax.random.key(0))
  if dp * cp > 1:
    devices = jax.devices()[: dp * cp]
    mesh = jax.make_mesh((dp, cp), ("dp", "cp"), devices=devices, axis_types=(AxisType.Auto,) * 2)
    batches = batches_of_ranks(config, mesh, overlap_degree)
    params = jax.device_put(params, NamedSharding(mesh, P()))
  state = jax.jit(make_optimizer(config, threshold).init)(params)
  step = make_step(config, threshold, mesh)
  history: dict = {"clip": clip, "loss": [], "max_logit": [], "max_logits": []}
  begin = time.perf_counter()
  for _, batch in zip(range(config.num_steps), batches, strict=False):
    params, state, loss, max_logits = step(params, state, *batch)
    if clip:
      raise_if_broken(state)
    if not jnp.isfinite(loss):
      print(f"\n{name_of(history)}: the loss is {loss}, there is nothing left to train")
      break
    history["loss"].append(float(loss))
    history["max_logits"].append(np.asarray(max_logits).tolist())
    history["max_logit"].append(max(history["max_logits"][-1]))
    show_progress(history, config.num_steps)
  return {**history, "seconds": time.perf_counter() - begin}


def plot(results: dict, path: Path) -> None:
  """Loss, and each layer's largest logit, over steps."""
  import matplotlib  # Here, so that a machine without it can train and write --json.

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
  for number, history in enumerate(results["runs"]):
    left.plot(history["loss"], color=f"C{number}", label=name_of(history))
    layers = np.array(history["max_logits"]).T
    for layer, maxima in enumerate(layers):
      name = f"{name_of(history)}, {len(layers)} layers" if layer == 0 else None
      right.semilogy(maxima, color=f"C{number}", alpha=0.6, linewidth=1, label=name)
  threshold = results["config"]["threshold"]
  right.axhline(threshold, color="gray", linestyle="--", label="threshold")
  left.set(title="loss", xlabel="step")
  right.set(title="largest attention logit of each layer", xlabel="step")
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
  parser.add_argument("--devices", type=int, help="virtual CPU devices (default: all devices)")
  parser.add_argument("--cp", type=int, default=1, help="devices that share a row")
  parser.add_argument("--overlap-degree", type=int, default=1)
  parser.add_argument("--preset", choices=PRESETS, default="small", help="sizes of the model")
  for field in dataclasses.fields(Config):
    kind = type(getattr(Config(), field.name))
    flag = f"--{field.name.replace('_', '-')}"
    parser.add_argument(flag, type=kind, help="instead of the preset's")
  parser.add_argument("--plot", type=Path, default=Path("out/mla_gpt.png"))
  parser.add_argument("--json", type=Path, help="where to write all figures")
  arguments = parser.parse_args()
  if arguments.from_json:
    plot(json.loads(arguments.from_json.read_text()), arguments.plot)
    return
  if arguments.devices:  # Before JAX looks for devices.
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_num_cpu_devices", arguments.devices)
  given = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(Config)}
  config = dataclasses.replace(
    PRESETS[arguments.preset], **{k: v for k, v in given.items() if v is not None}
  )
  dp = jax.device_count() // arguments.cp
  if dp == 0 or config.batch % dp:
    parser.error(f"{jax.device_count()} devices do not make rows of --cp {arguments.cp}")
  device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
  print(f"{config}\non {device}")
  clips = (False, True) if arguments.compare else (not arguments.no_clip,)
  histories = [train(config, clip, dp, arguments.cp, arguments.overlap_degree) for clip in clips]
  for history in histories:
    print(
      f"{name_of(history)}: loss {history['loss'][-1]:.3f}, "
      f"largest logit {history['max_logit'][-1]:.1f} (threshold {config.threshold:.0f}), "
      f"{history['seconds']:.0f} s"
    )
  results = {"config": dataclasses.asdict(config), "device": device, "runs": histories}
  if arguments.json:
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")
  plot(results, arguments.plot)


if __name__ == "__main__":
  main()
