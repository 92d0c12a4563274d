"""Joins the files of answers.py: `python experiments/smollm2/join.py OUT FILE...`.

Ten answers that stand beside each other have similar lengths, so that rows that are read together need little padding;
the tens are in a random order. A training holds out every tenth of the first answers, here the longest of each ten.
"""

import json
import random
import sys
from pathlib import Path

TOGETHER = 10

if __name__ == "__main__":
    out, *files = map(Path, sys.argv[1:])
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    lines.sort(key=lambda line: sum(len(json.loads(line)[name]) for name in ("prompt", "answer")))
    tens = [lines[begin : begin + TOGETHER] for begin in range(0, len(lines), TOGETHER)]
    random.Random(0).shuffle(tens)
    out.write_text("".join(f"{line}\n" for ten in tens for line in ten), encoding="utf-8")
    print(f"{len(lines)} answers in {out}")
