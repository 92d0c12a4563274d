"""Whether a prompt of a head's training has words of a question that the head is measured on.

python experiments/smollm2/overlap.py questions FILE...        # of Spec-Bench, MT-bench, GSM8K and HumanEval
python experiments/smollm2/overlap.py prompts train.jsonl      # of the training

Each writes NAME.sketch beside this file: hashes of some runs of 13 words, chosen so that two texts that share 28 words
in a row share a hash (winnowing, Schleimer, Wilkerson and Aiken 2003). A text of fewer than 13 words has one, of all.
`common` compares the two files. No text is stored.
"""

import gzip
import hashlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RUN, WINDOW = 13, 16  # words of a hash, and hashes of which the least is kept
BYTES = 4  # of a hash
HERE = Path(__file__).resolve().parent
FIELDS = ("turns", "question", "prompt")  # of a line of JSON


def sketch(text: str) -> set[int]:
    """The hashes of a text."""
    words = re.findall(r"\w+", text.lower())
    runs = [" ".join(words[i : i + RUN]) for i in range(max(1, len(words) - RUN + 1))]
    hashes = [int.from_bytes(hashlib.sha256(run.encode()).digest()[:BYTES], "big") for run in runs]
    return {min(hashes[i : i + WINDOW]) for i in range(max(1, len(hashes) - WINDOW + 1))}


def texts(path: Path) -> Iterable[str]:
    """Those of a file of JSON lines, which may be compressed."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for line in content.decode("utf-8").splitlines():
        record: dict[str, Any] = json.loads(line)
        found = next(record[field] for field in FIELDS if field in record)
        yield from [found] if isinstance(found, str) else found


def write(name: str, paths: Iterable[Path]) -> int:
    """Writes NAME.sketch. Returns how many hashes there are."""
    found = sorted(set().union(*(sketch(text) for path in paths for text in texts(path))))
    (HERE / f"{name}.sketch").write_bytes(b"".join(value.to_bytes(BYTES, "big") for value in found))
    return len(found)


def read(name: str) -> set[int]:
    """The hashes in NAME.sketch."""
    content = (HERE / f"{name}.sketch").read_bytes()
    return {int.from_bytes(content[i : i + BYTES], "big") for i in range(0, len(content), BYTES)}


def common(first: set[int], second: set[int]) -> int:
    """How many hashes two sketches share."""
    return len(first & second)


if __name__ == "__main__":
    print(f"{write(sys.argv[1], map(Path, sys.argv[2:])):,} hashes in {HERE / sys.argv[1]}.sketch")
