"""`python -m jax_magi`: it tells the truth, with and without devices and native modules."""

import dataclasses
import os
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_magi
from jax_magi._src.about import facts
from jax_magi._src.about.command import _kernels_of, main, report
from jax_magi._src.native import backends
from jax_magi._src.native.backends import BACKENDS
from tests.needs import with_gpus

ROOT = Path(__file__).resolve().parent.parent


def _run(*command, **environment):
  return subprocess.run(
    [sys.executable, *command],
    cwd=ROOT,
    env={**os.environ, **environment},
    check=False,
    capture_output=True,
    text=True,
  )


def test_version_is_the_one_of_pyproject():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert jax_magi.__version__ == project["version"]


def test_command_names_versions_devices_kernels_and_choices():
  done = _run("-m", "jax_magi")
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith(f"jax_magi {jax_magi.__version__}, built from commit ")
  assert f"jax {jax.__version__}" in done.stdout
  for name, backend in BACKENDS.items():
    assert f"\n  {name}: " in done.stdout
    if backend.module is not None:
      assert backend.module.COMPILER in done.stdout
  ends = r"(attention(_fn)?|attn(_func)?|softmax)$"
  names = {name for name in jax_magi.__all__ if re.search(ends, name, re.IGNORECASE)}
  # Plain JAX everywhere.
  assert {name for name in names if name not in done.stdout} == {
    "merge_attention",
    "explain_attention",
    "explain_softmax",
  }
  assert done.stderr == ""


def test_without_native_modules_it_says_so():
  hide = (
    "import sys; sys.modules.update({f'jax_magi._src.native.{m}': None for m in ['_cpu', '_cuda']})"
  )
  done = _run("-c", f"{hide}; from jax_magi.__main__ import main; sys.exit(main())")
  assert done.returncode == 0, done.stderr
  assert "built from commit unknown" in done.stdout
  for name in BACKENDS:
    assert f"\n  {name}: none" in done.stdout
  assert "native kernel (" not in done.stdout
  assert "this build of jax_magi has no kernels for this platform" in done.stdout


def test_without_devices_it_says_what_jax_says():
  done = _run("-m", "jax_magi", JAX_PLATFORMS="nowhere")
  assert done.returncode == 1
  assert "JAX finds none" in done.stdout and "nowhere" in done.stdout
  assert "kernels of this build" in done.stdout


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("more", 2)])
def test_help(argument, status, capsys):
  with pytest.raises(SystemExit) as ended:
    main([argument])
  assert ended.value.code == status
  assert ("Exit status" in capsys.readouterr().out) == (status == 0)


def test_variants_name_the_instruction_set_that_is_used():
  backend = BACKENDS["cpu"]
  if backend.module is None:
    pytest.skip("this build has no CPU kernels")
  variants = backend.module.variants()
  (chosen,) = variants["instruction set of this processor"]
  assert chosen in variants["instruction sets"]
  assert f"instruction set of this processor: {chosen}" in report()


@pytest.fixture
def partial_build(monkeypatch):
  """A build with JAX_MAGI_CUDA_VARIANTS="64,64,bfloat16_t;128,128,bfloat16_t", on any machine."""
  module = types.SimpleNamespace(
    COMMIT="0123456789ab",
    COMPILER="CUDA 13.0 for sm_90a",
    LEFT_OUT="64 float16 (sm90), 128 float16 (sm90)",
    variants=lambda: {"attention sm90": ["64 bfloat16", "128 bfloat16"]},
    shared_memory_of=lambda compute_capability: 99 << 10,
  )
  backend = dataclasses.replace(BACKENDS["cuda"], module=module)
  monkeypatch.setitem(BACKENDS, "cuda", backend)
  return backend


def test_a_partial_build_says_what_it_has_and_what_is_left_out(partial_build):
  text = report()
  assert "attention sm90: 64 bfloat16, 128 bfloat16" in text
  assert f"attention, left out of this build: {partial_build.module.LEFT_OUT}" in text
  choices = {c.operands: c for c in facts.choices("cuda")}
  assert choices["bfloat16, head dim 128"].implementation == "cuda_sm90"
  large = choices["bfloat16, head dim 256"]
  assert large.implementation == "blockwise"
  assert "for bfloat16 it has only head dims up to 128" in large.reason
  assert "for float16 it has none" in choices["float16, head dim 128"].reason
  assert choices["float16"].reason is None  # Softmax is never left out.


def test_naming_kernels_that_a_partial_build_lacks_is_an_error(partial_build):
  q = jnp.zeros((16, 2, 128), jnp.float16)
  mask = jax_magi.AttentionMask.causal(16)
  with pytest.raises(NotImplementedError, match="left out of this build: for float16 it has none"):
    jax_magi.attention(q, q, q, mask, implementation="cuda")


def test_a_whole_build_has_nothing_left_out():
  for backend in BACKENDS.values():
    if backend.module is not None and not backend.module.LEFT_OUT:
      assert "left out" not in "\n".join(_kernels_of(backend.platform, backend))


def test_the_report_tells_architectures_apart(monkeypatch):
  backend = with_gpus(monkeypatch, ["8.0"], ("sm90", "sm80"))
  monkeypatch.setattr(backend.module, "COMPILER", "CUDA", raising=False)
  text = "\n".join(_kernels_of("cuda", backend))
  assert "attention sm80 is for GPUs of compute capability 8.0 and later" in text
  assert "attention sm80: 256 bfloat16, 256 float16" in text
  assert "cuda_sm80 has the best kernels that run on all GPUs here (compute capability 8.0)" in text
  choices = {c.operands: c for c in facts.choices("cuda")}
  chosen = choices["bfloat16, head dim 128"]
  assert (chosen.implementation, chosen.reason) == ("cuda_sm80", None)


def test_attention_logs_once_why_it_uses_the_plain_path(monkeypatch, caplog):
  monkeypatch.setattr(backends, "default_platform", lambda: "cuda")
  monkeypatch.setitem(BACKENDS, "cuda", dataclasses.replace(BACKENDS["cuda"], max_head_dim=40))
  backends._log_once.cache_clear()
  q = jnp.zeros((16, 2, 48), jnp.bfloat16)
  for length in (16, 8):
    jax_magi.attention(q[:length], q, q, jax_magi.AttentionMask.full(length, 16))
  (record,) = caplog.records
  assert record.levelname == "WARNING" and record.name == "jax_magi"
  assert "attention uses the plain path ('blockwise')" in record.getMessage()


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    ({}, None),
    ({"dtype": jnp.float32}, "bfloat16 and float16, not float32"),
    ({"dim": 264}, "head dims up to 256, not 264"),
    ({"dim": 256, "bias": (1, 8, 8)}, None),
    ({"dim": 264, "bias": (1, 8, 8)}, "head dims up to 256, not 264"),
    ({"bias": (1, 8, 8), "deterministic": True}, "no deterministic gradient of a bias"),
  ],
)
def test_explanation_of_attention(change, reason, monkeypatch):
  with_gpus(monkeypatch, [])
  options = dict(change)
  q = jax.ShapeDtypeStruct((8, 2, options.pop("dim", 64)), options.pop("dtype", jnp.bfloat16))
  if "bias" in options:
    options["bias"] = jax.ShapeDtypeStruct(options["bias"], q.dtype)
  explanation = jax_magi.explain_attention(q, q, q, **options)
  assert explanation.implementation == backends.default_platform()
  assert ("cuda" in explanation.native) == (reason is None)
  assert reason is None or re.search(f"not on cuda: .*{reason}", str(explanation))


def test_another_platform_has_no_kernels():
  assert {c.implementation for c in facts.choices("tpu")} == {"blockwise", "xla"}
  assert all("kernels for cpu and cuda only" in c.reason for c in facts.choices("tpu"))


@pytest.mark.parametrize("platform", list(BACKENDS))
def test_choices_are_what_a_program_calls(platform):
  def is_native(fun, *operands):
    text = jax.jit(fun).trace(*operands).lower(lowering_platforms=(platform,)).as_text()
    return "jax_magi_" in text

  for choice in facts.choices(platform):
    assert (choice.reason is None) == choice.implementation.startswith(platform)
    dtype, _, dim = choice.operands.partition(", head dim ")
    if dim:
      q = jax.ShapeDtypeStruct((16, 2, int(dim)), jnp.dtype(dtype))
      mask = jax_magi.AttentionMask.causal(16, 16)
      native = is_native(lambda q, mask=mask: jax_magi.attention(q, q, q, mask)[0], q)
    else:
      native = is_native(jax_magi.scaled_softmax, jax.ShapeDtypeStruct((8, 8), jnp.dtype(dtype)))
    assert native == (choice.reason is None), choice


def test_citation_and_changes_name_the_version():
  assert f"\nversion: {jax_magi.__version__}\n" in (ROOT / "CITATION.cff").read_text()
  assert jax_magi.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_documentation_shows_what_is_printed():
  shown = (ROOT / "docs" / "quick_start.md").read_text()
  _, _, choices = report().partition("implementations that calls use")
  for line in choices.splitlines()[1:]:
    # The choice differs from platform to platform; what is listed does not.
    assert re.split('native kernel|"', line)[0].rstrip() in shown
