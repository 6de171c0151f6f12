"""Trains small models with MaxText, and compares the losses of jax_magi with `dot_product`.

Run by scripts/test_trainers.py, in an environment with MaxText: six steps in float32 on packed
synthetic data, on four devices, without a context axis and with one of 2 and of 4, and with
QK-Clip. The losses must be equal to 1e-5.
"""

from __future__ import annotations

import functools
import json
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
os.environ["DECOUPLE_GCLOUD"] = "TRUE"  # MaxText without Google's cloud.

import jax
import numpy as np
from maxtext.layers.attention_op import AttentionOp
from maxtext.trainers.pre_train import train
from maxtext.utils import qk_clip_utils
from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

from examples.trainers import maxtext_attention, maxtext_qk_clip

STEPS, TOLERANCE, THRESHOLD = 6, 1e-5, 0.3
COMMON = (
  "dataset_type=synthetic packing=true max_segments_per_seq=4 max_target_length=64 "
  "per_device_batch_size=2 enable_checkpointing=false hardware=cpu dtype=float32 "
  "weight_dtype=float32 matmul_precision=highest vocab_size=128 base_emb_dim=32 "
  "base_num_query_heads=4 base_num_kv_heads=2 head_dim=16 base_mlp_dim=32 "
  "base_num_decoder_layers=2 learning_rate=0.003 warmup_steps_fraction=0 "
  "skip_jax_distributed_system=true log_config=false enable_goodput_recording=false "
  "monitor_goodput=false enable_checkpoint_cloud_logger=false remat_policy=minimal_with_context "
  "sharding_tolerance=1.0"
)
MOE = "num_experts=4 num_experts_per_tok=2 base_moe_mlp_dim=32 sparse_matmul=false megablox=false"
FAMILIES = {
  "llama": "decoder_block=llama2",
  "gemma2": (
    "decoder_block=gemma2 sliding_window_size=16 attn_logits_soft_cap=2.0 "
    "final_logits_soft_cap=30.0 use_post_attn_norm=true use_post_ffw_norm=true"
  ),
  "gpt_oss": (
    "decoder_block=gpt_oss sliding_window_size=16 attention_sink=true attention_bias=true "
    f"mlp_bias=true inhomogeneous_layer_cycle_interval=2 routed_bias=true {MOE}"
  ),
  "mla": (
    "decoder_block=deepseek attention_type=mla first_num_dense_layers=1 q_lora_rank=16 "
    f"kv_lora_rank=16 qk_nope_head_dim=16 qk_rope_head_dim=8 v_head_dim=16 shared_experts=1 {MOE} "
    "base_num_kv_heads=4"
  ),
}


def losses(family: str, attention: str, context: int, clips: bool, more: str = "") -> np.ndarray:
  """The loss of each step, by MaxText's own trainer."""
  with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "metrics"
    given = dict(x.split("=") for x in f"{COMMON} {FAMILIES[family]} {more}".split())
    given |= {"attention": attention, "ici_context_parallelism": context, "steps": STEPS}
    given |= {"base_output_directory": folder, "run_name": "check", "metrics_file": file}
    argv = ["", f"{MAXTEXT_CONFIGS_DIR}/base.yml", *(f"{k}={v}" for k, v in given.items())]
    config, recorder = train.initialize(argv)
    config.get_keys()["use_qk_clip"] = clips
    config.get_keys()["qk_clip_threshold"] = THRESHOLD
    train.run(config, recorder)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
  jax.clear_caches()
  return np.array([line["learning/loss"] for line in lines])


def prepare() -> None:
  """Installs the adapters."""
  maxtext_attention.install()
  installed = AttentionOp.apply_attention

  # MaxText's own attention has maxima, too, if it is asked for them.
  def with_maxima(op, **given):
    return installed(op, **(given | {"record_max_logits": op.config.use_qk_clip}))

  AttentionOp.apply_attention = with_maxima
  qk_clip_utils.apply_qk_clip_nnx = maxtext_qk_clip.apply_qk_clip_nnx


def main(families: list[str]) -> int:
  """Runs all families, or those named, and returns the exit status."""
  prepare()
  worst = {}
  for family in families or FAMILIES:
    for clips in (False, True):
      # MaxText's maxima are those after softcap.
      more = "attn_logits_soft_cap=0" if clips and family == "gemma2" else ""
      run = functools.partial(losses, family, clips=clips, more=more)
      want = run("dot_product", 1)
      for context in (1, 2, 4):
        found = run("jax_magi", context)
        name = f"{family}, context {context}{', QK-Clip' if clips else ''}"
        worst[name] = float(np.abs(found - want).max())
        print(f"RESULT {name}: {worst[name]:.1e}", found, want, flush=True)
  print(*(f"{name}: {error:.1e}" for name, error in worst.items()), sep="\n")
  return 0 if max(worst.values()) <= TOLERANCE else 1


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
