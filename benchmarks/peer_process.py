"""A process for one peer: `python -m benchmarks.peer_process NAME`.

Each line of its input is a question, a JSON object. Each line of its output is the answer.
"""

from __future__ import annotations

import json
import os
import sys

from benchmarks.beside import timed
from benchmarks.peers import PEERS, Cell


def main(name: str) -> None:
  """Answers until the input ends."""
  # Answers have a stream of their own: what libraries print is not among them.
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  (peer,) = (peer for peer in PEERS if peer.name == name)
  for line in sys.stdin:
    question = json.loads(line)
    if "absence" in question:
      answer = {"absence": peer.absence()}
    else:
      answer = timed(peer, Cell.from_json(question["cell"]))
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
  main(sys.argv[1])
