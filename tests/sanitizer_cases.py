"""Small calls of every kind of CUDA kernel, to be run under compute-sanitizer.

XLA_PYTHON_CLIENT_ALLOCATOR=platform \\
  compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.sanitizer_cases

and likewise with `--tool racecheck`, `--tool synccheck` and `--tool initcheck`. The platform's
allocator gives every array memory of its own; in a pool, a kernel that reads or writes past its
array would hit another one, and memcheck would see nothing. `--kernel-name kns=jax_magi` leaves
XLA's own kernels out, which is faster; not for initcheck, which has to see them write what ours
read. In some long runs compute-sanitizer itself ended with a segmentation fault: `--only` runs part
of the cases.

Results are held to the accuracy rule, so that a run that went wrong otherwise does not pass.
"""

import argparse
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jax_magi
from jax_magi import AttentionMask
from tests.accuracy import check_attention, make_inputs
from tests.list_calls import call_with_list, forged_list
from tests.machine import choose_architecture
from tests.needs import forward_in_clusters
from tests.softmax_cases import SoftmaxCase, check_softmax
from tests.stages import check_stages, mask_of_weights

_UNEVEN = AttentionMask.from_ranges(
  [[0, 33], [40, 41], [50, 150]], [[0, 70], [3, 9], [60, 161]], [1, 0, 3], q_len=150, k_len=161
)
_MASKS = {
  "causal": AttentionMask.causal(129, 131),
  "uneven": _UNEVEN,
  "short_queries": AttentionMask.causal(5, 200),
  "length_1": AttentionMask.full(1),
}
# The head dims of each pair of kernels, and dims that are padded.
_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256), (40, 24)]


def _attention(dims, mask, deterministic, bias=None, bias_dtype=None, has_alibi=False, **options):
  shape = (mask.q_len, mask.k_len, 4, 2, *dims)
  terms = {"bias": bias, "bias_dtype": bias_dtype, "has_alibi": has_alibi}
  inputs = make_inputs(np.random.default_rng(0), jnp.bfloat16, *shape, num_sinks=0, **terms)
  for is_mask_known in (False, True):
    check_attention(
      inputs,
      mask,
      "cuda",
      deterministic=deterministic,
      is_mask_known=is_mask_known,
      **options,
    )


def _in_clusters(mask):
  """Two CTAs that share keys, and process all tiles."""
  with forward_in_clusters():
    _attention((128, 128), mask, deterministic=False, sm_margin=130)


def _stages(dims, mask, deterministic, heads=(4, 2), **options):
  """Three calls, each with a third of the keys, that continue with each other's results."""
  shape = (mask.q_len, mask.k_len, *heads, *dims)
  inputs = make_inputs(np.random.default_rng(0), jnp.bfloat16, *shape, num_sinks=0)
  cuts = [i * mask.k_len // 3 for i in range(4)]
  bounds = list(itertools.pairwise(cuts))[::-1]
  check_stages(inputs, mask, bounds, "cuda", deterministic=deterministic, **options)


def _batch():
  """One kernel call over a batch, with a mask for each row."""
  rng = np.random.default_rng(0)
  q, k, v = (
    jnp.asarray(rng.standard_normal((3, 130, heads, 64)), jnp.bfloat16) for heads in (4, 2, 2)
  )
  lengths = jnp.array([130, 1, 77], jnp.int32)

  def loss(q, k, v):
    out = jax_magi.dot_product_attention(
      q, k, v, is_causal=True, key_value_seq_lengths=lengths, implementation="cuda"
    )
    return out.astype(jnp.float32).sum()

  gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
  assert all(jnp.isfinite(g).all() for g in gradients)


def _forged_list():
  """A list whose tiles exceed the arrays. Rows that belong to no tile are not written, nor read."""
  mask = AttentionMask.causal(180)
  call_with_list(mask, forged_list(mask))


def _bias_cases():
  # 161 is not a multiple of 8, and 136 is: kernels load the bias in different ways.
  aligned = AttentionMask.from_ranges([[0, 70], [80, 150]], [[0, 136], [3, 90]], [1, 3], k_len=136)
  masks = {"uneven": _UNEVEN, "aligned": aligned}
  # The other masks are too short for a ring of stages to wrap around.
  masks |= {f"long_{name}": AttentionMask.causal(150, x.k_len + 864) for name, x in masks.items()}
  for dims, (name, mask), (bias, bias_dtype, has_alibi), deterministic in itertools.product(
    [(64, 64), (128, 128), (192, 128), (256, 256)],
    masks.items(),
    [
      ("hqk", None, False),
      ("hqk", np.float32, False),
      ("1qk", None, False),
      ("h1k", None, True),
      ("11k", np.float32, False),
      (None, None, True),
    ],
    [False, True],
  ):
    # Such a bias has no deterministic gradient. Long masks differ only in the rings.
    if deterministic and (bias == "1qk" or name.startswith("long")):
      continue
    kind = f"{bias or 'no'}_bias{'-f32' if bias_dtype else ''}{'-alibi' if has_alibi else ''}"
    terms = {"bias": bias, "bias_dtype": bias_dtype, "has_alibi": has_alibi}
    yield (
      f"bias-{dims[0]}-{name}-{kind}{'-deterministic' if deterministic else ''}",
      functools.partial(_attention, dims, mask, deterministic, **terms),
    )


def _cases():
  """The (name, call) of every case."""
  for dims in _DIMS:
    for name, mask in _MASKS.items():
      for deterministic in (False, True):
        kind = "-deterministic" if deterministic else ""
        yield (
          f"attention-{dims[0]}-{dims[1]}-{name}{kind}",
          functools.partial(_attention, dims, mask, deterministic),
        )
    yield (
      f"attention-{dims[0]}-{dims[1]}-softcap",
      functools.partial(_attention, dims, _UNEVEN, False, softcap=3.0),
    )
    # One CTA processes all tiles, and begins a tile while it finishes the one before.
    yield (
      f"attention-{dims[0]}-{dims[1]}-alone",
      functools.partial(_attention, dims, AttentionMask.causal(300, 400), False, sm_margin=131),
    )
    yield (  # Tiles that are cut along their keys.
      f"attention-{dims[0]}-{dims[1]}-parts",
      functools.partial(_attention, dims, AttentionMask.full(130, 1300), False),
    )
    if dims in [(64, 64), (128, 128)]:  # Two CTAs that share key tiles.
      yield (
        f"attention-{dims[0]}-{dims[1]}-clusters",
        functools.partial(_attention, dims, AttentionMask.full(6200, 512), False),
      )
  for dims in _DIMS:
    for name, mask in {**_MASKS, "parts": AttentionMask.full(130, 3900)}.items():
      yield f"stages-{dims[0]}-{name}", functools.partial(_stages, dims, mask, False)
    # Tiles of keys whose query heads are cut: for some, into parts of several.
    yield (
      f"stages-{dims[0]}-head_cuts",
      functools.partial(_stages, dims, mask_of_weights(80), False, heads=(6, 1)),
    )
    yield f"stages-{dims[0]}-deterministic", functools.partial(_stages, dims, _UNEVEN, True)
    yield f"stages-{dims[0]}-softcap", functools.partial(_stages, dims, _UNEVEN, False, softcap=3.0)
  for name, mask in (("long", AttentionMask.full(300, 1100)), ("uneven", _UNEVEN)):
    yield f"attention-128-128-forward-clusters-{name}", functools.partial(_in_clusters, mask)
  yield "attention-batch", _batch
  yield "attention-forged-list", _forged_list
  yield from _bias_cases()
  for k_len in (17, 1000, 5001, 20001):  # Rows in a warp, a block, and memory.
    case = SoftmaxCase(
      f"softmax-{k_len}", (1, 2, 3, k_len), 0.5, (3, k_len), is_causal=True, has_offset=True
    )
    for dtype in ("f32", "bf16"):
      yield f"{case.name}-{dtype}", functools.partial(check_softmax, case, dtype, "cuda")


def main() -> None:
  choose_architecture()
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", default="", help="run the cases whose name contains this")
  arguments = parser.parse_args()
  num_cases = 0
  for name, call in _cases():
    if arguments.only in name:
      print(name, file=sys.stderr, flush=True)
      call()
      num_cases += 1
  print(f"{num_cases} cases, all of them right")


if __name__ == "__main__":
  main()
