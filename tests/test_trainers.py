"""The adapters of examples/trainers, called as the trainers call them."""

import ast
import functools
import io
import tokenize
import types
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_magi
from tests.compilation import quick_jit
from tests.cp_runs import make_mesh
from tests.trainer_standins import AttentionOp, Axis, NamedArray, adapter, dense

TRAINERS = Path(__file__).resolve().parent.parent / "examples" / "trainers"
BATCH, LENGTH = 2, 32
PACKINGS = [
  np.repeat([[1, 2, 3, 0], [1, 1, 2, 2]], [9, 3, 14, 6], axis=1),
  np.repeat([[1, 1, 1, 1], [1, 2, 3, 4]], [9, 3, 14, 6], axis=1),
]

pytestmark = pytest.mark.usefixtures("with_promotion")


def _code_lines(source):
  """Lines of code: no docstrings and comments, and not what runs as a script."""
  tree, left_out = ast.parse(source), set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
      left_out |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
      left_out |= set(range(node.lineno, node.end_lineno + 1))
  blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
  lines = set()
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type not in blank | {tokenize.ENDMARKER}:
      lines |= set(range(token.start[0], token.end[0] + 1))
  return lines - left_out, tree


@pytest.mark.parametrize(
  ("name", "function"),
  [
    ("maxtext_attention", "_over_context"),
    ("levanter_attention", "_over_context"),
    ("lm1b_attention", "attention_fn_over_context"),
  ],
)
def test_adapters_are_short(name, function):
  source = (TRAINERS / f"{name}.py").read_text()
  lines, tree = _code_lines(source)
  (over_context,) = [node for node in tree.body if getattr(node, "name", None) == function]
  of_context = set(range(over_context.lineno, over_context.end_lineno + 1))
  # The line that chooses, too.
  of_context |= {i for i, line in enumerate(source.splitlines(), 1) if function in line}
  assert len(lines) <= 40
  assert len(lines - of_context) <= 25


def _rows(rng, heads, dim):
  return rng.standard_normal((BATCH, LENGTH, heads, dim)).astype(np.float32)


# Attention type, (value dim, softcap, with sinks).
_KINDS = {
  "global-softcap": ("global", 8, 2.0, False),
  "local_sliding-sinks": ("local_sliding", 8, None, True),
  "mla": ("mla", 4, None, False),
}


def _maxtext(kind, mesh, kernel, **config):
  kind, _, softcap, _ = _KINDS[kind]
  fields = {
    "max_segments_per_seq": -1, "use_qk_clip": False, "context_sharding": "context",
    "context_parallel_load_balance": True, "context_parallel_strategy": "all_gather",
    "context_parallel_reorder_strategy": "auto",
  }  # fmt: skip
  window = 5 if kind == "local_sliding" else 0
  config = types.SimpleNamespace(**(fields | config))
  return AttentionOp(config, mesh, kernel, kind, window, softcap)


@pytest.mark.parametrize(
  ("kind", "context", "axis_type"),
  [
    ("local_sliding-sinks", 2, AxisType.Auto),
    ("mla", 4, AxisType.Explicit),
    ("global-softcap", 1, AxisType.Auto),
    *(
      pytest.param(kind, context, axis_type, marks=pytest.mark.long)
      for kind, context, axis_type in [
        ("global-softcap", 2, AxisType.Auto),
        ("global-softcap", 1, AxisType.Explicit),
        ("mla", 1, AxisType.Auto),
        ("local_sliding-sinks", 2, AxisType.Explicit),
      ]
    ),
  ],
)
def test_maxtext(kind, context, axis_type, monkeypatch):
  """Values and gradients are those of dot_product, and no packing compiles anything."""
  adapter(monkeypatch, "maxtext_attention").install()
  mesh = make_mesh(axis_type, data=2, fsdp=1, context=context, tensor=2 if context < 4 else 1)
  rng = np.random.default_rng(0)
  sizes = [(4, 8), (2, 8), (2, _KINDS[kind][1])]
  q, k, v = (_rows(rng, *size) for size in sizes)
  sinks = rng.standard_normal(4).astype(np.float32) if _KINDS[kind][3] else None
  order = np.arange(LENGTH) if context == 1 else jax_magi.zigzag_positions(LENGTH, context)
  positions = np.tile(order, (BATCH, 1))

  def loss_of(kernel, record):
    def loss(q, k, v, sinks, ids):
      op = _maxtext(kind, mesh, kernel, use_qk_clip=record)
      out = op(q, k, v, ids, positions, "train", sinks=sinks)
      is_token = (ids > 0)[:, :, None, None]
      max_logits = op.max_logits.get_value() if record else None
      return (jnp.sin(out) * is_token).sum(), (out, max_logits)

    arguments = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
    return quick_jit(jax.value_and_grad(loss, arguments, has_aux=True))

  run, compare = loss_of("jax_magi", True), loss_of("dot_product", True)
  spec = P(("data", "fsdp"), "context")
  for ids in PACKINGS:
    rows = [x[:, order] for x in (q, k, v, ids)]
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in rows]
    with jax.set_mesh(mesh):
      found = run(*placed[:3], sinks, placed[3])
    expected = compare(*rows[:3], sinks, rows[3])
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=1e-5)
  assert run._cache_size() == 1


def test_maxtext_keeps_other_kernels_and_refuses_other_masks(monkeypatch):
  adapter(monkeypatch, "maxtext_attention").install()
  mesh = make_mesh(data=1, context=1)
  x = np.zeros((1, 8, 2, 4), np.float32)
  ids, rows = np.ones((1, 8), np.int32), np.arange(8)[None]
  plain = _maxtext("mla", mesh, "dot_product")
  assert plain(x, x, x, ids, rows, "prefill").shape == x.shape
  op = _maxtext("mla", mesh, "jax_magi")
  with pytest.raises(NotImplementedError, match="indexer_mask"):
    op(x, x, x, ids, rows, "train", indexer_mask=np.ones((1, 8, 8), bool))
  with pytest.raises(NotImplementedError, match="model_mode=prefill"):
    op(x, x, x, ids, rows, "prefill")
  mesh = make_mesh(data=1, context=2)
  for name, value in (("strategy", "ring"), ("reorder_strategy", "STRIPED")):
    op = _maxtext("mla", mesh, "jax_magi", **{f"context_parallel_{name}": value})
    with pytest.raises(NotImplementedError, match="only all_gather, and no striped order"):
      op(x, x, x, ids, rows, "train")


def test_maxtext_qk_clip_refuses_maxima_that_are_none_or_sums(monkeypatch):
  module = adapter(monkeypatch, "maxtext_qk_clip")
  state = types.SimpleNamespace(model=nnx.Dict())
  with pytest.raises(ValueError, match="choose attention=jax_magi"):
    module.apply_qk_clip_nnx(state, {}, types.SimpleNamespace())
  config = types.SimpleNamespace(gradient_accumulation_steps=2)
  monkeypatch.setattr(module.train, "initialize", lambda argv: (config, None), raising=False)
  with pytest.raises(NotImplementedError, match="gradient accumulation"):
    module.main([])


class _Attention(nnx.Module):
  """Kernels as a scan of MaxText stacks them: layers on axis 1."""

  def __init__(self, names, layers, dims, rngs):
    for name, dim in zip(names, dims, strict=True):
      heads = 2 if name == "key" else 4
      kernel = rngs.normal((8, *layers, heads, dim))
      setattr(self, name, nnx.Dict(kernel=nnx.Param(kernel)))


@pytest.mark.parametrize("layers", [(), (3,)], ids=["a_layer", "stacked"])
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_maxtext_qk_clip(kind, layers, monkeypatch):
  """Logits above the threshold are at it afterwards, and others stay."""
  module = adapter(monkeypatch, "maxtext_qk_clip")
  names, dims = (("query", "key"), (6, 6)) if kind == "gqa" else (("wq_b", "wkv_b"), (6, 8))
  attention = _Attention(names, layers, dims, nnx.Rngs(0))
  model = nnx.Dict(decoder=nnx.Dict(self_attention=attention))
  threshold, nope = 5.0, 4

  def max_logits():
    """Of 16 tokens; latent attention has a rotary key that all heads share."""
    x = np.random.default_rng(1).standard_normal((2, 16, 8)).astype(np.float32)
    q, k = (np.asarray(getattr(attention, name)["kernel"].get_value()) for name in names)
    q, k = (np.einsum("bte,e...hd->...bthd", x, kernel) for kernel in (q, k))
    k = np.repeat(k, 4 // k.shape[-2], axis=-2)
    if kind == "mla":
      rotary = np.broadcast_to(x[..., None, : 6 - nope], (*k.shape[:-1], 6 - nope))
      k = np.concatenate([k[..., :nope], rotary], axis=-1)
    return np.einsum("...bthd,...bshd->...bhts", q, k).max((-2, -1))

  before = max_logits()
  weights = nnx.to_pure_dict(nnx.state(model))
  intermediates = {"decoder": {"self_attention": {"attention_op": {"max_logits": before}}}}
  config = types.SimpleNamespace(qk_clip_threshold=threshold, qk_nope_head_dim=nope)
  state = types.SimpleNamespace(model=model)
  assert module.apply_qk_clip_nnx(state, jax.tree.map(jnp.asarray, intermediates), config) is state
  after = max_logits().max(-2)
  assert before.max() > threshold
  np.testing.assert_array_less(after, threshold * 1.0001)
  if kind == "mla":  # Each head has its own factor.
    np.testing.assert_allclose(after, np.minimum(before.max(-2), threshold), rtol=1e-4)
    values = [
      x["decoder"]["self_attention"]["wkv_b"]["kernel"]
      for x in (weights, nnx.to_pure_dict(nnx.state(model)))
    ]
    np.testing.assert_array_equal(*(x[..., nope:] for x in values))


def _levanter_operands(rng):
  batch, length = Axis("batch", BATCH), Axis("position", LENGTH)
  keys, group, heads = (
    Axis("key_position", LENGTH),
    Axis("q_heads_per_group", 2),
    Axis("kv_head", 2),
  )
  q = NamedArray(
    _rows(rng, 4, 8).reshape(BATCH, LENGTH, 2, 2, 8),
    (batch, length, heads, group, Axis("head_size", 8)),
  )
  k, v = (
    NamedArray(_rows(rng, 2, dim), (batch, keys, heads, Axis("head_size", dim))) for dim in (8, 4)
  )
  return q, k, v


@pytest.mark.parametrize(
  ("context", "axis_type"),
  [
    (1, AxisType.Auto),
    (2, AxisType.Explicit),
    pytest.param(4, AxisType.Auto, marks=pytest.mark.long),
  ],
)
def test_levanter(context, axis_type, monkeypatch):
  mapping = {"batch": "data", "kv_head": "tensor"} | (
    {"position": "context"} if context > 1 else {}
  )
  module = adapter(monkeypatch, "levanter_attention", mapping)
  module.install()
  levanter = module.attention
  mesh = make_mesh(axis_type, data=2, context=context, tensor=2 if context < 4 else 1)
  rng = np.random.default_rng(0)
  operands = _levanter_operands(rng)
  sink = NamedArray(rng.standard_normal((2, 2)).astype(np.float32), operands[0].axes[2:4])
  axes = operands[0].axes[:2]

  def attend(q, k, v, ids, sink):
    mask = levanter.AttentionMask(is_causal=True, sliding_window=6, segment_ids=(ids, ids))
    return levanter.dot_product_attention(
      "position", "key_position", "head_size", q, k, v, mask, attention_dtype=jnp.float32,
      attn_backend=None, flash_block_size=None, scaling_factor=0.5, logits_soft_cap=3.0,
      dropout=0.0, inference=True, prng=None, attn_sink=sink,
    ).array  # fmt: skip

  def plain(q, k, v, ids, sink):
    behind = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    is_seen = (behind >= 0) & (behind < 6) & (ids.array[:, :, None] == ids.array[:, None])
    is_seen &= ids.array[:, None] >= 0
    q = q.array.reshape(BATCH, LENGTH, 4, 8)
    out, _ = dense(q, k.array, v.array, is_seen, 0.5, 3.0, sink.array.ravel())
    return out.reshape(BATCH, LENGTH, 2, 2, -1)

  def graded(attend):
    def loss(*x):
      out = attend(*x)
      return jnp.sin(out).sum(), out

    return quick_jit(jax.value_and_grad(loss, (0, 1, 2, 4), has_aux=True, allow_int=True))

  run, compare = graded(attend), graded(plain)
  with_heads = NamedSharding(mesh, P("data", mapping.get("position"), "tensor"))
  for ids in PACKINGS:
    ids = NamedArray((ids - 1).astype(np.int32), axes)  # From 0, and padding is -1.
    with jax.set_mesh(mesh):
      found = run(*jax.device_put(operands, with_heads), ids, sink)
    for ours, theirs in zip(
      jax.tree.leaves(found), jax.tree.leaves(compare(*operands, ids, sink)), strict=True
    ):
      np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=1e-5)
  assert run._cache_size() == 1


def test_levanter_refuses_explicit_masks(monkeypatch):
  module = adapter(monkeypatch, "levanter_attention")
  operands = _levanter_operands(np.random.default_rng(0))
  mask = module.attention.AttentionMask(explicit_mask=operands[0])
  with pytest.raises(NotImplementedError, match="explicit masks"):
    module.attend("position", "key_position", "head_size", *operands, mask)


def test_levanter_qk_clip(monkeypatch):
  """Maxima come out of scanned and rematerialised modules; logits are at the threshold then."""
  module = adapter(monkeypatch, "levanter_qk_clip")
  monkeypatch.setattr(module.llama, "Attention", module.llama.Attention)
  module.install()
  threshold = 160.0
  config = types.SimpleNamespace(
    KVHeads=Axis("kv_head", 2), QHeadsPerGroup=Axis("q_heads_per_group", 2)
  )
  model = jax.vmap(lambda key: module.llama.Attention.init(config, key=key))(
    jax.random.split(jax.random.key(0), 3)
  )
  x = np.random.default_rng(0).standard_normal((BATCH, LENGTH, 16)).astype(np.float32)
  axes = Axis("batch", BATCH), Axis("position", LENGTH), Axis("embed", 16)
  ids = NamedArray((PACKINGS[0] - 1).astype(np.int32), axes[:2])
  mask = module.attention.AttentionMask(is_causal=True, segment_ids=(ids, ids))

  @quick_jit
  def grads_of(model):
    def loss(model):
      @jax.checkpoint
      def layer(total, layer):
        return total + jnp.sin(layer(NamedArray(x, axes), mask).array).sum(), None

      return jax.lax.scan(layer, jnp.float32(0), model["layers"])[0]

    return jax.grad(loss)(model)

  def maxima(model):
    """[layers, kv heads, group] of all pairs."""
    q, k = (np.asarray(p.weight.array) for p in (model["layers"].q_proj, model["layers"].k_proj))
    q, k = np.einsum("bte,lkgde->lbtkgd", x, q), np.einsum("bte,lkde->lbtkd", x, k)
    same = (ids.array[:, :, None] == ids.array[:, None]) & (ids.array[:, None] >= 0)
    is_seen = same & (np.arange(LENGTH)[:, None] >= np.arange(LENGTH))
    logits = np.einsum("lbtkgd,lbskd->lkgbts", q, k)
    return np.where(is_seen, logits, -np.inf).max((-3, -2, -1))

  model = {"layers": model}
  grads, before = grads_of(model), maxima(model)
  np.testing.assert_allclose(grads["layers"].max_logits.array, before, rtol=1e-5)
  assert threshold < before.max() and before.max(-1).min() < threshold
  optimizer = module.with_qk_clip(optax.sgd(0.0), threshold)
  updates, _ = optimizer.update(grads, optimizer.init(model), model)
  clipped = optax.apply_updates(model, updates)
  np.testing.assert_allclose(
    maxima(clipped).max(-1), np.minimum(before.max(-1), threshold), rtol=1e-5
  )
  assert not np.any(clipped["layers"].max_logits.array)


class _Block(nn.Module):
  """As lm1b's block applies attention."""

  attention_fn: object

  @nn.compact
  def __call__(self, x, decoder_mask):
    attend = functools.partial(
      self.attention_fn, on_max_logits=lambda m: self.sow("intermediates", "max_logits", m)
    )
    if self.attention_fn is nn.dot_product_attention:
      attend = self.attention_fn
    return nn.MultiHeadDotProductAttention(
      num_heads=4, qkv_features=32, use_bias=False, broadcast_dropout=False, dropout_rate=0.0,
      deterministic=False, decode=False, attention_fn=attend, name="attention",
    )(x, mask=decoder_mask)  # fmt: skip


@pytest.mark.parametrize(
  ("context", "axis_type"),
  [
    (1, AxisType.Auto),
    (2, AxisType.Auto),
    pytest.param(2, AxisType.Explicit, marks=pytest.mark.long),
  ],
)
def test_lm1b(context, axis_type, monkeypatch):
  """As Flax's own attention, for tokens that are not padding."""
  module = adapter(monkeypatch, "lm1b_attention")
  mesh = make_mesh(axis_type, data=2, context=context)
  attention_fn = module.attention_fn if context == 1 else module.attention_fn_over_context(mesh)
  x = np.random.default_rng(0).standard_normal((BATCH, LENGTH, 16)).astype(np.float32)

  def graded(attention_fn, make_mask):
    block = _Block(attention_fn)

    def loss(params, x, ids):
      out, state = block.apply({"params": params}, x, make_mask(ids), mutable=["intermediates"])
      return (jnp.sin(out) * (ids > 0)[:, :, None]).sum(), state.get("intermediates")

    return quick_jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

  def flax_mask(ids):
    same = nn.make_attention_mask(ids, ids, jnp.equal, dtype=x.dtype)
    return nn.combine_masks(nn.make_causal_mask(ids, dtype=x.dtype), same)

  params = _Block(nn.dot_product_attention).init(jax.random.key(0), x, flax_mask(PACKINGS[0]))
  run = graded(attention_fn, lambda ids: ids)
  compare = graded(nn.dot_product_attention, flax_mask)
  for ids in PACKINGS:
    rows = NamedSharding(mesh, P("data", "context" if context > 1 else None))
    with jax.set_mesh(mesh):
      (ours, sown), grads = run(params["params"], *jax.device_put((x, ids), rows))
    (theirs, _), their_grads = compare(params["params"], x, ids)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), grads, their_grads)
    (max_logits,) = sown["max_logits"]
    assert max_logits.shape == (BATCH, 4) and np.isfinite(max_logits).all()
  assert run._cache_size() == 1
