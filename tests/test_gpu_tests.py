"""The runner of the GPU tests, on a small separate project that needs no GPU."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests import sanitizer_cases

ROOT = Path(__file__).resolve().parent.parent
PROJECT = {
  "pytest.ini": "[pytest]\n",
  "test_mixed.py": """
import pathlib
import pytest

def test_passes():
  pass

@pytest.mark.skip
def test_is_skipped():
  pass

def test_fails_until_mended():
  assert pathlib.Path("mended").exists(), "not mended"
""",
  "test_slow.py": """
import pathlib
import time

def test_before():
  pass

def test_slow():
  if not pathlib.Path("mended").exists():
    pathlib.Path("slow_started").touch()
    time.sleep(600)

def test_after():
  pass
""",
  "test_crash.py": """
import os

def test_before():
  pass

def test_crash():
  print("last words", flush=True)
  os.abort()

def test_after():
  pass
""",
}


def _load():
  spec = importlib.util.spec_from_file_location("gpu_tests", ROOT / "scripts" / "gpu_tests.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


gpu_tests = _load()


@pytest.fixture
def project(tmp_path, monkeypatch):
  monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # It starts faster.
  for name, text in PROJECT.items():
    (tmp_path / name).write_text(text)
  return tmp_path


def _results(project, call):
  return gpu_tests.Results(project / "results.jsonl", "this build", call)


def _run(project, call, tests, sanitizers=(), is_over=lambda: False):
  """One call; returns its exit status and the tests that it ran."""
  results = _results(project, call)
  limits = gpu_tests.Limits(2, is_over)
  status = gpu_tests.run_all(tests, sanitizers, results, project, limits)
  return status, sorted(results.of_this_call())


def _row(text, name):
  """The numbers of tests that passed, failed, were skipped, and were not run."""
  (row,) = re.findall(rf"^{re.escape(name)}((?: +\d+){{4}}) +[\d.]+$", text, re.MULTILINE)
  return [int(number) for number in row.split()]


def test_results_outlast_the_limit_and_the_next_call_continues(project, capsys):
  tests = [f"test_slow.py::test_{name}" for name in ("before", "slow", "after")]
  status, _ = _run(project, "first", tests, is_over=(project / "slow_started").exists)
  assert status == 2
  assert _row(capsys.readouterr().out, "test_slow.py") == [1, 0, 0, 2]
  (project / "mended").touch()
  status, ran = _run(project, "second", tests)
  assert status == 0
  assert ran == ["test_slow.py::test_after", "test_slow.py::test_slow"]
  assert _row(capsys.readouterr().out, "total") == [3, 0, 0, 0]


def test_failed_tests_run_again(project, capsys):
  tests = gpu_tests.collect(project, "test_mixed.py")
  assert [test.split("::test_")[1] for test in tests] == [
    "passes",
    "is_skipped",
    "fails_until_mended",
  ]
  status, ran = _run(project, "first", tests)
  assert (status, ran) == (1, sorted(tests))
  text = capsys.readouterr().out
  assert _row(text, "test_mixed.py") == [1, 1, 1, 0]
  assert "FAILED test_mixed.py::test_fails_until_mended" in text
  assert "AssertionError: not mended" in text
  (project / "mended").touch()
  status, ran = _run(project, "second", tests)
  assert (status, ran) == (0, ["test_mixed.py::test_fails_until_mended"])
  assert _row(capsys.readouterr().out, "test_mixed.py") == [2, 0, 1, 0]


def test_a_crash_fails_one_test_and_the_rest_are_run(project, capsys):
  tests = [f"test_crash.py::test_{name}" for name in ("before", "crash", "after")]
  assert _run(project, "first", tests)[0] == 1
  text = capsys.readouterr().out
  assert _row(text, "test_crash.py") == [2, 1, 0, 0]
  assert "FAILED test_crash.py::test_crash" in text
  assert "ended with status -6" in text
  final = _results(project, "first").final()
  assert "last words" in final["test_crash.py::test_crash"]["message"]


def test_results_of_another_build_do_not_count(project, capsys):
  tests = ["test_mixed.py::test_passes"]
  _results(project, "first")._replace(build="other build").append(*tests, "passed")
  assert _run(project, "second", tests, is_over=lambda: True)[0] == 2
  assert _row(capsys.readouterr().out, "total") == [0, 0, 0, 1]


def test_sanitizers_have_rows(project, capsys):
  def job(name, program):
    return gpu_tests.Job([f"memcheck {name}"], [sys.executable, "-c", program])

  unsupported = f"import sys; print({gpu_tests.UNSUPPORTED!r}); sys.exit(1)"
  programs = {"right": "", "wrong": "import sys; sys.exit('an error')", "unsupported": unsupported}
  status, _ = _run(project, "first", [], [job(*item) for item in programs.items()])
  text = capsys.readouterr().out
  assert status == 1
  assert _row(text, "memcheck right") == [1, 0, 0, 0]
  assert _row(text, "memcheck wrong") == [0, 1, 0, 0]
  assert _row(text, "memcheck unsupported") == [0, 0, 0, 1]
  assert "an error" in text


def test_first_report_of_a_sanitizer_is_shown(project, capsys):
  program = """
import sys
print("========= COMPUTE-SANITIZER", "========= Barrier error", sep="\\n")
print(*(f"========= later {i}" for i in range(999)), sep="\\n")
sys.exit(1)
"""
  job = gpu_tests.Job(["synccheck many"], [sys.executable, "-c", program])
  assert _run(project, "first", [], [job])[0] == 1
  assert "Barrier error" in capsys.readouterr().out


def test_sanitizers_that_are_not_installed_are_not_run(project, capsys):
  sanitizers = gpu_tests.sanitizer_jobs(program=None)
  assert _run(project, "first", [], sanitizers) == (2, [])
  assert _row(capsys.readouterr().out, "total") == [0, 0, 0, len(sanitizers)]


def test_every_tool_runs_every_sanitizer_case():
  """initcheck with XLA's kernels, which write what ours read."""
  jobs = {job.tests[0]: job.command for job in gpu_tests.sanitizer_jobs("compute-sanitizer")}
  tools = ("memcheck", "racecheck", "initcheck", "synccheck")
  assert set(jobs) == {f"{tool} {case}" for tool in tools for case in gpu_tests.CASES}
  for name, command in jobs.items():
    assert ("--kernel-name" not in command) == name.startswith("initcheck")


@pytest.mark.parametrize("name", gpu_tests.CASES)
def test_sanitizer_cases_exist(name):
  assert any(name in case for case, _ in sanitizer_cases._cases())


def test_groups_are_neighbours_and_the_longest_come_first(tmp_path):
  results = _results(tmp_path, "first")
  many = [f"test_many.py::test_{i}" for i in range(gpu_tests.MAX_GROUP + 2)]
  few = ["test_few.py::test_quick", "test_few.py::test_long"]
  results.append("test_few.py::test_long", "passed", seconds=1000)
  groups = [job.tests for job in gpu_tests.test_jobs([*many, *few], results, num_processes=1)]
  half = len(many) // 2
  assert groups == [few, many[:half], many[half:]]


def test_few_tests_are_spread_over_the_processes(tmp_path):
  tests = [f"test_one.py::test_{i}" for i in range(28)]
  jobs = gpu_tests.test_jobs(tests, _results(tmp_path, "first"), num_processes=14)
  assert [len(job.tests) for job in jobs] == [5, 5, 5, 5, 5, 3]


def test_digest_is_of_sources_and_build(tmp_path):
  source = tmp_path / "cc" / "kernel.cu"
  source.parent.mkdir()
  source.write_text("old")
  first = gpu_tests.digest_of(tmp_path, "all variants")
  assert gpu_tests.digest_of(tmp_path, "all variants") == first
  assert gpu_tests.digest_of(tmp_path, "one variant") != first
  source.write_text("new")
  assert gpu_tests.digest_of(tmp_path, "all variants") != first
