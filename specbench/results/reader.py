"""Reads the files of finished runs, for reports and replay. What cannot be used is a ConfigError of one sentence."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
from pyarrow import types
from pydantic import create_model

from specbench.decoding.timer import DECODING
from specbench.errors import ConfigError, visible
from specbench.results.atomic_files import ASIDE, EARLIER, refuse_no_run
from specbench.results.json_files import check_kind, file_text, parse_json, reason
from specbench.results.override_diff import differing_overrides, sortable
from specbench.results.schema import SCHEMA_VERSION, RunResult

log = logging.getLogger(__name__)
LARGEST_GAMMA = 100_000  # of a measured round; beyond it a file is not a run's
ROUNDS = {"prompt": "text", "accepted_text": "text", "own_text": "text", "rejected_text": "text", "rows": "integer",
          "tokens": "integer", "steps": "integer", "bonus": "integer"}  # fmt: skip
ROUNDS |= {f"{lap}_seconds": "number" for lap in DECODING}
POSITIONS = {"prompt": "text", "outcome": "number or null", "beta": "number or null", "acceptance": "number or null",
             "relative_entropy": "number or null", "confidence": "number or null"}  # fmt: skip
MOST_ROUNDS = 20_000  # that pages and figures read
KINDS = {"text": types.is_string, "integer": types.is_integer, "number": types.is_floating}


def _record(**fields: Any) -> Any:
    """A kind of JSON object with these fields, and maybe others."""
    required: Any = {name: (kind, ...) for name, kind in fields.items()}
    return create_model("Record", **required)


PROVENANCE = _record(git_sha=str | None, dirty=bool | None, versions=dict[str, str], device=str, threads=int,
                     started=str)  # fmt: skip
CONFIG = _record(temperature=float, lenience=float)
DETAILS = {  # of `lossless.detail`, by method
    "token_equality": _record(equal=int, requests=int, ties=int),
    "beams": _record(equal=int, requests=int, scored_again=int, wrong_scores=int),
}
TOP_ONE = _record(tokens=int, wrong=int, equal=int, requests=int, ties=int)  # likewise, where it counts wrong tokens
PROMPT = _record(id=str, category=str | None, prompt=str, prompt_tokens=int, limit=int, tokens=int, baseline_tokens=int,
                 rounds=int, alpha=float | None, block_efficiency=float, decode_seconds=float,
                 baseline_decode_seconds=float, output=str, baseline_output=str)  # fmt: skip
FAILED = _record(
    id=str, category=str | None, prompt=str, error=str
)  # a line of prompts.jsonl that could not be decoded


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
        pooled = self.result["repeats"]
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
        found = []
        for number, line in enumerate(file_text(path).removesuffix("\n").split("\n"), 1):
            record, what = parse_json(line, f"{path} line {number}"), f"{path} line {number}"
            failed = isinstance(record, dict) and "error" in record
            found.append(check_kind(record, FAILED if failed else PROMPT, what))
        _agree(path, len(found), counts["prompts"] + counts["failed"], "lines")
        _agree(path, sum("error" in record for record in found), counts["failed"], "errors")
        return found


def load_runs(*folders: Path) -> list[StoredRun]:
    """The runs in these folders, or in their sub-folders. Of several, those that cannot be used are told and left out.
    Raises ConfigError if a folder has none."""
    runs = list({run.folder.resolve(): run for folder in folders for run in _runs_in(folder)}.values())
    for run, keys in zip(runs, differing_overrides([(run.folder, run.result) for run in runs]), strict=True):
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
    """results.json of a run, with the defaults of fields that it leaves out. Raises ConfigError if it is missing, or
    has not the shape of a `RunResult`."""
    path = folder / "results.json"
    refuse_no_run(folder)
    result = parse_json(file_text(path), str(path))
    version = result.get("schema_version") if isinstance(result, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ConfigError(
            f"{path} cannot be used: its schema_version is {version}, of a newer specbench; this one reads up to "
            f"{SCHEMA_VERSION}"
        )
    found: dict[str, Any] = check_kind(result, RunResult, str(path))
    check_kind(found["provenance"], PROVENANCE, str(path), "provenance")
    check_kind(found["config"], CONFIG, str(path), "config")
    lossless = found["lossless"]
    kinds = [DETAILS[lossless["method"]]] if lossless["method"] in DETAILS else []
    for kind in [*kinds, TOP_ONE] if "wrong" in lossless["detail"] else kinds:
        check_kind(lossless["detail"], kind, str(path), "lossless.detail")
    if why := _impossible(found):
        raise ConfigError(f"{path} cannot be used: {why}")
    return found


def _impossible(result: dict[str, Any]) -> str:
    """What no run writes, in words."""
    counts, cost, speedup = result["counts"], result["cost"], result["speedup"]
    factors, drafted = speedup["accounting"], speedup["theorem_3_8"] is not None
    if result["schema_version"] != SCHEMA_VERSION:
        return f"its schema_version is {result['schema_version']}, not {SCHEMA_VERSION}"
    needed = {"block_efficiency.mean": result["block_efficiency"]["mean"]}
    needed |= {f"cost.{name}": cost[name] for name in ("v", "o", "target_step_seconds")}
    needed |= {"alpha.mean": result["alpha"]["mean"], "cost.c": cost["c"]} if drafted or factors else {}
    if null := sorted(name for name, value in needed.items() if value is None):
        return f"{null[0]} is null"
    if factors and (missing := {"theorem_3_8", "verify"} - {*factors}):
        return f"speedup.accounting has no {min(missing)}"
    for way, times in result["latency"].items():
        for what, found in times.items():
            if missing := {"p50", "p90", "p99"} - {*found}:
                return f"latency.{way}.{what} has no {min(missing)}"
    if min(counts["prompts"], counts["rounds"]) < 1 or min(counts.values()) < 0:
        return "its counts are not those of a run"
    if any((entry["stderr"] or 0) < 0 for entry in result["beta_by_position"]):
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
        raise ConfigError(f"{path} cannot be read ({reason(error)})") from error
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


def _agree(path: Path, found: int, counted: int, what: str) -> None:
    if found != counted:
        raise ConfigError(f"{path} cannot be used: it has {found} {what}, and results.json counts {counted}")
