"""Bytes on the wire in programs for eight GPUs, compiled on one GPU or on none."""

import re

import pytest

from jax_magi import overlap
from tests import gpu_latents, gpu_program
from tests.gpu_compiler import needs_compiler, run_compiler

LOCAL = 256


@needs_compiler
@pytest.mark.parametrize(
  ("degree", "transport", "mask", "rows"),
  [
    ("2", "all_to_all", "documents", "latents"),
    pytest.param("2", "all_to_all", "documents", "expanded", marks=pytest.mark.long),
    pytest.param("1", "all_gather", "full", "latents,expanded", marks=pytest.mark.long),
    pytest.param("1", "ragged", "documents", "latents,expanded", marks=pytest.mark.long),
  ],
)
def test_rows_are_on_the_wire_as_they_are(degree, transport, mask, rows):
  """Latents are a thirtieth of expanded rows, and so are the bytes that travel."""
  assert 30 * gpu_latents.WIDTHS["latents"] <= gpu_latents.WIDTHS["expanded"]
  text = run_compiler("tests.gpu_latents", degree, transport, mask, str(LOCAL), rows)
  programs = re.split(r"^(?=HloModule )", text, flags=re.MULTILINE)[1:]
  key = gpu_program.make_key(1, gpu_latents.GPUS, degree, transport, mask, LOCAL)
  for kind, program in zip(rows.split(","), programs, strict=True):
    schedule = overlap.schedule_of(program)
    assert overlap.faults_of(schedule) == []
    exchanges = [c for c in schedule.collectives if c.exchange]
    # All of them overlap with a kernel. The only other collective of both passes is one sum of the
    # parameters' gradients.
    assert all(c.is_async and c.attention for c in exchanges)
    others = [c for c in schedule.collectives if not c.exchange]
    assert [c.opcode for c in others] == ["all-reduce"]
    between, inside = (
      sum(sizes)
      for sizes in zip(*(overlap.link_bytes(c, gpu_latents.GPUS) for c in exchanges), strict=True)
    )
    # Twice in 16 bits and once in 32, padding included.
    width = gpu_latents.WIDTHS[kind]
    assert (between, inside) == (0, key.stats().padded_rows * width * 8)
