"""A few random uses in each run of the tests; `python -m tests.random_uses` has many."""

import pytest

from tests.random_uses import run_uses
from tests.sizes import in_turns


def _check(index, numbers, implementation):
  failures = [o for o in run_uses(0, index, numbers, implementation) if o.error]
  assert not failures, "\n".join(map(str, failures))


@pytest.mark.parametrize("index", in_turns(range(6), every=3))
def test_uses_on_cpu(index):
  _check(index, range(9), "cpu")


@pytest.mark.long
def test_uses_blockwise():
  _check(2, range(6), "blockwise")


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(12))
def test_uses_on_cuda(index):
  _check(index, range(20), "cuda")
