"""How PyTorch peers are called, with stand-ins for their libraries that behave as documented."""

import itertools
import sys
import types

import numpy as np
import pytest

from benchmarks.beside import timed
from benchmarks.masks import MASKS
from benchmarks.peers import PEERS, Cell

torch = pytest.importorskip("torch")

BY_NAME = {peer.name: peer for peer in PEERS}
CALLS = [
  (name, mask) for name in ("flash_attention_3", "magi_attention") for mask in BY_NAME[name].masks
]


def _attend(q, k, v, visible):
  """q [tokens, heads, dim], kv heads shared; `visible` bool [q_len, k_len]."""
  k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
  scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
  scores = scores.masked_fill(~visible, -1e30)
  out = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)
  return out * visible.any(dim=1)[:, None, None]


def _band(q_len, k_len, *, lo=None, hi=None):
  """Visible where lo <= j - i <= hi."""
  distance = torch.arange(k_len)[None] - torch.arange(q_len)[:, None]
  visible = torch.ones((q_len, k_len), dtype=torch.bool)
  if lo is not None:
    visible &= distance >= lo
  return visible if hi is None else visible & (distance <= hi)


def _flash_band(q_len, k_len, causal, window_size):
  left, right = window_size
  shift = k_len - q_len  # Both are aligned to the last query and key.
  hi = 0 if causal else (None if right < 0 else right)
  return _band(
    q_len,
    k_len,
    lo=None if left < 0 else shift - left,
    hi=None if hi is None else shift + hi,
  )


def _flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
  assert softmax_scale is None and q.shape[0] == 1
  visible = _flash_band(q.shape[1], k.shape[1], causal, window_size)
  return _attend(q[0], k[0], v[0], visible)[None]


def _flash_attn_varlen_func(
  q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False
):
  assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
  visible = torch.zeros((len(q), len(k)), dtype=torch.bool)
  bounds = [list(itertools.pairwise(x.tolist())) for x in (cu_seqlens_q, cu_seqlens_k)]
  for (q_begin, q_end), (k_begin, k_end) in zip(*bounds, strict=True):
    assert q_end - q_begin <= max_seqlen_q and k_end - k_begin <= max_seqlen_k
    part = _flash_band(q_end - q_begin, k_end - k_begin, causal, (-1, -1))
    visible[q_begin:q_end, k_begin:k_end] = part
  return _attend(q, k, v, visible), None  # With lse, as some versions.


def _flex_flash_attn_func(q, k, v, q_ranges, k_ranges, attn_type_map=None, **options):
  assert q_ranges.dtype == k_ranges.dtype == attn_type_map.dtype == torch.int32
  visible = torch.zeros((len(q), len(k)), dtype=torch.bool)
  for q_range, k_range, kind in zip(q_ranges, k_ranges, attn_type_map, strict=True):
    (q_begin, q_end), (k_begin, k_end) = q_range.tolist(), k_range.tolist()
    q_len, k_len = q_end - q_begin, k_end - k_begin
    lo, hi = 0 if int(kind) & 2 else None, k_len - q_len if int(kind) & 1 else None
    part = _band(q_len, k_len, lo=lo, hi=hi)
    assert not (visible[q_begin:q_end, k_begin:k_end] & part).any()  # No pair twice.
    visible[q_begin:q_end, k_begin:k_end] |= part
  if options.get("disable_fwd_atomic_reduction"):
    ranges = sorted(x for x in q_ranges.tolist())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
  return _attend(q, k, v, visible), None


class _Event:
  def __init__(self, enable_timing):
    assert enable_timing

  def record(self):
    pass

  def elapsed_time(self, other):
    return 20.0


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
  """The stand-ins, and PyTorch's CPU in place of its GPU."""
  flash = types.SimpleNamespace(
    flash_attn_func=_flash_attn_func, flash_attn_varlen_func=_flash_attn_varlen_func
  )
  functional = types.SimpleNamespace(flex_flash_attn_func=_flex_flash_attn_func)
  monkeypatch.setitem(sys.modules, "flash_attn_interface", flash)
  monkeypatch.setitem(sys.modules, "magi_attention", types.SimpleNamespace(functional=functional))
  monkeypatch.setitem(sys.modules, "magi_attention.functional", functional)
  for name in ("tensor", "randn"):
    original = getattr(torch, name)

    def on_cpu(*arguments, original=original, **options):
      return original(*arguments, **(options | {"device": "cpu"}))

    monkeypatch.setattr(torch, name, on_cpu)
  generator = torch.Generator
  monkeypatch.setattr(torch, "Generator", lambda device: generator())
  for name in ("synchronize", "empty_cache"):
    monkeypatch.setattr(torch.cuda, name, lambda: None)
  monkeypatch.setattr(torch.cuda, "Event", _Event)


@pytest.mark.parametrize(("name", "mask"), CALLS)
def test_they_are_asked_for_the_mask(name, mask):
  cell = Cell(mask, MASKS[mask](1501), 16, 2, 1, "float32")
  assert timed(BY_NAME[name], cell) == {"seconds": pytest.approx(20e-3 / 3)}


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_passes(direction):
  cell = Cell("varlen_causal", MASKS["varlen_causal"](300), 64, 4, 2, "bfloat16", direction)
  for name in ("flash_attention_3", "magi_attention"):
    assert timed(BY_NAME[name], cell)["seconds"] > 0


def test_a_library_that_means_something_else_is_found_out(monkeypatch):
  def one_more(*arguments, window_size=(-1, -1), **options):
    return _flash_attn_func(*arguments, window_size=(window_size[0] + 1, 0), **options)

  monkeypatch.setattr(sys.modules["flash_attn_interface"], "flash_attn_func", one_more)
  cell = Cell("window", MASKS["window"](1400), 64, 2, 1, "float32")  # Not yet checked.
  assert "computes something else" in timed(BY_NAME["flash_attention_3"], cell)["note"]


def test_peers_say_why_they_are_absent():
  for name in ("flash_attention_3", "magi_attention"):
    if not torch.cuda.is_available():
      assert BY_NAME[name].absence() == "needs an NVIDIA GPU, and PyTorch sees none"


def test_inputs_have_the_cells_shapes():
  from benchmarks import torch_passes

  cell = Cell("full", MASKS["full"](32), 16, 4, 2, "float16")
  q, k, v = torch_passes.inputs(cell, BY_NAME["flash_attention_3"])
  assert [tuple(x.shape) for x in (q, k, v)] == [(32, 4, 16), (32, 2, 16), (32, 2, 16)]
  assert q.dtype == torch.float16
  assert np.isfinite(q.float().numpy()).all()
