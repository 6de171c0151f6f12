"""Bias and ALiBi slopes in the Hopper kernels, on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_magi
from jax_magi import AttentionMask
from tests.accuracy import DTYPES, check_attention, check_close, make_inputs
from tests.arrays import assert_same_bits, normals
from tests.bias_cases import BIAS_CASES, many_slices

pytestmark = pytest.mark.gpu

_DTYPES = ["bf16", "f16"]
_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]

bias_cases = pytest.mark.parametrize("case", BIAS_CASES, ids=lambda case: case.name)
every_dims = pytest.mark.parametrize("dims", _DIMS, ids=lambda dims: f"{dims[0]}_{dims[1]}")


def _is_shared(case) -> bool:
  """Whether heads share a bias that differs from query to query."""
  return case.bias in ("1qk", "qk") and case.case.num_q_heads > 1 and case.case.mask.q_len > 1


@pytest.mark.parametrize("dtype", _DTYPES)
@bias_cases
def test_case(case, dtype):
  check_attention(case.make_inputs(dtype), case.case.mask, "cuda", **case.case.options)


@bias_cases
def test_case_with_a_known_mask(case):
  inputs, options = case.make_inputs("bf16"), case.case.options
  check_attention(inputs, case.case.mask, "cuda", is_mask_known=True, **options)


@bias_cases
def test_case_deterministic(case):
  inputs, options = case.make_inputs("bf16"), {"deterministic": True, **case.case.options}
  if _is_shared(case):
    with pytest.raises(NotImplementedError, match="no deterministic gradient of a bias"):
      check_attention(inputs, case.case.mask, "cuda", **options)
    return
  check_attention(inputs, case.case.mask, "cuda", **options)


# --- lengths around tiles and blocks, and lengths that TMA does not take ---

_BIASES = ["hqk", "1qk", "h1k", "11k"]


@every_dims
@pytest.mark.parametrize("bias", _BIASES)
@pytest.mark.parametrize("length", [1, 8, 63, 64, 65, 128, 129, 192, 193, 1000])
def test_length(length, bias, dims):
  shape = (length, length, 4, 2, *dims)
  inputs = make_inputs(np.random.default_rng(0), DTYPES["bf16"], *shape, bias=bias, has_alibi=True)
  check_attention(inputs, AttentionMask.causal(length), "cuda")
  check_attention(inputs, AttentionMask.full(length), "cuda", is_mask_known=True)


@pytest.mark.parametrize("is_bias_f32", [False, True])
@every_dims
@pytest.mark.parametrize(("q_len", "k_len"), [(300, 520), (520, 304), (5, 1000), (1000, 7)])
def test_lengths_that_differ(q_len, k_len, dims, is_bias_f32):
  dtype = DTYPES["bf16"]
  inputs = make_inputs(
    np.random.default_rng(0),
    dtype,
    *(q_len, k_len, 6, 2, *dims),
    bias="hqk",
    bias_dtype=np.float32 if is_bias_f32 else dtype,
  )
  for mask in (
    AttentionMask.full(q_len, k_len),
    AttentionMask.sliding_window(q_len, k_len, left=70, right=3),
  ):
    check_attention(inputs, mask, "cuda")
    check_attention(inputs, mask, "cuda", deterministic=True)


@pytest.mark.parametrize("is_mask_known", [False, True])
@pytest.mark.parametrize("bias", ["hqk", "1qk"])
@every_dims
def test_slices_at_any_key(dims, bias, is_mask_known):
  """TMA loads boxes of a bias only from multiples of 8 keys, but slices may begin anywhere."""
  length = 1264
  documents = AttentionMask.from_cu_seqlens([0, 1, 302, 703, 1251, length])
  causal = AttentionMask.from_cu_seqlens([0, 77, 590, 995, length], causal=True)
  inputs = make_inputs(
    np.random.default_rng(0), DTYPES["bf16"], *(length, length, 4, 2, *dims), bias=bias
  )
  for mask in (documents, causal, AttentionMask.sliding_window(length, left=333, right=5)):
    check_attention(inputs, mask, "cuda", is_mask_known=is_mask_known)
    if bias == "hqk":
      check_attention(inputs, mask, "cuda", is_mask_known=is_mask_known, deterministic=True)


@pytest.mark.parametrize("bias", ["hqk", "h1k", None])
@every_dims
@pytest.mark.parametrize("heads", [(2, 1), (4, 2), (16, 8)])
def test_many_slices(heads, dims, bias, request):
  """A row has more slices than the kernel that writes zeros keeps in shared memory."""
  if heads == (2, 1) and dims == (64, 64) and bias is None:
    # Off by 124, and 86 are allowed: the plain computation's largest error of these two heads is
    # small by chance. Ours is that of probabilities in bfloat16, times the distance of keys.
    request.applymarker(pytest.mark.xfail(reason="dslopes", raises=AssertionError, strict=False))
  check_attention(*many_slices(heads, dims, bias), "cuda")


_RANDOM_DIMS = [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (136, 200)]


@pytest.mark.parametrize("seed", range(24))
def test_random_slices(seed):
  rng = np.random.default_rng(seed)
  q_len, k_len = (int(x) for x in rng.integers(1, 700, 2))
  cuts = np.unique(rng.integers(0, k_len + 1, 6))
  k_ranges = np.stack([cuts[:-1], cuts[1:]], axis=1).reshape(-1, 2)
  q_ranges = np.sort(rng.integers(0, q_len + 1, (len(k_ranges), 2)), axis=1)
  types = rng.integers(0, 4, len(k_ranges))
  mask = AttentionMask.from_ranges(q_ranges, k_ranges, types, q_len=q_len, k_len=k_len)
  dims, bias = _RANDOM_DIMS[seed % 6], str(rng.choice(_BIASES))
  dtype = DTYPES[str(rng.choice(_DTYPES))]
  inputs = make_inputs(
    rng,
    dtype,
    *(q_len, k_len, 6, 3, *dims),
    bias=bias,
    bias_dtype=rng.choice([np.float32, dtype]),
    has_alibi=bool(rng.integers(2)),
  )
  softcap = float(rng.choice([0.0, 4.0]))
  check_attention(inputs, mask, "cuda", softcap=softcap, is_mask_known=bool(rng.integers(2)))


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 40), (40, 0)])
def test_no_tokens(q_len, k_len):
  q, k, bias = (
    jnp.ones(shape, jnp.bfloat16) for shape in ((q_len, 2, 64), (k_len, 1, 64), (2, q_len, k_len))
  )

  def loss(q, k, v, bias):
    mask = AttentionMask.full(q_len, k_len)
    return jax_magi.attention(q, k, v, mask, bias=bias, implementation="cuda")[0].sum()

  gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, k, k, bias)
  assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape, bias.shape]
  assert all(not np.asarray(x, np.float32).any() for x in gradients)


# --- batches ---


def _batch_gradients(attend, operands, dout):
  @jax.jit
  def run(operands, dout):
    out, vjp = jax.vjp(attend, *operands)
    return out, *vjp(dout)

  return run(operands, dout)


@pytest.mark.parametrize("shape", ["bhqk", "1hqk", "b1qk", "11qk", "bh1k", "b11k", "111k"])
@pytest.mark.parametrize("k_len", [200, 203])
def test_batch(shape, k_len):
  """One call over a batch, compared with one float64 computation for each row."""
  batch = 36  # More tiles than multiprocessors.
  sizes = {"b": batch, "h": 4, "q": 150, "k": k_len, "1": 1}
  bias_shape = tuple(sizes[letter] for letter in shape)
  q, k, v, dout, bias = normals(
    *((batch, 150, 4, 64), (batch, k_len, 2, 64), (batch, k_len, 2, 64), (batch, 150, 4, 64)),
    bias_shape,
  )
  bias[..., 17] = -np.inf
  low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, bias)]

  def attend(q, k, v, bias, implementation):
    return jax_magi.dot_product_attention(
      q, k, v, bias, is_causal=True, implementation=implementation
    )

  dout = jnp.asarray(dout, jnp.bfloat16)
  ours = _batch_gradients(functools.partial(attend, implementation="cuda"), low, dout)
  with jax.default_device(jax.devices("cpu")[0]):
    high = [np.asarray(x, np.float32) for x in (*low, dout)]
    plain = functools.partial(attend, implementation="blockwise")
    truth = _batch_gradients(plain, high[:4], high[4])
    rounded = _batch_gradients(plain, *jax.device_get((low, dout)))
  for name, got, expected, other in zip(
    ("out", "dq", "dk", "dv", "dbias"), ours, truth, rounded, strict=True
  ):
    check_close(name, got, expected, other, jnp.bfloat16)


# --- properties ---


@pytest.mark.parametrize(
  ("bias", "has_alibi"),
  [("hqk", True), ("hqk", False), ("h1k", True), ("11k", True), (None, True)],
)
@every_dims
def test_deterministic_gradients_are_equal_bit_for_bit(dims, bias, has_alibi):
  length = 1504
  inputs = make_inputs(
    np.random.default_rng(0),
    DTYPES["bf16"],
    *(length, length, 6, 2, *dims),
    bias=bias,
    has_alibi=has_alibi,
  )
  mask = AttentionMask.from_cu_seqlens([0, 300, 1100, 1101, length], causal=True)
  q, k, v, _, *terms = inputs.all_operands
  terms = {n: x for n, x in zip(("bias", "alibi_slopes"), terms, strict=True) if x is not None}

  @jax.jit
  def gradients(operands, dout):
    def fun(q, k, v, terms):
      options = {"deterministic": True, "implementation": "cuda", **terms}
      return jax_magi.attention(q, k, v, mask, **options)[0]

    return jax.vjp(fun, *operands)[1](dout)

  operands = jax.tree.map(jnp.asarray, (q, k, v, terms))
  first = gradients(operands, jnp.asarray(inputs.dout))
  for _ in range(10):
    assert_same_bits(gradients(operands, jnp.asarray(inputs.dout)), first)


@pytest.mark.parametrize("bias_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("dims", _DIMS[1:], ids=str)
def test_rows_and_heads_whose_bias_hides_all_have_no_nan(dims, bias_dtype, softcap):
  shapes = (300, 4, dims[0]), (304, 2, dims[0]), (304, 2, dims[1])
  q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in normals(*shapes))
  bias = normals((4, 300, 304))[0]
  bias[:, 5] = bias[2] = -np.inf

  @jax.jit
  def run(q, k, v, bias):
    def loss(q, k, v, bias):
      out, meta = jax_magi.attention(
        q,
        k,
        v,
        AttentionMask.causal(300, 304),
        bias=bias,
        softcap=softcap,
        return_max_logits=True,
        implementation="cuda",
      )
      return out.astype(jnp.float32).sum(), (out, meta)

    return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, bias)

  grads, (out, meta) = jax.device_get(run(q, k, v, jnp.asarray(bias, bias_dtype)))
  grads, out = [np.asarray(x, np.float32) for x in grads], np.asarray(out, np.float32)
  assert all(np.isfinite(x).all() for x in (*grads, out))
  assert not out[5].any() and not out[:, 2].any() and not grads[0][5].any()
  assert not grads[3][:, 5].any() and not grads[3][2].any()
  assert (meta.lse[5] == -np.inf).all() and (meta.lse[:, 2] == -np.inf).all()
  assert meta.max_logits[2] == -np.inf and np.isfinite(np.delete(meta.max_logits, 2)).all()


# --- more tiles than multiprocessors, each of which then works on several, one after the other ---

_MANY_MASKS = {
  "causal": lambda n: AttentionMask.causal(n),
  "window": lambda n: AttentionMask.sliding_window(n, left=150, right=20),
  "documents": lambda n: AttentionMask.from_cu_seqlens([0, 77, 79, 200, n], causal=True),
}
# With the last 8 of these, a head has three tiles of 128 queries or keys.
_THREE_TILES = 264


@pytest.mark.parametrize("is_mask_known", [False, True])
@pytest.mark.parametrize(
  ("bias", "has_alibi", "mask"),
  [
    ("hqk", False, "causal"),
    ("hqk", True, "documents"),
    ("1qk", False, "window"),
    ("h1k", True, "documents"),
    (None, True, "window"),
  ],
)
@every_dims
def test_many_tiles(dims, bias, has_alibi, mask, is_mask_known):
  """Each pass has at least 3 * 132 tiles, with odd and even numbers of blocks."""
  length, heads = _THREE_TILES, 132
  inputs = make_inputs(
    np.random.default_rng(0),
    DTYPES["bf16"],
    *(length, length, heads, heads, *dims),
    bias=bias,
    has_alibi=has_alibi,
  )
  check_attention(inputs, _MANY_MASKS[mask](length), "cuda", is_mask_known=is_mask_known)


@pytest.mark.parametrize(
  ("bias_dtype", "has_alibi", "mask", "deterministic"),
  [
    ("bf16", True, "documents", False),
    ("bf16", True, "window", True),
    ("f32", True, "causal", False),
    ("bf16", False, "causal", False),
    ("bf16", False, "documents", True),
  ],
)
@every_dims
def test_many_tiles_of_groups(dims, bias_dtype, has_alibi, mask, deterministic):
  """The query heads of a kv head take turns in one key tile, or in several."""
  length = _THREE_TILES
  inputs = make_inputs(
    np.random.default_rng(0),
    DTYPES["bf16"],
    *(length, length, 150, 50, *dims),
    bias="hqk",
    bias_dtype=DTYPES[bias_dtype],
    has_alibi=has_alibi,
  )
  check_attention(inputs, _MANY_MASKS[mask](length), "cuda", deterministic=deterministic)


def _heads_and_gradients(mask, deterministic=False):
  """A program that returns out, lse and the gradients by operand, all with the heads in front."""

  @jax.jit
  def run(operands, dout):
    def attend(operands):
      options = {"deterministic": deterministic, "implementation": "cuda"}
      out, meta = jax_magi.attention(mask=mask, **operands, **options)
      return out, meta.lse

    (out, lse), vjp = jax.vjp(attend, operands)
    (gradients,) = vjp((dout, jnp.zeros_like(lse)))
    by_row = {"out": out, "lse": lse, **{name: gradients.pop(name) for name in "qkv"}}
    return {**{n: jnp.moveaxis(x, 1, 0) for n, x in by_row.items()}, **gradients}

  return run


def _one_dim(dout):
  """`dout` without all dims but one of each row, which differs from row to row.

  delta is a sum over dims, in an order that XLA chooses by shape and by how long it takes. With one
  term that is not 0, any order gives the same.
  """
  rows, dims = np.arange(dout.shape[0])[:, None, None], np.arange(dout.shape[-1])
  return jnp.where(rows % dout.shape[-1] == dims, dout, 0)


def _head(operands, head):
  """The operands of one head: terms have the heads in front, others in the middle."""
  terms = ("bias", "alibi_slopes")
  return {n: x[head][None] if n in terms else x[:, head][:, None] for n, x in operands.items()}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
  ("bias", "has_alibi"), [("hqk", True), ("hqk", False), ("h1k", True), (None, True)]
)
@every_dims
def test_a_head_among_others_is_what_it_is_alone(dims, bias, has_alibi, deterministic):
  """Bit for bit, whichever tiles the multiprocessor had before; but dq only if it is deterministic.

  This is of heads without a group. A group's dk and dv are sums of parts, and how many there are
  depends on the number of tiles.
  """
  heads, length = 40, 1304
  inputs = make_inputs(
    np.random.default_rng(0),
    DTYPES["bf16"],
    *(length, length, heads, heads, *dims),
    bias=bias,
    has_alibi=has_alibi,
  )
  names = ("q", "k", "v", "bias", "alibi_slopes")
  operands = {n: jnp.asarray(getattr(inputs, n)) for n in names if getattr(inputs, n) is not None}
  dout = _one_dim(jnp.asarray(inputs.dout))
  run = _heads_and_gradients(AttentionMask.causal(length), deterministic)
  together = jax.device_get(run(operands, dout))
  for head in range(heads):
    alone = jax.device_get(run(_head(operands, head), dout[:, head][:, None]))
    for name, expected in alone.items():
      if name != "q" or deterministic:
        is_different = np.atleast_1d(_bits(together[name][head]) != _bits(expected[0]))
        places = np.argwhere(is_different)[:5].tolist()
        assert not places, f"{name} of head {head}: {is_different.sum()} elements, at {places}"


def _bits(x):
  return x.view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)


def test_elements_past_two_to_the_31():
  """A bias of 2.2e9 elements: the last head is that of a call without the others."""
  heads, length = 33, 8192
  key = jax.random.key(0)
  *qkv, dout = (
    jax.random.normal(k, (length, heads, 64), jnp.bfloat16) for k in jax.random.split(key, 4)
  )
  bias = jax.random.normal(key, (heads, 1, length), jnp.bfloat16) * jnp.ones(
    (1, length, 1), jnp.bfloat16
  )
  operands, dout = {**dict(zip("qkv", qkv, strict=True)), "bias": bias}, _one_dim(dout)
  run = _heads_and_gradients(AttentionMask.causal(length))

  def last(results):
    return {name: x[-1] for name, x in results.items() if name != "q"}

  expected = last(run(_head(operands, heads - 1), dout[:, -1:]))
  assert_same_bits(jax.jit(lambda *args: last(run(*args)))(operands, dout), expected)
