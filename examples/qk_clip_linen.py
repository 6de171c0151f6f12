"""QK-Clip with Flax Linen: max_logits are one more output of the scan over layers."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jax_magi
from jax_magi.optim import Projection, QkProjections, muon_clip, reduce_max_logits

EMBED, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS, THRESHOLD = 32, 4, 2, 8, 3, 3.0


class Block(nn.Module):
  """Attention over documents; returns its max_logits as well."""

  @nn.compact
  def __call__(self, x, documents):  # noqa: D102
    y = nn.RMSNorm()(x)
    q = nn.DenseGeneral((NUM_Q_HEADS, HEAD_DIM), name="query")(y)
    k = nn.DenseGeneral((NUM_KV_HEADS, HEAD_DIM), name="key")(y)
    v = nn.DenseGeneral((NUM_KV_HEADS, HEAD_DIM), name="value")(y)
    out, meta = jax_magi.dot_product_attention(
      q, k, v, is_causal=True, segment_ids=documents, max_segments=4,
      return_meta=True, return_max_logits=True,
    )  # fmt: skip
    return x + nn.DenseGeneral(EMBED, axis=(-2, -1), name="out")(out), meta.max_logits


class Model(nn.Module):
  """Blocks under scan: parameters and max_logits get a leading axis of layers."""

  @nn.compact
  def __call__(self, x, documents):  # noqa: D102
    blocks = nn.scan(
      Block,
      variable_axes={"params": 0},
      split_rngs={"params": True},
      in_axes=nn.broadcast,
      length=NUM_LAYERS,
    )
    x, max_logits = blocks(name="blocks")(x, documents)  # [layers, batch, num_q_heads]
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


@jax.jit
def train_step(params, state, x, target, documents):
  """One step; the statistics go from the forward pass to the optimizer as values."""

  def loss_fn(params):
    out, max_logits = Model().apply({"params": params}, x, documents)
    return jnp.mean((out - target) ** 2), max_logits

  (loss, max_logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
  updates, state = OPTIMIZER.update(grads, state, params, max_logits=max_logits)
  return optax.apply_updates(params, updates), state, loss, max_logits


def main(num_steps=40):
  """Trains; returns each step's max_logits, `[layers, num_q_heads]`."""
  x, target = jax.random.normal(jax.random.key(0), (2, 2, 64, EMBED))
  documents = jnp.repeat(jnp.array([[1, 2], [1, 2]]), 32, axis=1)
  params = Model().init(jax.random.key(1), x, documents)["params"]
  state = OPTIMIZER.init(params)
  history = []
  for _ in range(num_steps):
    params, state, loss, max_logits = train_step(params, state, x, target, documents)
    history.append(max_logits)
    print(f"loss {loss:.3f}  largest logit {max_logits.max():.2f}")
  return history


if __name__ == "__main__":
  main()
