"""The faults of `scripts/mutation_check.py` can be applied: the code that they change is there."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = tomllib.loads((ROOT / "scripts" / "mutants.toml").read_text())["mutant"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"])
def test_a_fault_changes_one_place_and_names_its_tests(mutant):
  assert (ROOT / mutant["file"]).read_text().count(mutant["old"]) == 1
  assert mutant["new"] != mutant["old"]
  assert mutant["tests"]
  for name in mutant["tests"]:
    assert (ROOT / "tests" / f"{name}.py").exists(), name


def test_faults_have_names_of_their_own():
  assert len({mutant["name"] for mutant in MUTANTS}) == len(MUTANTS)
