"""QK-Clip in training: Optax, Muon, gradient accumulation."""

import functools
import pickle
import subprocess
import sys

import flax.serialization
import jax
import jax.export
import numpy as np
import optax
import pytest

from jax_magi.optim import (
  Projection,
  QkProjections,
  apply_qk_clip,
  muon_clip,
  qk_clip,
  raise_if_broken,
)
from tests.arrays import assert_same_bits, normal
from tests.clip_model import (
  DIM,
  EMBED,
  HEADS,
  HIDDEN,
  LAYERS,
  MATRICES,
  PROJECTIONS,
  broken_statistics,
  make_grads,
  make_params,
  make_statistics,
)
from tests.compilation import quick_jit

pytestmark = pytest.mark.usefixtures("with_promotion")  # Optax needs it.


@functools.cache
def _step_of(update):
  """One program for all runs of an optimizer."""

  @quick_jit
  def step(params, state, grad, max_logits):
    updates, state = update(grad, state, params, max_logits=max_logits)
    return optax.apply_updates(params, updates), state

  return step


def _run(optimizer, params, grads, statistics):
  """Parameters after each step, and the last state."""
  step = _step_of(optimizer.update)
  state, seen = optimizer.init(params), []
  for grad, max_logits in zip(grads, statistics, strict=True):
    params, state = step(params, state, grad, max_logits)
    seen.append(jax.tree.map(np.asarray, params))
  return seen, state


def _without_clip(optimizer):
  return optax.with_extra_args_support(optimizer)


# A clipped update is rounded once more when it is added to parameters of size about 1.
_assert_close = functools.partial(
  jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
)


# --- inside a chain ---


def test_chain_after_muon_equals_muon_then_apply_qk_clip():
  muon = optax.contrib.muon(0.1)
  statistics = make_statistics(2)
  statistics[0, 1, 3] = 160.0
  grads = make_grads(2)
  seen, _ = _run(optax.chain(muon, qk_clip(PROJECTIONS)), make_params(), grads, statistics)
  (plain,), _ = _run(_without_clip(muon), make_params(), grads[:1], statistics[:1])
  _assert_close(seen[0], apply_qk_clip(plain, statistics[0], PROJECTIONS))
  touched = (seen[0]["k"] != plain["k"]).any(axis=(1, 3))
  np.testing.assert_array_equal(np.argwhere(touched), [[1, 1]])


def test_where_nothing_clips_the_update_keeps_every_bit():
  muon, grads, statistics = optax.contrib.muon(0.1), make_grads(3), make_statistics(3, 100.0)
  seen, _ = _run(optax.chain(muon, qk_clip(PROJECTIONS)), make_params(), grads, statistics)
  plain, _ = _run(_without_clip(muon), make_params(), grads, statistics)
  assert_same_bits(seen, plain)


def test_schedules_of_the_threshold_work():
  optimizer = optax.inject_hyperparams(
    qk_clip, static_args=("projections", "accumulate", "report")
  )(projections=PROJECTIONS, threshold=optax.linear_schedule(100.0, 50.0, 2))
  zeros = jax.tree.map(np.zeros_like, make_params())
  seen, _ = _run(optimizer, make_params(), [zeros] * 3, make_statistics(3, 60.0))
  assert_same_bits(seen[1], make_params())  # 100, then 75.
  np.testing.assert_allclose(seen[2]["q"], make_params()["q"] * np.sqrt(50.0 / 60.0), rtol=1e-6)


def test_missing_arguments_are_named():
  optimizer, params = qk_clip(PROJECTIONS), make_params()
  state = optimizer.init(params)
  with pytest.raises(ValueError, match="needs params"):
    optimizer.update(params, state, max_logits=make_statistics(1)[0])
  with pytest.raises(ValueError, match="needs max_logits"):
    optimizer.update(params, state, params)
  with pytest.raises(ValueError, match=r"must be \[layers, num_q_heads\] = \[3, 4\]"):
    optimizer.update(params, state, params, max_logits=np.ones((4, 4)))
  with pytest.raises(ValueError, match="threshold must be"):
    qk_clip(PROJECTIONS, -1.0)
  del params["k"]
  with pytest.raises(ValueError, match="there is no parameter k; there are down, "):
    optimizer.init(params)


# --- gradient accumulation ---


def _accumulating(inner, num_steps):
  return optax.chain(
    optax.MultiSteps(inner, num_steps).gradient_transformation(),
    qk_clip(PROJECTIONS, accumulate=True, report=True),
  )


def test_four_microbatches_at_30_do_not_clip_at_100():
  inner, grads, statistics = optax.contrib.muon(0.1), make_grads(4), make_statistics(4)
  seen, _ = _run(_accumulating(inner, 4), make_params(), grads, statistics)
  plain, _ = _run(
    _without_clip(optax.MultiSteps(inner, 4).gradient_transformation()),
    make_params(),
    grads,
    statistics,
  )
  assert_same_bits(seen, plain)


@pytest.mark.parametrize("hot", range(4))
def test_microbatches_are_clipped_by_their_largest_maximum(hot):
  statistics = make_statistics(8)
  statistics[hot, 2, 1] = 150.0  # In the first four; the second four are cool.
  grads = make_grads(8)
  seen, state = _run(_accumulating(optax.sgd(0.1), 4), make_params(), grads, statistics)
  mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *grads[:4])
  expected = apply_qk_clip(
    jax.tree.map(lambda p, g: p - np.float32(0.1) * g, make_params(), mean),
    statistics[:4].max(axis=0),
    PROJECTIONS,
  )
  for early in seen[:3]:  # No parameter changes while gradients accumulate.
    assert_same_bits(early, make_params())
  _assert_close(seen[3], expected)
  assert (seen[3]["q"][2, :, 1] != make_params()["q"][2, :, 1] - 0.1 * mean["q"][2, :, 1]).all()
  for early in seen[4:7]:
    assert_same_bits(early, seen[3])
  # The maximum of the second four steps starts from -inf, so they do not clip.
  mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *grads[4:])
  _assert_close(seen[7], jax.tree.map(lambda p, g: p - np.float32(0.1) * g, seen[3], mean))
  np.testing.assert_array_equal(state[1].max_logits, -np.inf)


def test_multi_steps_around_it_takes_the_maximum_over_microbatches():
  optimizer = optax.MultiSteps(optax.chain(optax.sgd(0.1), qk_clip(PROJECTIONS)), 4)
  statistics, grads = make_statistics(4), make_grads(4)
  statistics[1, 0, 0] = 400.0
  running = np.maximum.accumulate(statistics)
  seen, _ = _run(optimizer, make_params(), grads, running)
  outside, _ = _run(_accumulating(optax.sgd(0.1), 4), make_params(), grads, statistics)
  assert_same_bits(seen, outside)


def test_muon_clip_accumulates():
  statistics = make_statistics(4)
  statistics[1, 0, 0] = 400.0
  grads = make_grads(4)
  mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *grads)
  several, _ = _run(
    muon_clip(0.1, PROJECTIONS, MATRICES, every_k_schedule=4), make_params(), grads, statistics
  )
  once, _ = _run(
    muon_clip(0.1, PROJECTIONS, MATRICES), make_params(), [mean], [statistics.max(axis=0)]
  )
  assert_same_bits(several[2], make_params())
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), several[3], once[0]
  )


def test_statistics_of_a_skipped_microbatch_still_count():
  inner = optax.MultiSteps(
    optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite
  ).gradient_transformation()
  optimizer = optax.chain(inner, qk_clip(PROJECTIONS, accumulate=True))
  grads = make_grads(3)
  grads[1] = jax.tree.map(lambda x: np.full_like(x, np.inf), grads[1])
  statistics = make_statistics(3)
  statistics[1, 0, 0] = 400.0
  seen, _ = _run(optimizer, make_params(), grads, statistics)
  assert_same_bits(seen[1], make_params())
  expected = make_params()["q"][0, :, 0] - 0.05 * (grads[0]["q"] + grads[2]["q"])[0, :, 0]
  np.testing.assert_allclose(seen[2]["q"][0, :, 0], expected * 0.5, rtol=1e-5, atol=1e-6)


def test_state_is_saved_and_restored_in_the_middle_of_accumulation():
  optimizer = muon_clip(0.1, PROJECTIONS, MATRICES, every_k_schedule=4)
  statistics, grads = make_statistics(4), make_grads(4)
  statistics[0, 1, 1] = 300.0
  whole, _ = _run(optimizer, make_params(), grads, statistics)
  _, state = _run(optimizer, make_params(), grads[:2], statistics[:2])
  copies = (
    pickle.loads(pickle.dumps(jax.tree.map(np.asarray, state))),
    flax.serialization.from_bytes(
      optimizer.init(make_params()), flax.serialization.to_bytes(state)
    ),
  )
  for restored in copies:
    resumed = optimizer._replace(init=lambda _, restored=restored: restored)
    seen, _ = _run(resumed, make_params(), grads[2:], statistics[2:])
    assert_same_bits(seen[-1], whole[-1])


# --- NaN and +inf ---


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_heads_are_counted_and_logged(value, caplog):
  optimizer = optax.chain(optax.sgd(0.1), qk_clip(PROJECTIONS, report=True))
  zeros = jax.tree.map(np.zeros_like, make_params())
  statistics = [broken_statistics(value), make_statistics(1)[0], broken_statistics(value)]
  seen, state = _run(optimizer, make_params(), [zeros] * 3, statistics)
  jax.effects_barrier()
  assert [r.getMessage().split(";")[0] for r in caplog.records] == [
    "max_logits are NaN or +inf at layer 0 head 1"
  ] * 2
  touched = (seen[0]["q"] != make_params()["q"]).any(axis=(1, 3))
  np.testing.assert_array_equal(np.argwhere(touched), [[1, 2], [1, 3]])
  np.testing.assert_array_equal(np.argwhere(state[1].num_broken == 2), [[0, 1]])
  with pytest.raises(FloatingPointError, match=r"are NaN or \+inf at layer 0 head 1$"):
    raise_if_broken(state)
  raise_if_broken(optimizer.init(make_params()))
  with pytest.raises(ValueError, match="no QkClipState"):
    raise_if_broken(optax.sgd(0.1).init(make_params()))


def test_broken_microbatch_is_not_forgotten_while_gradients_gather(caplog):
  statistics = [broken_statistics(np.nan), *[broken_statistics(500.0)] * 3]
  grads = make_grads(4)
  seen, state = _run(_accumulating(optax.sgd(0.1), 4), make_params(), grads, statistics)
  jax.effects_barrier()
  assert len(caplog.records) == 1
  mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *grads)
  plain = make_params()["q"] - np.float32(0.1) * mean["q"]
  np.testing.assert_allclose(seen[3]["q"][0], plain[0], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(seen[3]["q"][1, :, 3], plain[1, :, 3] * 0.5, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(np.argwhere(state[1].num_broken == 1), [[0, 1]])


def test_without_report_the_program_never_calls_the_host():
  params = make_params()

  def export(report):
    optimizer = qk_clip(PROJECTIONS, report=report)
    state = optimizer.init(params)
    step = jax.jit(lambda p, m: optimizer.update(p, state, p, max_logits=m)[0])
    return jax.export.export(step)(params, broken_statistics(0.0)).serialize

  with pytest.raises(NotImplementedError, match="callback"):
    export(True)()
  assert export(False)()
  optimizer = qk_clip(PROJECTIONS, report=False)
  _, state = _run(optimizer, params, [params], [broken_statistics(np.nan)])
  with pytest.raises(FloatingPointError, match="layer 0 head 1"):
    raise_if_broken(state)


# --- Muon ---


def _as_matrix(name, x):
  rows = HEADS * DIM if name == "o" else x.shape[0]
  return x.reshape(rows, -1)


def test_muon_clip_takes_every_layer_as_one_matrix():
  """Equal to Muon on plain matrices, one per layer, at the same settings."""
  params, (grads,) = make_params(), make_grads(1)
  options = {"weight_decay": 0.1, "consistent_rms": 0.2}
  got, _ = _run(muon_clip(0.1, PROJECTIONS, MATRICES), params, [grads], make_statistics(1))
  names = ["q", "k", *MATRICES]

  def matrices(tree):
    return {n: [_as_matrix(n, tree[n][i]) for i in range(LAYERS)] for n in names}

  (expected,), _ = _run(
    _without_clip(optax.contrib.muon(0.1, **options)), matrices(params), [matrices(grads)], [0.0]
  )
  _assert_close(matrices(got[0]), expected)
  adam = {name: params[name] for name in ("embedding", "norm")}
  (expected,), _ = _run(
    _without_clip(optax.adamw(0.1, weight_decay=0.0, nesterov=True)),
    adam, [{name: grads[name] for name in adam}], [0.0],
  )  # fmt: skip
  _assert_close({name: got[0][name] for name in adam}, expected)


def test_experts_are_matrices_of_their_own():
  params = {name: make_params()[name] for name in ("q", "k")} | {
    "up": normal(2, 3, EMBED, HIDDEN, seed=8)
  }
  grads = jax.tree.map(lambda x: normal(*x.shape, seed=9), params)
  optimizer = muon_clip(0.1, PROJECTIONS, {"up": "layers experts embed -> hidden"})
  (got,), _ = _run(optimizer, params, [grads], make_statistics(1))
  alone = optax.contrib.muon(0.1, weight_decay=0.1, consistent_rms=0.2)
  (expected,), _ = _run(
    _without_clip(alone), {"up": params["up"][1, 2]}, [{"up": grads["up"][1, 2]}], [0.0]
  )
  _assert_close(got["up"][1, 2], expected["up"])


def test_muon_updates_have_the_rms_of_adam():
  params, (grads,) = make_params(), make_grads(1)
  optimizer = muon_clip(1.0, PROJECTIONS, MATRICES, weight_decay=0.0)
  (got,), _ = _run(optimizer, params, [grads], make_statistics(1))
  for name in ("q", "k", *MATRICES):
    # Newton-Schulz leaves singular values between 0.7 and 1.2.
    assert 0.14 < np.sqrt(np.mean((got[name] - params[name]) ** 2)) < 0.24, name


def test_muon_clip_clips():
  statistics = make_statistics(1)
  statistics[0, 1, 2] = 400.0
  grads = make_grads(1)
  (got,), _ = _run(muon_clip(0.1, PROJECTIONS, MATRICES), make_params(), grads, statistics)
  (plain,), _ = _run(muon_clip(0.1, PROJECTIONS, MATRICES, 1e6), make_params(), grads, statistics)
  np.testing.assert_allclose(got["k"][1, :, 1], plain["k"][1, :, 1] * 0.5, rtol=1e-5, atol=1e-6)
  assert_same_bits(np.delete(got["k"], 1, axis=0), np.delete(plain["k"], 1, axis=0))


@pytest.mark.parametrize(
  ("matrices", "match"),
  [
    ({**MATRICES, "gate": "layers embed -> hidden"}, "there is no parameter gate"),
    ({**MATRICES, "up": "embed -> hidden"}, "does not fit its layout 'embed -> hidden'"),
    ({**MATRICES, "norm": "layers -> embed"}, r"matrices\['norm'\] must have inputs and outputs"),
    ({**MATRICES, "q": "layers heads dim -> embed"}, "q has two layouts"),
  ],
)
def test_bad_matrices_are_named(matrices, match):
  with pytest.raises(ValueError, match=match):
    muon_clip(0.1, PROJECTIONS, matrices).init(make_params())


def test_unrolled_layers_with_biases():
  """Layers are counted by {layer}. The bias is clipped, but is no matrix."""
  params = {
    f"block_{i}": {
      n: {"kernel": normal(EMBED, 32, seed=i), "bias": normal(32, seed=9)} for n in "qk"
    }
    for i in range(2)
  }
  roles = {
    n: [
      Projection(f"block_{{layer}}/{n}/kernel", "embed -> (heads dim)", num_heads=4),
      Projection(f"block_{{layer}}/{n}/bias", "-> (heads dim)", num_heads=4),
    ]
    for n in "qk"
  }
  optimizer = muon_clip(0.0, QkProjections(**roles), {}, weight_decay=0.0)
  statistics = np.ones((1, 2, 4), np.float32)
  statistics[0, 1, 2] = 400.0
  (got,), _ = _run(optimizer, params, [params], statistics)
  assert_same_bits(got["block_0"], params["block_0"])
  for n in "qk":
    for part, old in params["block_1"][n].items():
      expected = old.copy()
      expected[..., 16:24] *= 0.5
      np.testing.assert_allclose(got["block_1"][n][part], expected, rtol=1e-6)


# --- without Optax ---


def test_optax_is_only_needed_by_the_transforms():
  program = """
import sys
sys.modules["optax"] = None
import numpy as np, jax_magi
from jax_magi.optim import Projection, QkProjections, apply_qk_clip, qk_clip, muon_clip
projections = QkProjections(*(Projection(n, "embed -> heads dim") for n in "qk"))
params = {n: np.ones((2, 3, 4), np.float32) for n in "qk"}
assert apply_qk_clip(params, np.array([1, 1, 400], np.float32), projections)["q"][0, 2, 0] == 0.5
for call in (lambda: qk_clip(projections), lambda: muon_clip(0.1, projections, {})):
  try:
    call()
  except ImportError as error:
    print(error)
"""
  done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
  assert done.stdout.splitlines() == [
    "qk_clip needs Optax: pip install 'jax-magi[optim]'",
    "muon_clip needs Optax: pip install 'jax-magi[optim]'",
  ]
