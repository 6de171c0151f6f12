"""Bytes on the wire in programs for eight GPUs, compiled on one GPU or on none."""

import re

import pytest

from jax_magi import overlap
from tests import gpu_latents, gpu_program
from tests.gpu_compiler import needs_compiler, run_compiler

LOCAL = 256


@needs_compiler
@pytest.mark.parametrize(
  ("degree", "transport", "mask"),
  [
    ("2", "all_to_all", "documents"),
    pytest.param("1", "all_gather", "full", marks=pytest.mark.long),
    pytest.param("1", "ragged", "documents", marks=pytest.mark.long),
  ],
)
def test_latents_are_a_thirtieth_of_expanded_rows(degree, transport, mask):
  words = (degree, transport, mask, str(LOCAL))
  text = run_compiler("tests.gpu_latents", *words)
  latents, expanded = re.split(r"^(?=HloModule )", text, flags=re.MULTILINE)[1:]
  key = gpu_program.make_key(1, gpu_latents.GPUS, int(degree), transport, mask, LOCAL)
  moved = []
  for program, width in (
    (latents, gpu_latents.LATENT_WIDTH),
    (expanded, gpu_latents.EXPANDED_WIDTH),
  ):
    schedule = overlap.schedule_of(program)
    assert overlap.faults_of(schedule) == []
    exchanges = [c for c in schedule.collectives if c.exchange]
    # All of them beside a kernel, and nothing else in either pass but the sum of the parameters'
    # gradients, once.
    assert all(c.is_async and c.attention for c in exchanges)
    others = [c for c in schedule.collectives if not c.exchange]
    assert [c.opcode for c in others] == ["all-reduce"]
    between, inside = (
      sum(sizes)
      for sizes in zip(*(overlap.link_bytes(c, gpu_latents.GPUS) for c in exchanges), strict=True)
    )
    # Twice in 16 bits and once in 32, padding included.
    assert (between, inside) == (0, key.stats().padded_rows * width * 8)
    moved.append(inside)
  assert 30 * moved[0] <= moved[1]
