"""Acceptance traces of other engines: JSON lines, an object for each request."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specbench.contrib.replay.batched import Traced, runs_of
from specbench.data.json_lines import read_json_lines
from specbench.errors import ConfigError
from specbench.stats.estimates import Integers

LONGEST = 1_000_000  # tokens of a request
COLUMNS = "accepted, or per_step_accepted and per_step_drafted"


def load_file(path: Path, seed: int = 0) -> list[Traced]:
    """The texts of a file. Each object has `accepted`, the number of guesses that would be accepted at each new token,
    or as vLLM writes them `per_step_accepted` and `per_step_drafted`; and perhaps `confidence`, max q at each new
    token. Raises ConfigError."""
    key, found = "specbench.replay", []
    for number, record in read_json_lines(str(path), key):
        where = f"{key}={path} line {number}"
        if "accepted" in record:
            lengths = np.array(_counts(record, "accepted", where), int)
            lengths = np.minimum(lengths, np.arange(len(lengths))[::-1])
        else:
            lengths = _of_steps(record, where, np.random.default_rng((seed, number)))
        found.append(Traced(lengths, _confidence(record, len(lengths), where)))
    return found


def _counts(record: Mapping[str, Any], name: str, where: str) -> list[int]:
    values = record.get(name)
    if not isinstance(values, list) or not values or len(values) > LONGEST:
        raise ConfigError(f"{where} has no list {name} of 1 to {LONGEST:,} counts: it must have {COLUMNS}")
    if any(type(value) is not int or not 0 <= value <= LONGEST for value in values):
        raise ConfigError(f"{where} field {name} is not allowed: it must be whole numbers of 0 or more")
    return values


def _of_steps(record: Mapping[str, Any], where: str, generator: np.random.Generator) -> Integers:
    """From rounds: guesses behind a whole draft were not tested, and are drawn with the share that was accepted."""
    accepted, drafted = (_counts(record, f"per_step_{name}", where) for name in ("accepted", "drafted"))
    if len(accepted) != len(drafted) or any(a > d for a, d in zip(accepted, drafted, strict=False)):
        raise ConfigError(
            f"{where} is not allowed: per_step_accepted must be as long as per_step_drafted, and no larger"
        )
    tested = sum(a + (a < d) for a, d in zip(accepted, drafted, strict=True))
    share = sum(accepted) / tested if tested else 0.0
    outcomes: list[bool] = []
    for a, d in zip(accepted, drafted, strict=True):
        outcomes += [True] * a + [bool(a == d and generator.random() < share)]
    return runs_of(np.array([*outcomes[:-1], False]))


def _confidence(record: Mapping[str, Any], tokens: int, where: str) -> Any:
    values = record.get("confidence")
    if values is None:
        return np.full(tokens, np.nan)
    numbers = isinstance(values, list) and all(type(v) in (int, float) and 0 <= v <= 1 for v in values)
    if not numbers or len(values) != tokens:
        raise ConfigError(f"{where} field confidence is not allowed: it must be {tokens} numbers in 0 to 1")
    return np.array(values, float)
