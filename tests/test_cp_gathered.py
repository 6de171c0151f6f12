"""Context parallelism without a plan: the step computes slices, and all ranks gather all keys."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from jax_magi import AttentionMask
from tests.accuracy import make_inputs
from tests.compilation import quick_jit
from tests.cp_runs import NATIVE, make_mesh

_LENGTH, _MAX = 48, 4


def _ids(*lengths):
  numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
  return np.pad(numbers, (0, _LENGTH - len(numbers))).astype(np.int32)


_PACKINGS = [
  [_ids(48), _ids(1, 20, 27)],
  [_ids(13, 1, 30), _ids(5, 5, 5, 5)],
  [_ids(24, 24), _ids()],
]


@functools.cache
def _rows():
  rng = np.random.default_rng(2)
  rows = [make_inputs(rng, np.float32, *[_LENGTH] * 2, 4, 2, 8, 12, num_sinks=0) for _ in range(2)]
  return [np.stack([getattr(row, x) for row in rows]) for x in ("q", "k", "v", "dout")], rows[
    0
  ].sink


def _loss_of(attend, dout):
  def loss(*operands):
    out, meta = attend(*operands)
    finite = jnp.where(jnp.isfinite(meta.lse), meta.lse, 0.0)
    return (out * dout).sum() + jnp.sin(finite).sum(), (out, meta)

  return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)


@quick_jit
def _on_one_device(operands, dout, sink, ids, window):
  def attend(q, k, v, sink):
    def row(q, k, v, ids):
      mask = AttentionMask.from_segment_ids(ids, _MAX, causal=True)
      lo = jnp.where(window, -6, mask.slices[:, 4])
      mask = AttentionMask(mask.slices.at[:, 4].set(lo), _LENGTH, _LENGTH)
      return jax_magi.attention(q, k, v, mask, sink=sink, return_max_logits=True)

    return jax.vmap(row)(q, k, v, ids)

  return _loss_of(attend, dout)(*operands, sink)


def _check(mesh, order, window=None, **options):
  """Runs all packings through one program, and compares with one device."""
  (*operands, dout), sink = _rows()
  rows = np.arange(_LENGTH)
  if order == "zigzag":
    rows = jax_magi.zigzag_positions(_LENGTH, mesh.shape["cp"])
  spec = NamedSharding(mesh, P("dp", "cp", "tp"))

  def place(x):
    return jax.device_put(x[:, rows], spec if x.ndim == 4 else NamedSharding(mesh, P()))

  @quick_jit
  def run(operands, dout, sink, ids):
    def attend(q, k, v, sink):
      return jax_magi.context_parallel_attention(
        *(q, k, v), segment_ids=ids, max_segments=_MAX, window=window, order=order, mesh=mesh,
        batch_axis="dp", head_axis="tp", sink=sink, return_max_logits=True, **options,
      )  # fmt: skip

    return _loss_of(attend, dout)(*operands, sink)

  for packing in _PACKINGS:
    ids = np.stack(packing)
    with jax.set_mesh(mesh):
      (_, (out, meta)), grads = run(*jax.tree.map(place, (operands, dout)), sink, place(ids))
    (_, (want, want_meta)), want_grads = _on_one_device(
      operands, dout, sink, ids, np.bool_(window is not None)
    )
    found = (out, meta.lse, *grads[:3])
    expected = (want, want_meta.lse, *want_grads[:3])
    for a, b in zip(found, expected, strict=True):
      np.testing.assert_allclose(a, np.asarray(b)[:, rows], atol=1e-5)
    np.testing.assert_allclose(meta.max_logits, want_meta.max_logits, rtol=1e-6)
    np.testing.assert_allclose(grads[3], want_grads[3], atol=1e-5)
  assert run._cache_size() == 1, "a new packing compiled"


def test_auto_axes_and_zigzag():
  mesh = make_mesh(AxisType.Auto, dp=2, cp=2, tp=2)
  _check(mesh, "zigzag", keep_remote_kv=True, implementation=NATIVE)


def test_explicit_axes_and_a_window():
  mesh = make_mesh(AxisType.Explicit, dp=1, cp=4, tp=1)
  _check(mesh, "zigzag", (6, 0), implementation=NATIVE)


@pytest.mark.long
@pytest.mark.parametrize(
  ("axis_type", "order", "keeps"),
  [
    (AxisType.Auto, "zigzag", False),
    (AxisType.Explicit, "contiguous", True),
    *(
      pytest.param(*values, marks=pytest.mark.long)
      for values in itertools.product(
        (AxisType.Auto, AxisType.Explicit), ("zigzag", "contiguous"), (False, True)
      )
    ),
  ],
  ids=str,
)
def test_all_orders_on_all_meshes(axis_type, order, keeps):
  _check(make_mesh(axis_type, dp=2, cp=2, tp=2), order, (6, 0), keep_remote_kv=keeps)


def test_documents_that_are_broken_are_nan_on_all_ranks():
  (q, k, v, _), _ = _rows()
  mesh = make_mesh(cp=2)
  rows = jax_magi.zigzag_positions(_LENGTH, 2)

  @quick_jit
  def fun(ids):
    return jax_magi.context_parallel_attention(
      *(q, k, v), segment_ids=ids, max_segments=2, padding_id=-1, mesh=mesh, implementation=NATIVE
    )[0]

  ids = np.stack([_ids(40, 8), _ids(8, 40)]) * 5 - 5  # From 0.
  assert np.isfinite(fun(ids[:, rows])).all()
  ids[0, -1] = 0
  out = fun(ids[:, rows])
  assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


def test_one_sequence_in_order_and_without_documents():
  (q, k, v, _), _ = _rows()
  mesh = make_mesh(cp=4)
  for causal, window in ((True, None), (False, (3, 9))):
    ours, _ = quick_jit(
      functools.partial(
        jax_magi.context_parallel_attention, causal=causal, window=window, order="contiguous",
        mesh=mesh, implementation=NATIVE,
      )
    )(q[0], k[0], v[0])  # fmt: skip
    left, right = (None, 0) if causal else window
    mask = AttentionMask.sliding_window(_LENGTH, left=left, right=right)
    np.testing.assert_allclose(ours, jax_magi.attention(q[0], k[0], v[0], mask)[0], atol=1e-5)


def test_forward_kernels_run_once_and_keys_are_gathered_again():
  """The backward pass has out and lse, and fetches keys again unless they are kept."""
  mesh = make_mesh(cp=2)
  (q, k, v, _), _ = _rows()

  def counts(keeps):
    def loss(*x):
      out, _ = jax_magi.context_parallel_attention(
        *x, mesh=mesh, keep_remote_kv=keeps, implementation=NATIVE
      )
      return jnp.sin(out).sum()

    traced = quick_jit(jax.grad(loss, (0, 1, 2))).trace(q[0], k[0], v[0])
    text = str(traced.jaxpr)
    assert len(re.findall(r"reduce_scatter\[", text)) == 2
    kernels = traced.lower().compile().as_text().count('"jax_magi_attention_forward"')
    return len(re.findall(r"all_gather\[", text)), kernels

  (kept, kernels), (fetched, more_kernels) = counts(True), counts(False)
  assert (kept, fetched) == (2, 4)
  assert kernels == more_kernels
  assert NATIVE is None or kernels == 1


def test_a_trainers_policy_keeps_the_results():
  """The policy saves them under its own name inside a scan. No forward kernel runs twice."""
  mesh = make_mesh(cp=2)
  x = np.zeros((16, 2, 8), np.float32)

  def count(saved):
    policy = jax.checkpoint_policies.save_only_these_names(saved)

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x):
      return jax_magi.context_parallel_attention(
        *(x, x, x), mesh=mesh, checkpoint_names="context", implementation=NATIVE
      )[0]

    def loss(x):
      return jax.lax.scan(lambda x, _: (jnp.sin(layer(x)), None), x, None, length=2)[0].sum()

    text = quick_jit(jax.grad(loss)).lower(x).compile().as_text()
    return text.count('"jax_magi_attention_forward"')

  assert (count("context"), count("other")) == ((1, 2) if NATIVE else (0, 0))


def test_sixteen_bit_gradients_are_summed_in_float32():
  mesh = make_mesh(cp=2)
  x = jax.ShapeDtypeStruct((16, 2, 8), jnp.bfloat16)

  def fun(*x):
    return jax_magi.context_parallel_attention(*x, mesh=mesh)[0].sum()

  text = str(jax.make_jaxpr(jax.grad(fun, (1, 2)))(x, x, x))
  found = re.findall(r":(\w+)\[[^\]]*\](?:\{[^}]*\})? = reduce_scatter\[", text)
  assert found == ["f32", "f32"]


def test_zigzag_is_the_order_of_the_key():
  key = jax_magi.magi_attn_flex_key(AttentionMask.causal(48), cp_size=4, dispatch="zigzag")
  positions = jax_magi.zigzag_positions(48, 4)
  np.testing.assert_array_equal(positions, jax_magi.dispatch(np.arange(48), key))
  np.testing.assert_array_equal(positions, jax_magi.get_position_ids(key))


@pytest.mark.parametrize(
  ("options", "match"),
  [
    ({"segment_ids": np.ones(16, int)}, "segment_ids needs max_segments"),
    ({"max_segments": 2}, "max_segments needs segment_ids"),
    ({"segment_ids": np.ones(8, int), "max_segments": 2}, r"segment_ids must be \[16\]"),
    ({"order": "natural"}, "order must be one of"),
    ({"window": 3}, "window must be None or a pair"),
    ({"batch_axis": "cp"}, "but q has no batch"),
    (
      {"reduce_max_logits": False, "return_max_logits": True},
      "reduce_max_logits=False needs calc_attn",
    ),
  ],
)
def test_bad_arguments_are_named(options, match):
  x = np.zeros((16, 2, 8), np.float32)
  with pytest.raises(ValueError, match=match):
    jax_magi.context_parallel_attention(x, x, x, mesh=make_mesh(cp=2), **options)


def test_lengths_that_have_no_equal_blocks_are_named():
  x = np.zeros((14, 2, 8), np.float32)
  with pytest.raises(ValueError, match="a positive multiple of 4 rows for order='zigzag'"):
    jax_magi.context_parallel_attention(x, x, x, mesh=make_mesh(cp=2))
  with pytest.raises(ValueError, match="length must be a multiple of 2"):
    jax_magi.zigzag_positions(14, 2)


def test_a_key_has_its_mask():
  x = np.zeros((16, 2, 8), np.float32)
  key = jax_magi.magi_attn_flex_key(AttentionMask.causal(16), cp_size=2)
  for options in ({"segment_ids": np.ones(16, int)}, {"window": (3, 0)}, {"causal": False}):
    with pytest.raises(ValueError, match="cannot be combined with a key"):
      jax_magi.context_parallel_attention(x, x, x, key, mesh=make_mesh(cp=2), **options)
