"""QK-Clip with Flax NNX: max_logits are one more output of the scan over layers."""

import jax
import jax.numpy as jnp
from flax import nnx

import jax_magi
from jax_magi.optim import Projection, QkProjections, muon_clip, reduce_max_logits

EMBED, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS, THRESHOLD = 32, 4, 2, 8, 3, 3.0


class Block(nnx.Module):
  """Attention over documents; returns its max_logits as well."""

  def __init__(self, rngs):
    self.norm = nnx.RMSNorm(EMBED, rngs=rngs)
    self.query = nnx.LinearGeneral(EMBED, (NUM_Q_HEADS, HEAD_DIM), rngs=rngs)
    self.key = nnx.LinearGeneral(EMBED, (NUM_KV_HEADS, HEAD_DIM), rngs=rngs)
    self.value = nnx.LinearGeneral(EMBED, (NUM_KV_HEADS, HEAD_DIM), rngs=rngs)
    self.out = nnx.LinearGeneral((NUM_Q_HEADS, HEAD_DIM), EMBED, axis=(-2, -1), rngs=rngs)

  def __call__(self, x, documents):  # noqa: D102
    y = self.norm(x)
    out, meta = jax_magi.dot_product_attention(
      self.query(y), self.key(y), self.value(y), is_causal=True,
      segment_ids=documents, max_segments=4, return_meta=True, return_max_logits=True,
    )  # fmt: skip
    return x + self.out(out), meta.max_logits


class Model(nnx.Module):
  """Blocks under scan: parameters and max_logits get a leading axis of layers."""

  def __init__(self, rngs):
    self.blocks = nnx.split_rngs(splits=NUM_LAYERS)(nnx.vmap(Block))(rngs)

  def __call__(self, x, documents):  # noqa: D102
    def apply(x, block):
      return block(x, documents)

    scan = nnx.scan(apply, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    x, max_logits = scan(x, self.blocks)  # [layers, batch, num_q_heads]
    return x, reduce_max_logits(max_logits, 1)


def projection(name):
  """The kernel and the bias of a projection. Both affect the logits."""
  return (
    Projection(f"blocks/{name}/kernel", "layers embed -> heads dim"),
    Projection(f"blocks/{name}/bias", "layers -> heads dim"),
  )


OPTIMIZER = muon_clip(
  learning_rate=0.02,
  projections=QkProjections(q=projection("query"), k=projection("key")),
  matrices={
    "blocks/value/kernel": "layers embed -> heads dim",
    "blocks/out/kernel": "layers heads dim -> embed",
  },
  threshold=THRESHOLD,
)


@nnx.jit
def train_step(model, optimizer, x, target, documents):
  """One step; the statistics go from the forward pass to the optimizer as values."""

  def loss_fn(model):
    out, max_logits = model(x, documents)
    return jnp.mean((out - target) ** 2), max_logits

  (loss, max_logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
  optimizer.update(model, grads, max_logits=max_logits)
  return loss, max_logits


def main(num_steps=40):
  """Trains; returns each step's max_logits, `[layers, num_q_heads]`."""
  x, target = jax.random.normal(jax.random.key(0), (2, 2, 64, EMBED))
  documents = jnp.repeat(jnp.array([[1, 2], [1, 2]]), 32, axis=1)
  model = Model(nnx.Rngs(1))
  optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
  history = []
  for _ in range(num_steps):
    loss, max_logits = train_step(model, optimizer, x, target, documents)
    history.append(max_logits)
    print(f"loss {loss:.3f}  largest logit {max_logits.max():.2f}")
  return history


if __name__ == "__main__":
  main()
