"""Applies small faults to the sources, one at a time, and lists those that the tests do not detect.

python scripts/mutation_check.py --out build/mutants.jsonl
python scripts/mutation_check.py --only cc/ --tests quick --hinted-only
python scripts/mutation_check.py --list

The faults ("mutants") are in scripts/mutants.toml. They are applied to a clone of the repository at
a committed revision, with an environment and a CPU build of its own: your working tree stays as it
is. For each mutant, the test files that its entry names run first, and then all tests, until one
fails.

The tests of the revision itself must pass. They are not run without a mutant, and a test that
always fails would seem to detect every mutant.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Without PYTHONPATH, which could name the working tree.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"JAX_MAGI_CUDA": "OFF"}
SET_UP = (sys.executable, "dev.py", "test", "--collect-only", "-q")
BUILD = (sys.executable, "-c", "import dev; dev.set_up('dev')")
PYTEST = (".venv/bin/python", "-m", "pytest")
# The first test that pytest's summary names, without the message behind it.
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::\S+?(?:\[.*?\])?|\S+)(?= - |$)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Mutant:
  """A fault. See mutants.toml for the fields."""

  name: str
  file: str
  old: str
  new: str
  breaks: str
  tests: tuple[str, ...]

  @property
  def needs_build(self) -> bool:
    """Whether it is in C++."""
    return self.file.startswith("cc/")


def run(folder: Path, *command: object) -> str:
  """Runs a command in a folder and returns what it prints; a failure ends the program."""
  words = [str(word) for word in command]
  done = subprocess.run(words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
  if done.returncode:
    sys.exit(f"{' '.join(words)} failed in {folder}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
  return done.stdout


def restore(folder: Path) -> None:
  """Undoes a mutant, and forgets what Hypothesis found with it: the next one gets no hints."""
  run(folder, "git", "checkout", "--quiet", "--", ".")
  shutil.rmtree(folder / ".hypothesis", ignore_errors=True)


def clone(folder: Path, revision: str) -> None:
  """Makes a clone at a revision, or takes the one that is there."""
  if not (folder / ".git").exists():
    run(ROOT, "git", "clone", "--quiet", ROOT, folder)
  run(folder, "git", "fetch", "--quiet", "origin")
  restore(folder)
  run(folder, "git", "checkout", "--quiet", "--detach", revision)


def check_texts(folder: Path, mutants: Sequence[Mutant]) -> None:
  """Ends the program unless the text that each mutant replaces is there once."""
  for mutant in mutants:
    path = folder / mutant.file
    count = path.read_text().count(mutant.old) if path.exists() else 0
    if count != 1:
      sys.exit(f"{mutant.name!r}: its text must be in {mutant.file} once, but is {count} times")


def run_tests(folder: Path, arguments: Sequence[str], end: float) -> tuple[str, str]:
  """Runs pytest until a test fails, or until the time `end`: the outcome, and that test."""
  command = [*PYTEST, "-x", "-q", "-n", "2", *arguments]
  with tempfile.TemporaryFile("w+") as log:
    process = subprocess.Popen(
      command, cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
    )
    try:
      status = process.wait(max(end - time.monotonic(), 1.0))
    except subprocess.TimeoutExpired:
      return "hangs", ""
    finally:
      if process.poll() is None:  # Workers, too, which are of the same group.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    log.seek(0)
    output = log.read()
  # With workers, pytest's status is 2 where -x stopped it.
  if status in (1, 2) and (failed := FAILED.search(output)):
    return "caught", failed[1]
  if "Not properly terminated" in output:  # Before any test: pytest then only says that none ran.
    return "caught", "a crash of pytest's worker"
  if status in (0, 5):  # Nothing failed, or there was nothing to run.
    return "missed", ""
  return "unclear", f"pytest's exit status is {status}: {output.strip()[-300:]}"


def selection(folder: Path, tests: str) -> list[str]:
  """Pytest's options for "quick" or "all". Pytest refuses a marker that the revision has not."""
  is_there = tests == "quick" and "@pytest.mark.long:" in run(folder, *PYTEST, "--markers")
  return ["-m", "not long"] if is_there else []


def check(
  mutant: Mutant, folder: Path, selected: list[str], options: argparse.Namespace, *, build: bool
) -> dict[str, Any]:
  """Applies a mutant, runs tests and restores the clone.

  Args:
    mutant: the fault.
    folder: the clone.
    selected: pytest's options that select tests.
    options: those of the command line.
    build: whether the kernels have to be built first.
  """
  begin = time.monotonic()
  path = folder / mutant.file
  path.write_text(path.read_text().replace(mutant.old, mutant.new))
  files = [f"tests/{name}.py" for name in mutant.tests]
  hinted = [file for file in files if (folder / file).exists()]
  runs = ([hinted] if hinted else []) + ([] if options.hinted_only else [[]])
  outcome, by = "unclear", "none of its test files is there"
  try:
    if build:
      run(folder, *BUILD)
    end = time.monotonic() + options.timeout
    for chosen in runs:
      outcome, by = run_tests(folder, [*chosen, *selected], end)
      if outcome != "missed":
        break
  finally:
    restore(folder)
  seconds = round(time.monotonic() - begin, 1)
  return {"name": mutant.name, "file": mutant.file, "outcome": outcome, "by": by, "s": seconds}


def line_of(record: dict[str, Any]) -> str:
  """A record, as it is printed."""
  by = f"\n{'':17}{record['by']}" if record["by"] else ""
  return f"{record['outcome']:8}{record['s']:6.0f} s  {record['name']} ({record['file']}){by}"


def main() -> int:
  """Checks all, and returns the exit status: 1 if the tests do not notice one."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--revision", default="HEAD", help="the commit to check (HEAD)")
  add("--folder", type=Path, help="the clone's folder (build/mutation/REVISION)")
  add("--only", default="", metavar="TEXT", help="only mutants with TEXT in their name or file")
  add("--tests", choices=["quick", "all"], default="all", help="quick leaves out tests marked long")
  add("--hinted-only", action="store_true", help="only run the test files that a mutant names")
  add("--timeout", type=float, default=3600.0, help="seconds for the tests of a mutant (3600)")
  add("--out", type=Path, help="JSON lines; mutants that are in the file already are not run again")
  add("--list", action="store_true", help="list the mutants, and run nothing")
  options = parser.parse_args()
  table = tomllib.loads((ROOT / "scripts" / "mutants.toml").read_text())["mutant"]
  mutants = [Mutant(**entry) for entry in table]
  mutants = [m for m in mutants if options.only in m.name or options.only in m.file]
  if options.list:
    print(*(f"{m.file}\n  {m.name}\n  {m.breaks}" for m in mutants), sep="\n")
    return 0

  commit = f"{options.revision}^{{commit}}"
  revision = run(ROOT, "git", "rev-parse", "--short=10", "--verify", commit).strip()
  how = {"revision": revision, "tests": options.tests, "hinted_only": options.hinted_only}
  lines = options.out.read_text().splitlines() if options.out and options.out.exists() else []
  records = [record for record in map(json.loads, lines) if how.items() <= record.items()]
  done = {record["name"] for record in records}
  folder = (options.folder or ROOT / "build" / "mutation" / revision).resolve()
  clone(folder, revision)
  check_texts(folder, mutants)
  print(f"setting up {folder}", flush=True)
  run(folder, *SET_UP)  # It also builds anew what a call that was stopped left behind.
  selected = selection(folder, options.tests)
  is_stale = False  # Whether the last build is that of a mutant.
  for mutant in mutants:
    if mutant.name in done:
      continue
    build = mutant.needs_build or is_stale
    records.append(record := check(mutant, folder, selected, options, build=build) | how)
    is_stale = mutant.needs_build
    print(line_of(record), flush=True)
    if options.out:
      options.out.parent.mkdir(parents=True, exist_ok=True)
      with options.out.open("a") as out:
        print(json.dumps(record), file=out)

  records = [record for record in records if record["name"] in {m.name for m in mutants}]
  counts = collections.Counter(record["outcome"] for record in records)
  print(*map(line_of, sorted(records, key=lambda record: record["outcome"])), sep="\n")
  unclear = f", {counts['unclear']} unclear" if counts["unclear"] else ""
  num_noticed = counts["caught"] + counts["hangs"]  # A hang is noticed, too.
  print(f"{len(records)} mutants: {num_noticed} caught, {counts['missed']} missed{unclear}")
  return 0 if num_noticed == len(records) else 1


if __name__ == "__main__":
  sys.exit(main())
