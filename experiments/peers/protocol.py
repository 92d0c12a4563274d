"""What a worker and the run that starts it say to each other. It uses nothing but the standard library.

A worker is a process of an engine's own environment. It writes one line of JSON when it is ready, and then one for each
line that it reads:

    {"modes": ["plain", "draft"], "version": "..."}
    {"mode": "draft", "ids": [5, 9], "new": 64, "temperature": 0, "seed": 1, "stop": [0]}
    {"tokens": [7, 7, 3], "decoded": 2, "seconds": 0.01}        or        {"error": "..."}

`tokens` are all new tokens, `decoded` those after the step that reads the prompt, `seconds` the time that these took.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Request = dict[str, Any]
DecodeResult = tuple[list[int], int, float]  # new tokens, those after the first step, the seconds that these took
Mode = Callable[[Request], DecodeResult]


def arguments() -> argparse.Namespace:
    """What a worker is started with: the `folder` of converted models, the folders of the checkpoints, of which there
    may be no `drafter`, names of what was converted from each, the longest text in tokens, and how it is to decode."""
    parser = argparse.ArgumentParser()
    for name in ("folder", "target", "drafter"):
        parser.add_argument(f"--{name}", type=Path, required=name != "drafter")
    for name in ("target-name", "drafter-name"):
        parser.add_argument(f"--{name}")
    for name in ("gamma", "threads", "context"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--precision", required=True)
    return parser.parse_args()


def serve(load: Callable[[argparse.Namespace], tuple[Mapping[str, Mode], str]]) -> None:
    """Loads the modes and a version, then answers requests until there are no more. Whatever libraries print goes to
    standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        modes, version = load(arguments())
    except Exception as error:
        answers.write(json.dumps({"error": told(error)}) + "\n")
        return
    answers.write(json.dumps({"modes": [*modes], "version": version}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            tokens, decoded, seconds = modes[request["mode"]](request)
            answer: dict[str, Any] = {"tokens": tokens, "decoded": decoded, "seconds": seconds}
        except Exception as error:
            answer = {"error": told(error)}
        answers.write(json.dumps(answer) + "\n")


def told(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
