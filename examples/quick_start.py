"""Attention over packed documents: output, statistics, gradients, and a picture of the mask."""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import jax_magi

matplotlib.use("Agg")


def main():
  """Entry point."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
  parser.add_argument(
    "--only-picture", action="store_true", help="draw only the picture (no kernels)"
  )
  arguments = parser.parse_args()
  out_dir = arguments.out
  out_dir.mkdir(parents=True, exist_ok=True)

  # Four documents in one row of 1024 tokens, and some padding: the form data pipelines have.
  lengths, length = [300, 70, 410, 180], 1024
  segment_ids = np.zeros(length, np.int32)
  segment_ids[: sum(lengths)] = np.repeat([1, 2, 3, 4], lengths)
  mask = jax_magi.AttentionMask.from_segment_ids(segment_ids, max_segments=8, causal=True)
  print(f"mask: {mask}, {mask.area() / length**2:.1%} of the score matrix")
  picture = out_dir / "quick_start_mask.png"
  mask.plot(title="four documents, causal").figure.savefig(picture, dpi=120)
  print(f"picture of the mask: {picture.resolve()}", flush=True)
  if arguments.only_picture:
    return

  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (length, 8, 64), jnp.bfloat16)
  k = jax.random.normal(keys[1], (length, 2, 64), jnp.bfloat16)
  v = jax.random.normal(keys[2], (length, 2, 64), jnp.bfloat16)

  @jax.jit
  def loss_and_statistics(q, k, v, mask):
    out, meta = jax_magi.attention(q, k, v, mask, return_max_logits=True)
    # lse is float32 and differentiable: here, a penalty on its size.
    is_token = meta.lse > -jnp.inf
    penalty = jnp.mean(jnp.where(is_token, meta.lse, 0.0) ** 2)
    return jnp.mean(out.astype(jnp.float32) ** 2) + 1e-3 * penalty, (out, meta)

  step = jax.jit(jax.value_and_grad(loss_and_statistics, argnums=(0, 1, 2), has_aux=True))
  (loss, (out, meta)), grads = step(q, k, v, mask)
  print(f"loss        {loss:.4f}")
  print(f"out         {out.dtype}{list(out.shape)}, padding rows are zero: {not out[-1].any()}")
  print(f"lse         {meta.lse.dtype}{list(meta.lse.shape)}, first rows {meta.lse[:3, 0]}")
  print(f"max_logits  {np.round(meta.max_logits, 2)}")
  for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
    print(f"{name}          {grad.dtype}{list(grad.shape)}, norm {jnp.linalg.norm(grad):.4f}")

  # The mask is data: another packing runs the same compiled step.
  other = np.repeat([1, 2], [512, 512]).astype(np.int32)
  step(q, k, v, jax_magi.AttentionMask.from_segment_ids(other, max_segments=8, causal=True))
  print(f"compilations for two masks: {step._cache_size()}")


if __name__ == "__main__":
  main()
