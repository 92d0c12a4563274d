"""Reads the files of finished runs, for reports and replay. What cannot be used is a ConfigError of one sentence."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
from pyarrow import types

from specbench.config.paths import refuse_no_run
from specbench.decoding.timer import DECODING
from specbench.errors import ConfigError, first_line, visible
from specbench.results.atomic_files import ASIDE, EARLIER
from specbench.results.override_diff import keys_of, sortable
from specbench.results.schema import SCHEMA_VERSION, RunResult
from specbench.results.shape import check_shape
from specbench.stats.estimates import Counts

log = logging.getLogger(__name__)
LARGEST_GAMMA = 100_000  # of a measured round; beyond it a file is not a run's
ROUNDS = {"prompt": "text", "accepted_text": "text", "own_text": "text", "rejected_text": "text", "rows": "integer",
          "tokens": "integer", "steps": "integer", "bonus": "integer"}  # fmt: skip
ROUNDS |= {f"{lap}_seconds": "number" for lap in DECODING}
POSITIONS = {"prompt": "text", "outcome": "number or null", "beta": "number or null", "acceptance": "number or null",
             "relative_entropy": "number or null", "confidence": "number or null"}  # fmt: skip
MOST_ROUNDS = 20_000  # that pages and figures read
KINDS = {"text": types.is_string, "integer": types.is_integer, "number": types.is_floating}


@dataclass
class _Provenance:
    """What reports read of `provenance`."""

    git_sha: str | None
    dirty: bool | None
    versions: dict[str, str]
    device: str
    threads: int
    started: str


@dataclass
class _Config:
    """What reports read of `config`."""

    temperature: float
    lenience: float


@dataclass
class _Equality:
    """What reports read of `lossless.detail` after a test of equal tokens."""

    equal: int
    requests: int
    ties: int


@dataclass
class _TopOne:
    """What reports read of `lossless.detail` after a test of the largest logits."""

    tokens: int
    wrong: int
    equal: int
    requests: int
    ties: int


@dataclass
class _BeamSearches:
    """What reports read of `lossless.detail` after beam searches were compared."""

    equal: int
    requests: int
    scored_again: int
    wrong_scores: int


@dataclass
class _Prompt:
    """What replay reads of a line of prompts.jsonl that was decoded."""

    id: str
    prompt: str
    prompt_tokens: int
    limit: int
    tokens: int
    baseline_tokens: int
    baseline_decode_seconds: float


@dataclass
class _Failed:
    """A line of prompts.jsonl that could not be decoded."""

    id: str
    error: str


@dataclass
class StoredRun:
    """One run's folder. `keys` are the overrides in which it differs from the other runs."""

    folder: Path
    result: dict[str, Any]
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """A short name that tells the run from the others."""
        name = ", ".join(f"{key.split('.')[-1]} {value}" for key, value in self.keys.items()) or self.folder.name
        return visible(name)

    @property
    def counts(self) -> dict[str, int]:
        """The counts of what prompts.jsonl and rounds.parquet hold: of several processes the first one's."""
        pooled = self.result.get("repeats")
        found: dict[str, int] = pooled["counts"] if pooled else self.result["counts"]
        return found

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """One record per round and prompt, from rounds.parquet; of long runs the first MOST_ROUNDS. Raises
        ConfigError."""
        path = self.folder / "rounds.parquet"
        table = read_table(path, ROUNDS, MOST_ROUNDS)
        _agree(path, parquet.read_metadata(path).num_rows, self.counts["rounds"], "rounds")
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows

    @cached_property
    def positions(self) -> dict[str, list[Any]]:
        """The columns of positions.parquet, one entry per token of the speculated text. Raises ConfigError."""
        columns: dict[str, list[Any]] = read_table(self.folder / "positions.parquet", POSITIONS).to_pydict()
        return columns

    @cached_property
    def prompts(self) -> list[dict[str, Any]]:
        """The lines of prompts.jsonl. Raises ConfigError."""
        path, counts = self.folder / "prompts.jsonl", self.counts
        found = [parse_json(line, f"{path} line {number}") for number, line in enumerate(_lines(path), 1)]
        for number, record in enumerate(found, 1):
            kind = _Failed if isinstance(record, dict) and "error" in record else _Prompt
            _checked(record, kind, f"{path} line {number}")
        _agree(path, len(found), counts["prompts"] + counts["failed"], "lines")
        _agree(path, sum("error" in record for record in found), counts["failed"], "errors")
        return found


def load_runs(*folders: Path) -> list[StoredRun]:
    """The runs in these folders, or in their sub-folders. Of several, those that cannot be used are told and left out.
    Raises ConfigError if a folder has none."""
    runs = list({run.folder.resolve(): run for folder in folders for run in _runs_in(folder)}.values())
    for run, keys in zip(runs, keys_of([(run.folder, run.result) for run in runs]), strict=True):
        run.keys = keys
    return sorted(runs, key=lambda run: [sortable(value) for value in run.keys.values()])


def _runs_in(folder: Path) -> list[StoredRun]:
    below = {path.parent for name in ("[!.]*/config.yaml", "*/results.json") for path in folder.glob(name)}
    below = {path for path in below if not path.name.startswith((EARLIER, ASIDE))}
    paths = [folder] if (folder / "results.json").exists() else sorted(below)
    runs = []
    for path in paths:
        try:
            runs.append(load_run(path))
        except ConfigError as error:
            if len(paths) == 1:
                raise
            log.warning("left out: %s", error)
    if not runs:
        raise ConfigError(f"{folder} holds no finished run: there is no results.json in it or one folder below")
    return runs


def load_run(folder: Path) -> StoredRun:
    """The run in this folder, with prompts and rounds read. Raises ConfigError."""
    run = StoredRun(folder, read_result(folder))
    decoded = {prompt["id"] for prompt in run.prompts}
    if unknown := {r["prompt"] for r in run.rounds} - decoded:
        raise ConfigError(f"{folder / 'prompts.jsonl'} cannot be used: it has no line for {sorted(unknown)[0]}")
    return run


def read_result(folder: Path) -> dict[str, Any]:
    """results.json of a run. Raises ConfigError if it is missing, or has not the shape of a `RunResult`."""
    path = folder / "results.json"
    refuse_no_run(folder)
    result = parse_json(_text(path), str(path))
    version = result.get("schema_version") if isinstance(result, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ConfigError(
            f"{path} cannot be used: its schema_version is {version}, of a newer specbench; this one reads up to "
            f"{SCHEMA_VERSION}"
        )
    found: dict[str, Any] = _checked(result, RunResult, str(path))
    _checked(found["provenance"], _Provenance, str(path), "provenance")
    _checked(found["config"], _Config, str(path), "config")
    found = {"metrics": {}, "notes": [], "choices": {}} | found  # an earlier version did not write them
    found.setdefault("no_replay", _no_replay(found))
    found["counts"] = dataclasses.asdict(Counts()) | found["counts"]
    if found["lossless"]["method"] == "token_equality":
        _checked(found["lossless"]["detail"], _Equality, str(path), "lossless.detail")
    if found["lossless"]["method"] == "beams":
        _checked(found["lossless"]["detail"], _BeamSearches, str(path), "lossless.detail")
    if "wrong" in found["lossless"]["detail"]:
        _checked(found["lossless"]["detail"], _TopOne, str(path), "lossless.detail")
    if reason := _impossible(found):
        raise ConfigError(f"{path} cannot be used: {reason}")
    return found


def _no_replay(result: dict[str, Any]) -> str:
    """Why a run of an earlier version tells nothing of another gamma."""
    if result["config"]["lenience"] < 1:
        return "its lenience is below 1"
    fixed = result["choices"].get("drafter") in ("ngram", "prompt_lookup")
    if fixed:
        return "its drafter's later guesses depend on where a round began"
    return "" if result["gamma_sweep"] else "there are no betas along its text"


def _impossible(result: dict[str, Any]) -> str:
    """What no run writes, in words."""
    counts, cost, speedup = result["counts"], result["cost"], result["speedup"]
    factors, drafted = speedup["accounting"], speedup["theorem_3_8"] is not None
    if result.get("schema_version") != SCHEMA_VERSION:
        return f"its schema_version is {result.get('schema_version')}, not {SCHEMA_VERSION}"
    needed = {"block_efficiency.mean": result["block_efficiency"]["mean"]}
    needed |= {f"cost.{name}": cost[name] for name in ("v", "o", "target_step_seconds")}
    needed |= {"alpha.mean": result["alpha"]["mean"], "cost.c": cost["c"]} if drafted or factors else {}
    if null := sorted(name for name, value in needed.items() if value is None):
        return f"{null[0]} is null"
    if missing := {"theorem_3_8", "verify"} - set(factors):  # the others changed with the version
        return f"speedup.accounting has no {min(missing)}" if factors else ""
    for way, times in result["latency"].items():
        for what, found in times.items():
            if missing := {"p50", "p90", "p99"} - set(found):
                return f"latency.{way}.{what} has no {min(missing)}"
    if min(counts["prompts"], counts["rounds"]) < 1 or min(counts.values()) < 0:
        return "its counts are not those of a run"
    if min((e["stderr"] for e in result["beta_by_position"] if e["stderr"] is not None), default=0) < 0:
        return "a standard error of beta_by_position is below 0"
    gammas = [entry["gamma"] for entry in cost["by_gamma"]]
    if not gammas or gammas != sorted({*gammas}) or gammas[0] < 0 or gammas[-1] > LARGEST_GAMMA:
        return "cost.by_gamma is not that of a run"
    return ""


def read_table(path: Path, columns: Mapping[str, str], most: int | None = None) -> pyarrow.Table:
    """A parquet file that has at least these columns, of these kinds, or about its first `most` rows. Raises
    ConfigError."""
    try:
        with parquet.ParquetFile(path) as file:
            groups, rows = 0, 0
            while groups < file.num_row_groups and (most is None or rows < most):
                rows, groups = rows + file.metadata.row_group(groups).num_rows, groups + 1
            table = file.read_row_groups(range(groups))
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read ({_first_line(error)})") from error
    for name, kind in columns.items():
        if name not in table.column_names:
            raise ConfigError(f"{path} cannot be used: it has no column {name}")
        found, nullable = table.schema.field(name).type, kind.endswith(" or null")
        plain = kind.removesuffix(" or null")
        fits = KINDS[plain](found) or (plain == "number" and types.is_integer(found))
        if not (fits or (plain == "text" and types.is_large_string(found)) or (nullable and types.is_null(found))):
            raise ConfigError(f"{path} cannot be used: its column {name} is {found}, not {kind}")
        if not nullable and table[name].null_count:
            raise ConfigError(f"{path} cannot be used: its column {name} has empty cells")
    return table


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text. Raises ConfigError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({_first_line(error)})") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({_first_line(error)})") from error


def _lines(path: Path) -> list[str]:
    """Lines end with a line feed alone: text may hold other separators of lines."""
    return _text(path).removesuffix("\n").split("\n")


def _checked(value: Any, kind: type, what: str, where: str = "") -> Any:
    try:
        check_shape(value, kind, where)
    except ValueError as error:
        raise ConfigError(f"{what} cannot be used: {error}") from error
    return value


def _agree(path: Path, found: int, counted: int, what: str) -> None:
    if found != counted:
        raise ConfigError(f"{path} cannot be used: it has {found} {what}, and results.json counts {counted}")


def _first_line(error: Exception) -> str:
    """The reason without the path, which the sentence names."""
    return str(getattr(error, "strerror", None) or first_line(error))
