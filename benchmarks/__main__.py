"""Runs benchmarks, one after another, and collects figures and plots.

python -m benchmarks                       all that this machine can run
python -m benchmarks attention softmax     some
python -m benchmarks --quick               fewer lengths and steps, to see that it runs

Each part runs in a separate process, so that it has the whole device. Its output goes to PART.log
in the folder, its plots to PART*.png, and all figures to results.json, with device, versions and
commit. Attention is timed against the baselines that this machine has (peers.py). Missing baselines
are listed, with the reason.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from benchmarks import peer_report

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Part:
  """A benchmark.

  Attributes:
    commands: modules with their arguments. {json} and {plot} are replaced by files of this part.
    on_cpu: further arguments of each command on a CPU. None if the part needs a GPU.
    quick: further arguments of the first command with --quick.
    quick_on_cpu: whether `quick` also applies on a CPU.
  """

  commands: tuple[str, ...]
  on_cpu: str | None = ""
  quick: str = ""
  quick_on_cpu: bool = True


PARTS = {
  "attention": Part(
    ("benchmarks.attention --json {json} --plot {plot}",),
    quick="--lengths 2048 8192",
    quick_on_cpu=False,
  ),
  "softmax": Part(("benchmarks.softmax --json {json} --plot {plot}",)),
  "context_parallel": Part(
    (
      "benchmarks.context_parallel measure --json {json}",
      "benchmarks.context_parallel predict --json {json} --plot {plot}",
    ),
    on_cpu=None,
    quick="--sizes 8",
  ),
  "overlap": Part(("benchmarks.overlap --json {json} --plot {plot}",), on_cpu=None, quick="--few"),
  "train_step": Part(
    ("benchmarks.train_step --json {json} --plot {plot}",), on_cpu="--tiny", quick="--steps 4"
  ),
}


class Bar:
  """A progress bar of parts, with the last line that the running part printed."""

  def __init__(self, total: int):
    self._total, self._start = total, time.monotonic()
    self._is_terminal = sys.stdout.isatty()

  def show(self, done: int, name: str, text: str = "", *, is_end: bool = False) -> None:
    """Draws the bar. If the output is no terminal, prints only the ends of parts."""
    if not self._is_terminal and not is_end:
      return
    minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
    bar = "#" * done + "." * (self._total - done)
    line = f"[{bar}] {done}/{self._total} {minutes}:{seconds:02} {name}: {text}"[:100]
    print(f"\r{line:100}" if self._is_terminal else line, end="\n" if is_end else "", flush=True)


def run_part(part: Part, name: str, folder: Path, *, is_gpu: bool, quick: bool, show) -> dict:
  """Runs a part, and returns its figures, or the reason why there are none."""
  if part.on_cpu is None and not is_gpu:
    return {"skipped": "needs an NVIDIA Hopper GPU"}
  files = {"json": folder / f"{name}.json", "plot": folder / f"{name}.png"}
  files["json"].unlink(missing_ok=True)  # Figures of another day are worse than none.
  start = time.monotonic()
  with (folder / f"{name}.log").open("w") as log:
    for number, command in enumerate(part.commands):
      words = [word.format(**files) for word in command.split()]
      if not is_gpu:
        words += (part.on_cpu or "").split()
      if quick and number == 0 and (is_gpu or part.quick_on_cpu):
        words += part.quick.split()
      error = _run([sys.executable, "-m", *words], log, show)
      if error is not None:
        return {"failed": error}
  figures = json.loads(files["json"].read_text())
  files["json"].unlink()  # They are in the common file.
  return {"seconds": round(time.monotonic() - start, 1), "figures": figures}


def _run(command: list[str], log: IO[str], show) -> str | None:
  """Runs a command. If it failed, returns the end of its output."""
  last = collections.deque(maxlen=5)
  process = subprocess.Popen(
    command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  )
  assert process.stdout is not None
  for line in process.stdout:
    log.write(line)
    log.flush()
    last.append(line)
    show(line.strip())
  return None if process.wait() == 0 else f"exit status {process.returncode}: {''.join(last)}"


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command, and returns its exit status: 0, or 1 if a part failed."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
  parser.add_argument("--out", type=Path, default=ROOT / "out" / "benchmarks", help="output folder")
  parser.add_argument("--quick", action="store_true", help="use fewer lengths and steps")
  options = parser.parse_args(arguments)
  for name in options.parts:
    if name not in PARTS:
      parser.error(f"PART must be one of {', '.join(PARTS)}, got {name}")
  folder = options.out.resolve()
  folder.mkdir(parents=True, exist_ok=True)
  # In another process: one that has JAX's devices keeps their memory.
  described = subprocess.run(
    [sys.executable, "-m", "benchmarks.machine"], cwd=ROOT, check=True, stdout=subprocess.PIPE
  )
  results = json.loads(described.stdout)
  results["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
  results["is_quick"] = options.quick
  results["parts"] = {}
  names = options.parts or list(PARTS)
  bar = Bar(len(names))
  for number, name in enumerate(names):

    def show(text, number=number, name=name):
      bar.show(number, name, text)

    show("starts")
    is_gpu = results["platform"] == "gpu"
    result = run_part(PARTS[name], name, folder, is_gpu=is_gpu, quick=options.quick, show=show)
    results["parts"][name] = result
    # After each part, so that an end before its time loses nothing.
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    end = f"{result['seconds']} s" if "seconds" in result else " ".join(map(str, *result.items()))
    bar.show(number + 1, name, end.replace("\n", " "), is_end=True)
    for line in peer_report.lines(result.get("figures", {})):
      print(line)
  print(f"figures: {folder / 'results.json'}")
  return 1 if any("failed" in result for result in results["parts"].values()) else 0


if __name__ == "__main__":
  sys.exit(main())
