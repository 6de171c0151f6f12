"""Which attention kernels a call uses on which GPUs; runs without any GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_magi
from tests.needs import with_gpus

_Q = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)


@pytest.mark.parametrize(
  ("capability", "attention", "softmax"),
  [
    ("7.5", False, False),
    ("8.0", False, True),
    ("8.9", False, True),
    ("9.0", True, True),
    ("10.0", False, True),
    ("12.1", False, True),
  ],
)
def test_gpus_of_each_generation_get_what_they_can_run(capability, attention, softmax, monkeypatch):
  backend = with_gpus(monkeypatch, [capability])
  found = backend.attention_obstacle(_Q, _Q), backend.softmax_obstacle(_Q)
  assert [x is None for x in found] == [attention, softmax]
  assert backend.has_attention_device() == attention
  if not attention:
    words = "Hopper GPUs (compute capability 9.0)"
    here = f"the GPUs here have compute capability {capability}"
    assert found[0] == f"the kernels are for {words}, but {here}"


def test_a_gpu_without_kernels_leaves_them_to_the_others(monkeypatch):
  backend = with_gpus(monkeypatch, ["7.5", "9.0"])
  assert backend.attention_obstacle(_Q, _Q) is None
  assert backend.softmax_obstacle(_Q) is None


@pytest.mark.parametrize(
  ("capabilities", "name"),
  [
    (["7.5"], None),
    (["8.0"], "cuda_sm80"),
    (["8.9"], "cuda_sm80"),
    (["9.0"], "cuda_sm90"),
    (["10.0"], "cuda_sm80"),
    (["8.0", "9.0"], "cuda_sm80"),  # They run on both.
    (["7.5", "9.0"], "cuda_sm90"),  # None runs on both.
    ([], "cuda_sm90"),  # We may be exporting.
  ],
)
def test_the_best_kernels_that_all_gpus_run_are_taken(capabilities, name, monkeypatch):
  backend = with_gpus(monkeypatch, capabilities, ("sm90", "sm80"))
  obstacle = backend.attention_obstacle(_Q, _Q)
  if name is None:
    assert "compute capability 8.0 and later, but the GPUs here have" in obstacle
    assert obstacle.endswith(" 7.5")
    return
  assert obstacle is None
  assert backend.for_attention(_Q, _Q).kernels == name
  explanation = jax_magi.explain_attention(_Q, _Q, _Q, implementation="cuda")
  assert explanation.implementation == name
  assert f"{name} has the best kernels" in str(explanation)


@pytest.mark.parametrize(
  ("implementation", "capabilities", "match"),
  [
    ("cuda_sm80", ["9.0"], None),
    ("cuda_sm90", ["9.0"], None),
    ("cuda_sm90", ["8.0"], "are for Hopper GPUs .* compute capability 8.0"),
    ("cuda_sm80", ["7.5"], "are for GPUs of compute capability 8.0 and later"),
  ],
)
def test_kernels_are_named_by_their_architecture(implementation, capabilities, match, monkeypatch):
  with_gpus(monkeypatch, capabilities, ("sm90", "sm80"))
  explain = functools.partial(jax_magi.explain_attention, _Q, _Q, _Q, implementation=implementation)
  if match is None:
    assert explain().implementation == implementation
    return
  with pytest.raises(NotImplementedError, match=match):
    explain()


def test_an_architecture_that_was_not_built_is_an_error_to_who_names_it(monkeypatch):
  with_gpus(monkeypatch, ["9.0"])
  q = jnp.zeros((16, 2, 128), jnp.float16)
  mask = jax_magi.AttentionMask.causal(16)
  with pytest.raises(NotImplementedError, match="no kernels for GPUs of compute capability"):
    jax_magi.attention(q, q, q, mask, implementation="cuda_sm80")


@pytest.mark.parametrize(
  ("capabilities", "cap", "kilobytes"),
  [
    (["8.0"], None, 163),
    (["8.0", "8.6"], None, 99),  # The same program runs on both.
    (["9.0"], None, 227),
    ([], None, 99),
    (["8.0"], "120", 120),
    (["8.6"], "163", 99),
  ],
)
def test_shared_memory_is_what_all_gpus_have(capabilities, cap, kilobytes, monkeypatch):
  backend = with_gpus(monkeypatch, capabilities, ("sm80",))
  if cap is not None:
    monkeypatch.setenv("JAX_MAGI_SHARED_MEMORY_KB", cap)
  chosen = backend.for_attention(_Q, _Q)
  assert chosen.shared_memory_bytes() == kilobytes << 10


@pytest.mark.parametrize("cap", ["98", "-1", "many"])
def test_a_bad_cap_of_shared_memory_is_named(cap, monkeypatch):
  backend = with_gpus(monkeypatch, ["8.0"], ("sm80",))
  monkeypatch.setenv("JAX_MAGI_SHARED_MEMORY_KB", cap)
  with pytest.raises(ValueError, match=f"JAX_MAGI_SHARED_MEMORY_KB .* got '{cap}'"):
    backend.for_attention(_Q, _Q).shared_memory_bytes()
