"""Locates the query and key projections in the parameters of a model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, GetAttrKey

from jax_magi._src.optim.layout import DIM, HEADS, LAYERS, PARTS, Layout, parse_layout

_LAYER = "{layer}"
# The axes of a parameter along which factors differ, in the order of the factors' axes.
_OWN = (LAYERS, HEADS, DIM, PARTS)


@dataclasses.dataclass(frozen=True)
class Projection:
  """One parameter of a query or key projection: a kernel or a bias.

  Attributes:
    path: the keys from the root of the parameters, such as `"blocks/attention/query/kernel"`. For
      layers that are not stacked, write `{layer}` for the number of the layer, counted from 0:
      `"block_{layer}/attention/query/kernel"`. Numbers may have leading zeros (`block_07`), but
      each layer must occur once.
    layout: the names of the axes, `"inputs -> outputs"`. Four names have a meaning: `heads`, `dim`
      (inside a head), `layers` (stacked by scan) and `parts` (several projections in one
      parameter). Other names are free. Examples: `"embed -> heads dim"`,
      `"layers embed -> heads dim"`, `"embed -> (heads dim)"` for a kernel `[embed, heads * dim]`,
      and `"-> heads dim"` for a bias.
    num_heads: the number of heads. Required if the layout merges heads with another axis.
    dims: the range `[begin, end)` of `dim` that belongs to this projection, for kernels with
      several parts in a head, as in MLA. None means all of `dim`.
    index: the index of this projection along `parts`. For a kernel `[2, heads, embed, dim]` of keys
      and values, with layout `"parts heads embed -> dim"`, 0 selects the keys.
  """

  path: str
  layout: str
  num_heads: int | None = None
  dims: tuple[int, int] | None = None
  index: int | None = None

  def __post_init__(self) -> None:
    if not isinstance(self.path, str) or not self.path:
      raise ValueError(f"path must be a string, keys joined by '/', got {self.path!r}")
    layout = self.parsed
    heads = self.num_heads
    is_integer = isinstance(heads, (int, np.integer)) and not isinstance(heads, bool)
    if heads is not None and not (is_integer and heads > 0):
      raise ValueError(f"num_heads of {self.path} must be a positive integer, got {heads!r}")
    if HEADS not in layout.names:
      raise ValueError(f"layout of {self.path} must name heads, got {self.layout!r}")
    if _LAYER in self.path and LAYERS in layout.names:
      raise ValueError(f"{self.path} is one layer of many, so its layout cannot name layers")
    for axis in layout.axes:
      if len(axis) == 1:
        continue
      if set(axis) - {HEADS, DIM}:
        raise NotImplementedError(
          f"layout of {self.path} may merge only heads and dim, got {self.layout!r}"
        )
      if self.num_heads is None:
        raise ValueError(f"{self.path} needs num_heads: its layout {self.layout!r} merges them")
    index = self.index
    if (index is None) == (PARTS in layout.names):
      raise ValueError(
        f"{self.path} needs index if and only if its layout names parts, got index={index!r} and "
        f"{self.layout!r}"
      )
    is_integer = isinstance(index, (int, np.integer)) and not isinstance(index, bool)
    if index is not None and not (is_integer and index >= 0):
      raise ValueError(f"index of {self.path} must be a non-negative integer, got {index!r}")
    if self.dims is not None:
      if DIM not in layout.names:
        raise ValueError(f"dims of {self.path} needs dim in its layout, got {self.layout!r}")
      if len(self.dims) != 2 or not 0 <= self.dims[0] < self.dims[1]:
        raise ValueError(f"dims of {self.path} must be (begin, end), got {self.dims}")

  @property
  def parsed(self) -> Layout:
    """The parsed layout."""
    return parse_layout(self.layout)

  @property
  def factor_axes(self) -> list[bool]:
    """For each axis of the parameter, whether factors differ along it."""
    return [not set(_OWN).isdisjoint(axis) for axis in self.parsed.axes]

  def sizes(self, path: str, shape: tuple[int, ...]) -> dict[str, int]:
    """The sizes of heads, and of dim, layers and parts, if the layout has them."""
    layout = self.parsed
    layout.check_rank(path, shape)
    sizes = {}
    for axis, size in zip(layout.axes, shape, strict=True):
      if len(axis) == 1:
        sizes[axis[0]] = size
      else:
        assert self.num_heads is not None
        if size % self.num_heads:
          raise ValueError(f"{path} has shape {list(shape)}, not a multiple of {self.num_heads}")
        sizes |= {HEADS: self.num_heads, DIM: size // self.num_heads}
    if self.num_heads not in (None, sizes[HEADS]):
      raise ValueError(f"{path} has {sizes[HEADS]} heads, but num_heads is {self.num_heads}")
    if self.dims is not None and self.dims[1] > sizes[DIM]:
      raise ValueError(f"{path} has heads of {sizes[DIM]}, but dims is {self.dims}")
    if self.index is not None and self.index >= sizes[PARTS]:
      raise ValueError(f"{path} has {sizes[PARTS]} parts, but index is {self.index}")
    return {name: sizes[name] for name in _OWN if name in sizes}

  def spread(self, path: str, shape: tuple[int, ...], gamma: jax.Array) -> jax.Array:
    """Reshapes gamma, `[layers, heads]` or `[heads]`, to a factor that broadcasts to the parameter.

    The parameter itself is never reshaped, so it keeps its sharding.
    """
    sizes, layout = self.sizes(path, shape), self.parsed
    present = [name for name in _OWN if name in sizes]
    factor = gamma
    if DIM in sizes:
      begin, end = self.dims or (0, sizes[DIM])
      is_meant = (np.arange(sizes[DIM]) >= begin) & (np.arange(sizes[DIM]) < end)
      factor = jnp.where(is_meant, gamma[..., None], 1.0)
    if PARTS in sizes:
      factor = jnp.where(np.arange(sizes[PARTS]) == self.index, factor[..., None], 1.0)
    factor = factor.transpose([present.index(n) for n in layout.names if n in sizes])
    axes = zip(shape, self.factor_axes, strict=True)
    return factor.reshape([size if is_own else 1 for size, is_own in axes])


@dataclasses.dataclass(frozen=True)
class QkProjections:
  """The projections of multi-head and grouped-query attention.

  Query heads `g*G .. g*G+G-1` use key head g.

  Queries and keys take half of the correction each, unless `alpha` divides it otherwise. The heads
  of a group share a key head, so they share the strongest correction that one of them needs.

  Attributes:
    q: the kernel of the query projection, or its kernel and bias.
    k: the kernel of the key projection, or its kernel and bias.
  """

  q: Projection | Sequence[Projection]
  k: Projection | Sequence[Projection]

  def __post_init__(self) -> None:
    self.roles(0.5)  # Which checks them.

  def roles(self, alpha: float) -> list[tuple[str, float, tuple[Projection, ...]]]:
    """(name, power of gamma, parameters) of each role. `alpha` is the power of queries."""
    return [("q", alpha, _as_tuple("q", self.q)), ("k", 1.0 - alpha, _as_tuple("k", self.k))]


@dataclasses.dataclass(frozen=True)
class MlaProjections:
  """The projections of multi-head latent attention, with one rotary key for all heads.

  The shared rotary key does not change, so the rotary query takes the whole correction. The other
  two parts share it by `alpha`. If one kernel holds several parts, `Projection.dims` selects one.

  Attributes:
    q_nope: the part of the query without rotary embedding.
    q_rope: the rotary part of the query.
    k_nope: the part of the key without rotary embedding, often in one kernel with the values.
  """

  q_nope: Projection | Sequence[Projection]
  q_rope: Projection | Sequence[Projection]
  k_nope: Projection | Sequence[Projection]

  def __post_init__(self) -> None:
    self.roles(0.5)  # Which checks them.

  def roles(self, alpha: float) -> list[tuple[str, float, tuple[Projection, ...]]]:
    """(name, power of gamma, parameters) of each role. `alpha` is the power of `q_nope`."""
    powers = {"q_nope": alpha, "q_rope": 1.0, "k_nope": 1.0 - alpha}
    return [(name, power, _as_tuple(name, getattr(self, name))) for name, power in powers.items()]


Projections = QkProjections | MlaProjections | Mapping[str, QkProjections | MlaProjections]


@dataclasses.dataclass(frozen=True)
class Site:
  """One parameter that a projection names.

  Attributes:
    path: the path of the parameter.
    layer: the row of the statistics that applies to it. None if all rows apply, or there are none.
    power: the power of gamma by which it is scaled.
    projection: the projection that named it.
  """

  path: str
  layer: int | None
  power: float
  projection: Projection


@dataclasses.dataclass(frozen=True)
class Attention:
  """Attention layers of one kind, found in the parameters.

  Attributes:
    shape: the shape of the statistics: (layers, query heads), or (query heads,).
    num_groups: the smallest number of heads of any projection. Other heads form groups around them.
    sites: the parameters to scale.
  """

  shape: tuple[int, ...]
  num_groups: int
  sites: tuple[Site, ...]


def path_of(keys: tuple[Any, ...]) -> str:
  """The path of a leaf, without the object in which Flax may wrap it."""
  if len(keys) > 1 and isinstance(keys[-2], DictKey) and keys[-1] == GetAttrKey("value"):
    keys = keys[:-1]
  return jax.tree_util.keystr(keys, simple=True, separator="/")


def leaves_of(params: Any) -> dict[str, Any]:
  """All parameters, by path."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(params)
  if len(leaves) == 1 and not leaves[0][0]:
    raise ValueError(
      "params must be a tree in which parameters have paths, for example a dictionary, got a "
      f"single {type(leaves[0][1]).__name__}"
    )
  return {path_of(keys): x for keys, x in leaves}


def shapes_of(params: Any) -> dict[str, tuple[int, ...]]:
  """The shapes of all parameters, by path."""
  return {path: tuple(np.shape(x)) for path, x in leaves_of(params).items()}


def groups_of(projections: Projections) -> dict[str | None, QkProjections | MlaProjections]:
  """Projections by group. Without a dictionary, there is one group, None."""
  groups: dict[Any, Any] = (
    dict(projections) if isinstance(projections, Mapping) else {None: projections}
  )
  for group in groups.values():
    if not isinstance(group, QkProjections | MlaProjections):
      raise ValueError(
        "projections must be QkProjections, MlaProjections, or a dictionary of them, "
        f"got {type(group).__name__}"
      )
  return groups


def is_named_by(pattern: str, path: str) -> bool:
  """Whether a path, which may contain `{layer}`, names this parameter."""
  return _match_layer(pattern, path) is not None if _LAYER in pattern else pattern == path


def find_paths(path: str, known: Iterable[str]) -> list[str]:
  """The parameters that a path names, in the order of layers."""
  known = list(known)
  if _LAYER not in path:
    if path in known:
      return [path]
    raise ValueError(f"there is no parameter {path}; {_similar(path, known)}")
  found: dict[int, str] = {}
  for candidate in known:
    layer = _match_layer(path, candidate)
    if layer is None:
      continue
    if layer in found:
      raise ValueError(f"{found[layer]} and {candidate} are both layer {layer} of {path}")
    found[layer] = candidate
  if not found:
    raise ValueError(f"there is no parameter {path}, for any layer; {_similar(path, known)}")
  for layer in range(max(found) + 1):
    if layer not in found:
      raise ValueError(
        f"there is no parameter {path} for layer {layer}, but there are parameters of later layers"
      )
  return [found[layer] for layer in range(len(found))]


def find_attention(
  params: Any, projections: Projections, alpha: float = 0.5
) -> dict[str | None, Attention]:
  """Finds all projections, by group. `alpha` is the share of queries in a correction."""
  shapes = shapes_of(params)
  found: dict[str | None, Attention] = {}
  scaled: dict[str, list[Projection]] = {}
  for name, group in groups_of(projections).items():
    found[name] = _find_group(shapes, group, alpha)
    for site in found[name].sites:
      scaled.setdefault(site.path, []).append(site.projection)
  for path, users in scaled.items():
    _check_apart(path, users)
  _check_floating(params, scaled)
  return found


def _check_floating(params: Any, paths: Container[str]) -> None:
  for keys, x in jax.tree_util.tree_flatten_with_path(params)[0]:
    if path_of(keys) in paths and not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(
        f"{path_of(keys)} must hold floating point numbers to be clipped, got {x.dtype}; clip the "
        "weights that it was quantised from"
      )


def _find_group(shapes: Mapping[str, tuple[int, ...]], group: Any, alpha: float) -> Attention:
  sites: list[Site] = []
  heads: dict[str, int] = {}
  layers: dict[str, int | None] = {}
  for role, power, parameters in group.roles(alpha):
    for projection in parameters:
      paths = find_paths(projection.path, shapes)
      for layer, path in enumerate(paths):
        sizes = projection.sizes(path, shapes[path])
        is_many = _LAYER in projection.path
        sites.append(Site(path, layer if is_many else None, power, projection))
        layers[projection.path] = len(paths) if is_many else sizes.get(LAYERS)
        if heads.setdefault(role, sizes[HEADS]) != sizes[HEADS]:
          raise ValueError(f"{path} has {sizes[HEADS]} heads, others of {role} {heads[role]}")
  if len(set(layers.values())) > 1:
    counts = ", ".join(f"{path} {count or 'not stacked'}" for path, count in layers.items())
    raise ValueError(f"projections must have the same number of layers, got {counts}")
  num_layers = next(iter(layers.values()))
  num_q_heads, *others = heads.values()  # The first role of every group is that of queries.
  num_groups = min(others)
  if isinstance(group, MlaProjections) and set(others) != {num_q_heads}:
    raise ValueError(f"projections must have the same number of heads, got {heads}")
  if num_q_heads % num_groups:
    raise ValueError(f"q's heads must be a multiple of k's, got {heads}")
  shape = (num_q_heads,) if num_layers is None else (num_layers, num_q_heads)
  return Attention(shape, num_groups, tuple(sites))


def _match_layer(pattern: str, path: str) -> int | None:
  """The number in the place of `{layer}`; None if the path does not match."""
  match = re.fullmatch("([0-9]+)".join(map(re.escape, pattern.split(_LAYER))), path)
  return int(match[1]) if match and len(set(match.groups())) == 1 else None


def _check_apart(path: str, users: Sequence[Projection]) -> None:
  for i, a in enumerate(users):
    for b in users[:i]:
      if a.index != b.index and None not in (a.index, b.index):
        continue
      if a.dims is None or b.dims is None or max(a.dims[0], b.dims[0]) < min(a.dims[1], b.dims[1]):
        raise ValueError(
          f"{path} is named twice; parts of one parameter need disjoint dims, or another index"
        )


def _as_tuple(name: str, value: Any) -> tuple[Projection, ...]:
  parameters = (value,) if isinstance(value, Projection) else value
  if not isinstance(parameters, Sequence) or not parameters:
    raise ValueError(f"{name} must be a Projection or a sequence of them, got {value!r}")
  for projection in parameters:
    if not isinstance(projection, Projection):
      raise ValueError(f"{name} must be a Projection or a sequence of them, got {value!r}")
  return tuple(parameters)


def _similar(path: str, known: Sequence[str]) -> str:
  last = path.rsplit("/", 1)[-1]
  similar = [p for p in known if p.rsplit("/", 1)[-1] == last] or list(known)
  more = f", and {len(similar) - 8} more" if len(similar) > 8 else ""
  return f"there are {', '.join(similar[:8])}{more}" if known else "there are none at all"
