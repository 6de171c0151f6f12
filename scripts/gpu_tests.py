"""Runs the GPU tests and the sanitizers in parallel, and prints one table: see `dev.py gpu`.

Each result is written to build/gpu_tests/results.jsonl as it comes, so a call that is cut short
keeps what it has done. The next call runs the tests that failed or have no result for the same
build. The exit status is 1 if anything failed, and 2 if nothing failed but something was not run.

This file is also the pytest plugin that writes the results.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("CMakeLists.txt", "cc", "jax_magi", "tests")
# Tests in one process. With more, the last process would run alone for long; with fewer, most of
# the time would go to starting processes.
MAX_GROUP, MIN_GROUP = 40, 5
TEST_LIMIT_S = 300  # A test that takes longer hangs.
OUTCOMES = ("passed", "failed", "skipped", "not run")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CASES = (  # Names in tests/sanitizer_cases.py, or beginnings of several: one of every family.
  "attention-64-64-uneven",
  "attention-128-128-causal",
  "attention-192-128-uneven",
  "attention-256-256-uneven",
  "attention-64-64-uneven-deterministic",
  "attention-128-128-softcap",
  "attention-128-128-parts",
  "attention-128-128-clusters",
  "attention-128-128-forward-clusters-uneven",
  "attention-batch",
  "attention-forged-list",
  "stages-128-uneven",
  "stages-128-head_cuts",
  "bias-128-aligned-hqk_bias",
  "bias-64-uneven-1qk_bias",
  "bias-64-uneven-h1k_bias-alibi",
  "bias-64-uneven-no_bias-alibi",
  "bias-192-aligned-hqk_bias",
  "bias-256-uneven-h1k_bias",
  "softmax-1000-bf16",
)
# In the output of a process that died: frames of pytest itself, and a long list of modules.
NOISE = ("/_pytest/", "/pytest/", "/pluggy/", "<frozen runpy>", "Extension modules:")
# Environment variables that choose kernels: results are kept apart. See CONTRIBUTING.md.
KERNELS = ("JAX_MAGI_TEST_ARCHITECTURE", "JAX_MAGI_SHARED_MEMORY_KB")
# For references in NumPy, in many processes. Its threads made a suite take more than twice as long.
# tests/conftest.py is too late to set their number if a plugin of pytest has imported NumPy. And
# glibc would give the memory of large arrays back, and get it anew for the next one, which took up
# to half of the time of a reference.
FOR_NUMPY = {
  "OPENBLAS_NUM_THREADS": "1",
  "MALLOC_MMAP_MAX_": "0",
  "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
  "MALLOC_TOP_PAD_": str(64 << 20),
}
UNSUPPORTED = "Device not supported"  # What compute-sanitizer says on some virtual machines.
PROBE = """
import json, jax, jax_magi
from jax_magi._src.native.backends import CUDA
gpus = [d.device_kind for d in jax.devices() if d.platform == "gpu"]
left_out = "all" if CUDA.module is None else CUDA.module.LEFT_OUT
print(json.dumps([gpus, left_out, jax.__version__, jax_magi.__file__]))
"""


class Results(NamedTuple):
  """The file of results, one JSON object per line; `call` marks the lines of one call."""

  path: Path
  build: str
  call: str

  def append(self, test: str, outcome: str, seconds: float = 0.0, message: str = "") -> None:
    """Writes a line at once: several processes append to the file, and any may be killed."""
    line = {"id": test, "outcome": outcome, "seconds": round(seconds, 2), "build": self.build}
    data = json.dumps({**line, "call": self.call, "message": message[-2000:]}) + "\n"
    file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, data.encode())
    os.close(file)

  def lines(self) -> list[dict]:
    """All lines, of other builds too."""
    lines = self.path.read_text().split("\n")[:-1] if self.path.exists() else []
    return [json.loads(line) for line in lines]

  def final(self) -> dict[str, dict]:
    """The last result of each test of this build."""
    lines = (line for line in self.lines() if line["build"] == self.build)
    return {line["id"]: line for line in lines if line["outcome"] != "started"}

  def of_this_call(self) -> dict[str, str]:
    """The outcome of each test that this call has run; "started" if it has none."""
    return {line["id"]: line["outcome"] for line in self.lines() if line["call"] == self.call}


class Recorder:
  """A pytest plugin that writes the result of each test, and ends the process if a test hangs."""

  def __init__(self, results: Results):
    self._results = results

  def pytest_runtest_logstart(self, nodeid):
    """Before a test."""
    self._outcome, self._seconds, self._message = "passed", 0.0, ""
    self._results.append(nodeid, "started")
    faulthandler.dump_traceback_later(TEST_LIMIT_S, exit=True)

  def pytest_runtest_logreport(self, report):
    """After each of setup, call and teardown."""
    self._seconds += report.duration
    if self._outcome == "passed" or (self._outcome == "skipped" and report.failed):
      self._outcome, self._message = report.outcome, report.longreprtext

  def pytest_runtest_logfinish(self, nodeid):
    """After a test."""
    faulthandler.cancel_dump_traceback_later()
    self._results.append(nodeid, self._outcome, self._seconds, self._message)


def pytest_addoption(parser):
  """Adds the option that `test_jobs` uses."""
  parser.addoption("--record", nargs=3, help="the fields of Results")


def pytest_configure(config):
  """Starts the recording."""
  if config.option.record:
    path, build, call = config.option.record
    config.pluginmanager.register(Recorder(Results(Path(path), build, call)))


class Job(NamedTuple):
  """A process: a group of tests, or one case under a sanitizer."""

  tests: list[str]
  command: list[str]  # Of pytest, without the tests.
  is_pytest: bool = False


class Running(NamedTuple):
  """A job that was started, and where its output goes."""

  job: Job
  process: subprocess.Popen
  log: Path
  start_s: float


def environment() -> dict[str, str]:
  """The environment of all processes. An installed package comes before the repository's root."""
  paths = [os.environ.get("PYTHONPATH"), ROOT, ROOT / "scripts"]
  return {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
    "PYTHONSAFEPATH": "1",  # Without it, the current folder would come first.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # Several processes share the GPU's memory.
    **FOR_NUMPY,
  }


def test_command(*arguments: str) -> list[str]:
  """A call of pytest."""
  # By default, pytest would put the repository's root before an installed package.
  options = ("-p", "gpu_tests", "-p", "no:cacheprovider", "--import-mode=append", "--quiet")
  return [sys.executable, "-m", "pytest", *options, *arguments]


def collect(root: Path, *arguments: str) -> list[str]:
  """The ids of the tests that pytest finds with these arguments."""
  command = test_command("--collect-only", "--disable-warnings", *arguments)
  done = subprocess.run(command, cwd=root, env=environment(), capture_output=True, text=True)
  if done.returncode not in (0, 5):  # 5: there are none.
    sys.exit(f"pytest cannot collect the tests:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
  return [line for line in done.stdout.splitlines() if "::" in line]


def test_jobs(tests: list[str], results: Results, num_processes: int) -> list[Job]:
  """Groups of neighbours, which share compiled programs; what takes longest comes first."""
  most = min(MAX_GROUP, max(MIN_GROUP, math.ceil(len(tests) / num_processes)))
  record = ("--record", str(results.path), results.build, results.call)
  command = test_command("--capture=no", "--tb=short", *record)
  groups = []
  for _, neighbours in itertools.groupby(tests, key=lambda test: test.split("::")[0]):
    found = list(neighbours)
    size = math.ceil(len(found) / math.ceil(len(found) / most))
    groups += [found[i : i + size] for i in range(0, len(found), size)]
  seconds = {line["id"]: line["seconds"] for line in results.lines() if line["seconds"]}
  groups.sort(key=lambda group: -sum(seconds.get(test, 1.0) for test in group))
  return [Job(group, command, is_pytest=True) for group in groups]


def sanitizer_jobs(program: str | None) -> list[Job]:
  """Every tool with every case; without a command where compute-sanitizer is not installed."""
  # Each array gets its own memory: in a pool, an access past its end would hit another one.
  # XLA compares kernels on buffers that nobody wrote, which initcheck would report.
  flags = f"XLA_FLAGS={os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
  command = ["env", "XLA_PYTHON_CLIENT_ALLOCATOR=platform", flags, str(program)]
  command += ["--error-exitcode", "1"]
  module = [sys.executable, "-m", "tests.sanitizer_cases", "--only"]
  # Faster, but initcheck has to see the kernels of XLA write what ours read.
  ours = {tool: [] if tool == "initcheck" else ["--kernel-name", "kns=jax_magi"] for tool in TOOLS}
  return [
    Job(
      [f"{tool} {case}"], [*command, "--tool", tool, *ours[tool], *module, case] if program else []
    )
    for case, tool in itertools.product(CASES, TOOLS)
  ]


def start(job: Job, log: Path, root: Path) -> Running:
  """Starts a process in a separate group, so that it can be killed with its children."""
  command = [*job.command, *job.tests] if job.is_pytest else job.command
  log.parent.mkdir(exist_ok=True)
  with log.open("w") as out:
    process = subprocess.Popen(
      command, cwd=root, env=environment(), process_group=0, stdout=out, stderr=out
    )
  return Running(job, process, log, time.monotonic())


def finish(ended: Running, results: Results) -> list[Job]:
  """Writes the results that an ended process did not write, and returns what it did not reach."""
  job, seconds = ended.job, time.monotonic() - ended.start_s
  text, status = ended.log.read_text(errors="replace"), ended.process.returncode
  output = [line for line in text.splitlines() if not any(noise in line for noise in NOISE)]
  # A sanitizer may print many reports, and a process it ends a traceback: repeat the first report.
  reports = [] if job.is_pytest else [line for line in output if line.startswith("=========")][:6]
  message = "\n".join([*output, *reports, f"The process ended with status {status}."])
  if not job.is_pytest:
    if UNSUPPORTED in text:
      print(f"{job.tests[0]}: not run (compute-sanitizer does not support this device)")
    else:
      results.append(job.tests[0], "failed" if status else "passed", seconds, message)
    return []
  reached = results.of_this_call()
  rest = [test for test in job.tests if test not in reached]
  # The test that was running is to blame. If none was, each of them would end like this.
  blamed = [test for test in job.tests if reached.get(test) == "started"]
  if len(rest) == len(job.tests):
    blamed, rest = rest, []
  for test in blamed:
    results.append(test, "failed", message=message)
  return [job._replace(tests=rest)] if rest else []


class Limits(NamedTuple):
  """How many processes run at a time, and when to stop."""

  num_processes: int
  is_over: Callable[[], bool]


def run_jobs(jobs: Iterable[Job], results: Results, root: Path, limits: Limits) -> None:
  """Runs jobs until all have ended or the time is over."""
  waiting, running = collections.deque(jobs), list[Running]()
  logs = (results.path.parent / "logs" / f"{number}.txt" for number in itertools.count())
  try:
    while (waiting or running) and not limits.is_over():
      while waiting and len(running) < limits.num_processes:
        running.append(start(waiting.popleft(), next(logs), root))
      time.sleep(0.05)
      for ended in [one for one in running if one.process.poll() is not None]:
        running.remove(ended)
        waiting.extendleft(finish(ended, results))
        name = ended.job.tests[0].split("::")[0]
        print(f"ended: {name}; {len(waiting) + len(running)} processes left")
  finally:
    for one in running:
      os.killpg(one.process.pid, signal.SIGKILL)
    for one in running:
      one.process.wait()


def report(tests: Iterable[str], final: dict[str, dict]) -> int:
  """Prints the table and the failures, and returns the exit status."""
  rows: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
  total: collections.Counter = collections.Counter()
  failures = []
  for test in tests:
    result = final.get(test, {"outcome": "not run", "seconds": 0.0})
    for row in (rows[test.split("::")[0]], total):
      row.update({result["outcome"]: 1, "seconds": result["seconds"]})
    if result["outcome"] == "failed":
      failures.append((test, result["message"].strip().splitlines()[-8:]))
  width = max(map(len, [*rows, "total"]))
  print("\n" + " " * width, *(f"{column:>8}" for column in (*OUTCOMES, "seconds")))
  for name, row in [*rows.items(), ("total", total)]:
    print(f"{name:{width}}", *(f"{row[o]:8}" for o in OUTCOMES), f"{row['seconds']:8.1f}")
  for test, message in failures:
    print(f"\nFAILED {test}", *message, sep="\n  ")
  return 1 if failures else 2 if total["not run"] or not rows else 0


def run_all(
  tests: list[str], sanitizers: list[Job], results: Results, root: Path, limits: Limits
) -> int:
  """Runs what failed or has no result, prints the table, and returns the exit status."""
  done = {test for test, line in results.final().items() if line["outcome"] != "failed"}
  jobs = test_jobs([test for test in tests if test not in done], results, limits.num_processes)
  jobs += [job for job in sanitizers if job.command and job.tests[0] not in done]
  try:
    run_jobs(jobs, results, root, limits)
  except KeyboardInterrupt:
    print("interrupted")
  return report([*tests, *(job.tests[0] for job in sanitizers)], results.final())


def digest_of(root: Path, *words: str) -> str:
  """A digest of the sources, and of words about the build."""
  digest = hashlib.sha256(repr(words).encode())
  for file in sorted(f for name in SOURCES for f in [root / name, *(root / name).rglob("*")]):
    if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so":
      digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
  return digest.hexdigest()[:12]


def parse() -> argparse.Namespace:
  """The command line."""
  parser = argparse.ArgumentParser(prog="dev.py gpu", description=__doc__.splitlines()[0])
  parser.add_argument("--limit-s", type=float, default=540, help="seconds, without the build (540)")
  processes = max(1, min(14, (os.cpu_count() or 1) - 2))  # They share the GPU's memory.
  parser.add_argument("--processes", type=int, default=processes, help=f"parallel ({processes})")
  parser.add_argument(
    "--only", nargs="+", default=[""], help="run the tests and cases whose id contains any of these"
  )
  parser.add_argument("--again", action="store_true", help="forget earlier results")
  return parser.parse_args()


def main() -> int:
  """Entry point; returns the exit status."""
  options, start_s = parse(), time.monotonic()
  sys.stdout.reconfigure(line_buffering=True)  # A call that is killed has shown how far it came.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  probe = subprocess.check_output([sys.executable, "-c", PROBE], env=environment(), text=True)
  gpus, left_out, jax_version, package = json.loads(probe.splitlines()[-1])
  if not gpus or left_out == "all":
    what = "this build of jax_magi has no CUDA kernels" if gpus else "JAX sees no GPU"
    print(f"Nothing was run: {what}.")
    return 2
  path = ROOT / "build" / "gpu_tests" / "results.jsonl"
  path.parent.mkdir(parents=True, exist_ok=True)
  kernels = [f"{name}={os.environ[name]}" for name in KERNELS if name in os.environ]
  build = digest_of(ROOT, left_out, jax_version, *kernels)
  results = Results(path, build, str(time.time_ns()))
  if options.again:
    path.unlink(missing_ok=True)
  print(", ".join([gpus[0], f"JAX {jax_version}", f"{package} (build {results.build})", *kernels]))
  program = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")

  def is_wanted(name: str) -> bool:
    return any(text in name for text in options.only)

  tests = [test for test in collect(ROOT, "-m", "gpu") if is_wanted(test)]
  sanitizers = [job for job in sanitizer_jobs(program) if is_wanted(job.tests[0])]
  print(f"{len(tests)} tests and {len(sanitizers)} sanitizer runs; limit {options.limit_s:.0f} s")
  limits = Limits(options.processes, lambda: time.monotonic() - start_s > options.limit_s)
  status = run_all(tests, sanitizers, results, ROOT, limits)
  if sanitizers and not program:
    print("\nsanitizers: not run (compute-sanitizer is not installed)")
  print(f"\n{time.monotonic() - start_s:.0f} s of {options.limit_s:.0f} s; results: {path}")
  return status


if __name__ == "__main__":
  sys.exit(main())
