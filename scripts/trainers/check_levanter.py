"""Trains a small Llama with Levanter, and compares the losses of jax_magi with plain attention.

Run by scripts/test_trainers.py, in an environment with Levanter: six steps of its trainer in
float32 on packed documents, on four devices, without a context axis and with one of 2 and of 4,
and with QK-Clip. The losses must be equal to 1e-5.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

# Four devices; and without XLA's optimizations, which take longer than the steps.
os.environ["XLA_FLAGS"] = (
  "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
)
os.environ["NPROC"] = "16"  # Threads of XLA: each collective holds one for each device.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["WANDB_MODE"] = "disabled"

import haliax as hax
import jax
import numpy as np
import optax
from levanter.layers import attention
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.utils.mesh import MeshConfig

import jax_magi
from examples.trainers import levanter_attention, levanter_qk_clip

THEIRS = attention.dot_product_attention
STEPS, TOLERANCE, THRESHOLD = 6, 1e-5, 0.3
LENGTH, BATCH, VOCAB = 64, 8, 128


def examples(config: LlamaConfig) -> list[LmExample]:
  """A batch for each step: up to four documents, and padding."""
  rng, Batch, Pos = np.random.default_rng(0), hax.Axis("batch", BATCH), config.max_Pos
  batches = []
  for _ in range(STEPS):
    tokens = rng.integers(0, VOCAB, (BATCH, LENGTH), dtype=np.int32)
    cuts = np.sort(rng.integers(1, LENGTH, (BATCH, 4)), axis=1)
    ids = (np.arange(LENGTH) >= cuts[:, :, None]).sum(1).astype(np.int32)
    ids = np.where(ids == 4, -1, ids)
    weight = ((ids == np.roll(ids, -1, axis=1)) & (ids >= 0)).astype(np.float32)
    tokens, ids, weight = (hax.named(x, (Batch, Pos)) for x in (tokens, ids, weight))
    batches.append(LmExample(tokens, weight, AttentionMask.causal(segment_ids=(ids, ids))))
  return batches


def losses(context: int, clips: bool) -> np.ndarray:
  """The loss of each step, by Levanter's own trainer."""
  config = LlamaConfig(
    max_seq_len=LENGTH, hidden_dim=32, intermediate_dim=32, num_layers=2, num_heads=4,
    num_kv_heads=2, attn_backend=AttentionBackend.VANILLA,
  )  # fmt: skip
  Vocab = hax.Axis("vocab", VOCAB)
  optimizer = optax.adam(0.01)
  if clips:
    optimizer = levanter_qk_clip.with_qk_clip(optimizer, THRESHOLD)
  mapping = {"position": "context"} if context > 1 else {}
  mesh = MeshConfig(axes={"context": context, "data": 4 // context}, compute_mapping=mapping)
  with tempfile.TemporaryDirectory() as folder:
    options = TrainerConfig(
      id="check", num_train_steps=STEPS, train_batch_size=BATCH, tracker=NoopConfig(), mesh=mesh,
      require_accelerator=False, log_dir=Path(folder), log_jaxprs=False, log_xla_hlo=False,
    )  # fmt: skip

    def loss_fn(model, example, *, key=None):
      return model.compute_next_token_loss(example, key=key)

    with Trainer(options, optimizer, loss_fn, add_default_hooks=False) as trainer:
      state = trainer.initial_state(
        jax.random.key(0), model_init=lambda: config.build(Vocab, key=jax.random.key(1))
      )
      found = []
      for batch in examples(config):
        step = trainer.train_step(state, batch)
        state, loss = step.state, step.loss
        found.append(loss)
  jax.clear_caches()  # Of layers with another attention.
  return np.array(found)


def plain_attend(QPos, KPos, Key, query, key, value, mask, return_max_logits=False, **more):
  """`levanter_attention.attend` by Levanter's own attention; maxima from all logits."""
  out = THEIRS(QPos, KPos, Key, query, key, value, mask, **more)
  ids = mask.segment_ids[0]
  is_seen = mask.materialize(query.resolve_axis(QPos), key.resolve_axis(KPos)) & (ids >= 0)
  logits = hax.dot(query, key, axis=Key) / np.sqrt(query.axis_size(Key))
  highest = hax.max(hax.where(is_seen, logits, -np.inf), (QPos, KPos))
  highest = highest.rearrange(("batch", "kv_head", "q_heads_per_group")).array
  return out, jax_magi.AttnForwardMeta(None, highest.reshape(len(highest), -1))


def main() -> int:
  """Runs all, and returns the exit status."""
  worst = {}
  for clips in (False, True):
    if clips:
      levanter_qk_clip.install()
      levanter_qk_clip.attend = plain_attend
    want = losses(1, clips)
    levanter_qk_clip.attend = levanter_attention.attend
    if not clips:
      levanter_attention.install()
    for context in (1, 2, 4):
      found = losses(context, clips)
      name = f"Llama, context {context}{', QK-Clip' if clips else ''}"
      worst[name] = float(np.abs(found - want).max())
      print(f"{name}: {worst[name]:.1e}", found, want, flush=True)
  return 0 if max(worst.values()) <= TOLERANCE else 1


if __name__ == "__main__":
  sys.exit(main())
