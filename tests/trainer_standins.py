"""Stand-ins of trainers: their interfaces, as far as the adapters of examples/trainers see them.

Names, arguments and meanings are those of MaxText and Levanter in August 2026. Attention itself is
over all pairs, for comparison. scripts/test_trainers.py runs the adapters in the trainers.
"""

import dataclasses
import enum
import importlib
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P


def dense(q, k, v, is_seen, scale, softcap, sink):
  """(out, max_logits) of `[batch, length, heads, dim]`; is_seen is `[batch, q_len, k_len]`."""
  k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
  logits = jnp.einsum("bthd,bshd->bhts", q, k) * np.float32(scale)
  is_seen = is_seen[:, None]
  max_logits = jnp.where(is_seen, logits, -jnp.inf).max((2, 3))
  if softcap:
    logits = jnp.tanh(logits / np.float32(softcap)) * np.float32(softcap)
  logits = jnp.where(is_seen, logits, np.float32(-1e30))
  extra = np.full(q.shape[2], -1e30, np.float32) if sink is None else sink
  extra = jnp.broadcast_to(extra[None, :, None, None], (*logits.shape[:3], 1))
  weights = jax.nn.softmax(jnp.concatenate([logits, extra], axis=-1), axis=-1)[..., :-1]
  weights = jnp.where(is_seen.any(-1, keepdims=True), weights, 0.0)
  return jnp.einsum("bhts,bshd->bthd", weights, v), max_logits


class AttentionType(enum.Enum):
  GLOBAL = "global"
  LOCAL_SLIDING = "local_sliding"
  CHUNK = "chunk"
  MLA = "mla"


class AttentionOp(nnx.Module):
  """MaxText's, in `maxtext.layers.attention_op`."""

  def __init__(
    self, config, mesh, attention_kernel, attention_type="global", sliding_window_size=None,
    attn_logits_soft_cap=None,
  ):  # fmt: skip
    self.config = config
    self.mesh = mesh
    self.attention_kernel = attention_kernel
    self.attention_type = AttentionType(attention_type)
    self.sliding_window_size = sliding_window_size
    self.attn_logits_soft_cap = attn_logits_soft_cap
    self.flash_axis_names_q = ("batch", "heads", "length", "dim")

  def _logical_to_mesh_axes(self, names):
    rules = {"batch": ("data", "fsdp"), "heads": ("tensor",), "length": "context"}
    return P(*(rules.get(name) for name in names))

  def apply_attention(
    self, query, key, value, decoder_segment_ids, segment_positions, lengths, model_mode,
    use_ragged_attention=False, previous_chunk=None, bidirectional_mask=None, sinks=None,
    indexer_mask=None, compressed_mask=None, record_max_logits=False,
    decoder_segment_ids_kv=None, *, qk_product_einsum, wv_product_einsum,
  ):  # fmt: skip
    ids, rows = decoder_segment_ids, segment_positions
    behind = rows[:, :, None] - rows[:, None]
    is_seen = (ids[:, :, None] == ids[:, None]) & (ids[:, None] > 0) & (behind >= 0)
    if self.attention_type == AttentionType.LOCAL_SLIDING:
      is_seen &= behind < self.sliding_window_size
    softcap = self.attn_logits_soft_cap
    out, max_logits = dense(query, key, value, is_seen, 1.0, softcap, sinks)
    if self.config.use_qk_clip:
      self.max_logits = nnx.Intermediate(max_logits)
    return out, None, None

  def __call__(
    self, query, key, value, decoder_segment_ids, inputs_positions, model_mode,
    cached_values=None, previous_chunk=None, bidirectional_mask=None, sinks=None,
    indexer_mask=None, compressed_mask=None, record_max_logits=False,
  ):  # fmt: skip
    out, _, exponentials_sum = self.apply_attention(
      query=query, key=key, value=value, decoder_segment_ids=decoder_segment_ids,
      segment_positions=inputs_positions, lengths=None, model_mode=model_mode,
      use_ragged_attention=False, previous_chunk=previous_chunk,
      bidirectional_mask=bidirectional_mask, sinks=sinks, indexer_mask=indexer_mask,
      compressed_mask=compressed_mask, record_max_logits=record_max_logits,
      qk_product_einsum=jnp.einsum, wv_product_einsum=jnp.einsum, decoder_segment_ids_kv=None,
    )  # fmt: skip
    return out if exponentials_sum is None else out / exponentials_sum


@dataclasses.dataclass(frozen=True)
class Axis:
  name: str
  size: int


@dataclasses.dataclass(frozen=True)
class NamedArray:
  """Haliax's, whose only child has no name in paths."""

  array: jax.Array
  axes: tuple

  def resolve_axis(self, name):
    (axis,) = (axis for axis in self.axes if axis.name == axis_name(name))
    return axis

  def broadcast_to(self, axes):
    missing = [axis for axis in axes if axis not in self.axes]
    array = jnp.broadcast_to(self.array, [axis.size for axis in (*missing, *self.axes)])
    return NamedArray(array, (*missing, *self.axes)).rearranged(axes)

  def rearranged(self, axes):
    return NamedArray(self.array.transpose([self.axes.index(axis) for axis in axes]), tuple(axes))


jax.tree_util.register_pytree_node(
  NamedArray, lambda x: ((x.array,), x.axes), lambda axes, leaves: NamedArray(*leaves, axes)
)


def axis_name(axis):
  return axis if isinstance(axis, str) else axis.name


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMask:
  """Levanter's, in `levanter.layers.attention`."""

  is_causal: bool = dataclasses.field(default=False, metadata={"static": True})
  causal_offset: NamedArray | None = None
  explicit_mask: NamedArray | None = None
  segment_ids: tuple | None = None
  sliding_window: int | None = dataclasses.field(default=None, metadata={"static": True})
  bidirectional_window: int | None = dataclasses.field(default=None, metadata={"static": True})


class Module:
  """Equinox's: its classes are dataclasses and trees; `config` is static."""

  def __init_subclass__(cls):
    dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    data = [name for name in names if name != "config"]
    jax.tree_util.register_dataclass(cls, data, [name for name in names if name == "config"])


class Linear(Module):
  weight: NamedArray


class Attention(Module):
  """Levanter's, in `levanter.layers.attention`."""

  config: object
  q_proj: Linear
  k_proj: Linear

  @staticmethod
  def init(config, *, key):
    heads = (config.KVHeads, config.QHeadsPerGroup)
    dim, embed = Axis("head_size", 8), Axis("embed", 16)
    keys = jax.random.split(key)
    weights = [
      NamedArray(jax.random.normal(key, [axis.size for axis in axes]), axes)
      for key, axes in zip(keys, [(*heads, dim, embed), (heads[0], dim, embed)], strict=True)
    ]
    return Attention(config, *map(Linear, weights))

  def __call__(self, x, mask, *, key=None, pos_ids=None):
    q, k = (
      NamedArray(jnp.moveaxis(jnp.tensordot(x.array, p.weight.array, [[2], [-1]]), 1, -2), axes)
      for p, axes in (
        (self.q_proj, (x.axes[0], *self.q_proj.weight.axes[:2], x.axes[1])),
        (
          self.k_proj,
          (x.axes[0], self.k_proj.weight.axes[0], Axis("key_position", x.axes[1].size)),
        ),
      )
    )
    dim = self.q_proj.weight.axes[2]
    q, k = (NamedArray(y.array, (*y.axes, dim)) for y in (q, k))
    levanter = sys.modules["levanter.layers.attention"]
    return levanter.dot_product_attention(
      "position", "key_position", "head_size", q, k, k, mask, attention_dtype=jnp.float32,
      scaling_factor=1.0, inference=True, prng=key,
    )  # fmt: skip


def _kinds(query, key, value, QPos, KPos, Key):
  batch = [axis for axis in query.axes if axis.name == "batch"]
  heads = [axis for axis in query.axes if axis.name in ("kv_head", "q_heads_per_group")]
  shared = [axis for axis in heads if axis in key.axes]
  dim, keys = query.resolve_axis(Key), key.resolve_axis(KPos)
  return (
    {"B": batch, "S": [query.resolve_axis(QPos)], "H": heads, "D": [dim]},
    {"B": batch, "S": [keys], "H": shared, "D": [dim]},
    {"B": batch, "S": [keys], "H": shared, "D": [dim]},
  )


def _to_bshd(x, kinds):
  merged = [kinds[name] for name in "BSHD"]
  array = x.rearranged([axis for axes in merged for axis in axes]).array
  sizes = [math.prod(axis.size for axis in axes) for axes in merged]
  axes = tuple(Axis(name, size) for name, size in zip("BSHD", sizes, strict=True))
  return NamedArray(array.reshape(sizes), axes)


def _from_bshd(x, q_kinds, v_kinds):
  axes = (*q_kinds["B"], *q_kinds["S"], *q_kinds["H"], *v_kinds["D"])
  return NamedArray(x.array.reshape([axis.size for axis in axes]), axes)


def _named(array, axes):
  names = zip(axes, array.shape, strict=True)
  return NamedArray(array, tuple(a if isinstance(a, Axis) else Axis(a, n) for a, n in names))


def _module(name, **members):
  module = types.ModuleType(name)
  vars(module).update(members)
  return module


def modules(mapping) -> dict[str, types.ModuleType]:
  """Modules of MaxText and Levanter by name; mapping is Haliax's, from axes to those of a mesh."""

  def pspec(axes):
    return P(*(mapping.get(axis_name(axis)) for axis in axes))

  partitioning = _module(
    "haliax.partitioning",
    physical_axis_name=lambda axis: mapping.get(axis_name(axis)),
    pspec_for_axis=pspec,
  )
  attention = _module(
    "levanter.layers.attention",
    Attention=Attention,
    AttentionMask=AttentionMask,
    _bin_and_group_axes_by_function=_kinds,
    _reshape_axes_for_bshd_bins=_to_bshd,
    _unflatten_bshd=_from_bshd,
  )
  attention_op = _module("maxtext.layers.attention_op", AttentionOp=AttentionOp)
  train = _module("maxtext.trainers.pre_train.train")
  clip = _module("maxtext.utils.qk_clip_utils")
  llama = _module("levanter.models.llama", Attention=Attention)
  found = {x.__name__: x for x in (attention, llama, attention_op, train, clip)}
  found["haliax"] = _module(
    "haliax", partitioning=partitioning, axis_name=axis_name, named=_named, NamedArray=NamedArray,
    zeros=lambda axes: NamedArray(jnp.zeros([axis.size for axis in axes]), tuple(axes)),
  )  # fmt: skip
  for name, module in list(found.items()):
    while "." in name:  # The packages around it.
      name, _, last = name.rpartition(".")
      package = found.setdefault(name, _module(name))
      setattr(package, last, module)
      module = package
  return found


def adapter(monkeypatch, name, mapping=()):
  """A module of examples/trainers, imported where the stand-ins are the trainers."""
  for module, standin in modules(dict(mapping)).items():
    monkeypatch.setitem(sys.modules, module, standin)
  for module in [x for x in sys.modules if x.startswith("examples.trainers.")]:
    monkeypatch.delitem(sys.modules, module)
  # Attributes that adapters replace are put back.
  monkeypatch.setattr(AttentionOp, "apply_attention", AttentionOp.apply_attention)
  return importlib.import_module(f"examples.trainers.{name}")
