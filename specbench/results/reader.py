"""Reads the files of finished runs, for reports and replay. What cannot be used is a ConfigError of one sentence."""

import functools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow.parquet as parquet
from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

from specbench.errors import ConfigError, visible
from specbench.results.atomic_files import ASIDE, EARLIER, file_text, parse_json, refuse_no_run
from specbench.results.comparability import differing_overrides, sortable
from specbench.results.parquet import POSITIONS, ROUNDS, read_table
from specbench.results.schema import SCHEMA_VERSION, RunResult
from specbench.results.wording import label

log = logging.getLogger(__name__)
LARGEST_GAMMA = 100_000  # of a measured round; beyond it a file is not a run's
MOST_ROUNDS = 20_000  # that pages and figures read
WORDS = {"dict": "an object", "dataclass": "an object", "model": "an object", "list": "a list", "tuple": "a list",
         "int": "an integer", "float": "a finite number", "finite": "a finite number", "string": "text",
         "bool": "true or false"}  # fmt: skip


def _record(more: Mapping[str, Any] = MappingProxyType({}), **fields: Any) -> Any:
    """A kind of JSON object with these fields, those of `more` if it has them, and maybe others."""
    kinds: Any = {name: (kind, ...) for name, kind in fields.items()} | {name: (more[name], None) for name in more}
    return create_model("Record", __config__=ConfigDict(allow_inf_nan=False), **kinds)


TREE = dict[str, Any]
PROVENANCE = _record({"seconds": float}, git_sha=str | None, dirty=bool | None, versions=dict[str, str], device=str,
                     threads=int, started=str)  # fmt: skip
MODEL = _record({"path": str | None})
CONFIG = _record({"batch_size": int, "max_new_tokens": int, "top_k": int, "top_p": float, "repetition_penalty": float,
                  "target": MODEL, "drafter": MODEL, "data": TREE}, temperature=float, lenience=float)  # fmt: skip
REST = _record({"overrides": list[str] | None, "identity": _record({"device": TREE}),
                "executor": _record({"programs": TREE})})  # fmt: skip
COUNTS = ("tokens", "of_tokens", "requests", "equal", "wrong", "ties", "tested", "scored_again", "wrong_scores")
DETAIL = _record({name: int for name in COUNTS} | {"largest_tie": float | None})
RATES = ("speculative_tokens_per_second", "baseline_tokens_per_second")
PROMPT = _record(id=str, category=str | None, prompt=str, prompt_tokens=int, limit=int, tokens=int, baseline_tokens=int,
                 rounds=int, alpha=float | None, block_efficiency=float, decode_seconds=float,
                 baseline_decode_seconds=float, output=str, baseline_output=str)  # fmt: skip
FAILED = _record(id=str, category=str | None, prompt=str, error=str)  # a line of a prompt that was not decoded


@dataclass
class StoredRun:
    """One run's folder. `keys` are the overrides in which it differs from the other runs."""

    folder: Path
    result: dict[str, Any]
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """A short name that tells the run from the others."""
        return visible(label(self.keys) or self.folder.name)

    @property
    def counts(self) -> dict[str, int]:
        """The counts of what prompts.jsonl and rounds.parquet hold: of several processes the first one's."""
        found: dict[str, int] = (self.result["repeats"] or self.result)["counts"]
        return found

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """One record per round and prompt, from rounds.parquet; of long runs the first MOST_ROUNDS. Raises
        ConfigError."""
        path = self.folder / "rounds.parquet"
        rows: list[dict[str, Any]] = read_table(path, ROUNDS, MOST_ROUNDS).to_pylist()
        _agree(path, parquet.read_metadata(path).num_rows, self.counts["rounds"], "rounds")
        return rows

    @cached_property
    def positions(self) -> dict[str, list[Any]]:
        """The columns of positions.parquet, one entry per token of the speculated text. Raises ConfigError."""
        columns: dict[str, list[Any]] = read_table(self.folder / "positions.parquet", POSITIONS).to_pydict()
        return columns

    @cached_property
    def prompts(self) -> list[dict[str, Any]]:
        """The lines of prompts.jsonl. Raises ConfigError."""
        path, found = self.folder / "prompts.jsonl", []
        for number, line in enumerate(file_text(path).removesuffix("\n").split("\n"), 1):
            where = f"{path} line {number}"
            record = parse_json(line, where)
            failed = isinstance(record, dict) and "error" in record
            found.append(check_kind(record, FAILED if failed else PROMPT, where))
        _agree(path, len(found), self.counts["prompts"] + self.counts["failed"], "lines")
        _agree(path, sum("error" in record for record in found), self.counts["failed"], "errors")
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
    check_kind(found["lossless"]["detail"], DETAIL, str(path), "lossless.detail")
    check_kind(found, REST, str(path))
    if why := _impossible(found):
        raise ConfigError(f"{path} cannot be used: {why}")
    return found


def _impossible(result: dict[str, Any]) -> str:
    """What no run writes, in words."""
    counts, cost, speedup = result["counts"], result["cost"], result["speedup"]
    needed = {"block_efficiency.mean": result["block_efficiency"]["mean"]}
    needed |= {f"cost.{name}": cost[name] for name in ("v", "o", "target_step_seconds")}
    if speedup["theorem_3_8"] is not None or speedup["accounting"]:
        needed |= {"alpha.mean": result["alpha"]["mean"], "cost.c": cost["c"]}
    needed |= {f"throughput.{name}": result["throughput"].get(name) for name in RATES}
    needed |= {f"throughput.{peer}_tokens_per_second": result["throughput"].get(f"{peer}_tokens_per_second")
               for peer in result["speedup_over"]}  # fmt: skip
    if null := [name for name, value in needed.items() if value is None]:
        return f"{null[0]} is null"
    if speedup["accounting"] and not {"theorem_3_8", "verify"} <= {*speedup["accounting"]}:
        return "speedup.accounting is not that of a run"
    if min(counts["prompts"], counts["rounds"]) < 1 or min(counts.values()) < 0:
        return "its counts are not those of a run"
    if min((result["acceptance"] or {}).get("lengths", ()), default=0) < 0:
        return "acceptance.lengths is not that of a run"
    gammas = [entry["gamma"] for entry in cost["by_gamma"]]
    if not gammas or gammas != sorted({*gammas}) or gammas[0] < 0 or gammas[-1] > LARGEST_GAMMA:
        return "cost.by_gamma is not that of a run"
    return ""


def _agree(path: Path, found: int, counted: int, what: str) -> None:
    if found != counted:
        raise ConfigError(f"{path} cannot be used: it has {found} {what}, and results.json counts {counted}")


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def check_kind(value: Any, kind: Any, file: str, where: str = "") -> Any:
    """A parsed JSON value of this kind (a dataclass, a pydantic model or a plain type) with the defaults of what it
    leaves out; an object keeps fields that the kind does not have. Raises ConfigError, which names the first field that
    does not fit, below `where`."""
    adapter = _adapter(kind)
    try:
        checked = adapter.dump_python(adapter.validate_json(json.dumps(value), strict=True), mode="json")
    except ValidationError as error:
        raise ConfigError(f"{file} cannot be used: {_sentence(error, where)}") from error
    return {**value, **checked} if isinstance(value, dict) else checked


def _sentence(error: ValidationError, where: str) -> str:
    """The first field that does not fit, as a.b[0], and why."""
    first = error.errors(include_url=False)[0]
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    name = f"{where}{''.join(parts)}".removeprefix(".")
    if first["type"] == "missing":
        return f"it has no {name}"
    wanted = WORDS.get(first["type"].partition("_")[0])
    return f"{name or 'it'} is {repr(first['input'])[:40]}, not {wanted}" if wanted else f"{name}: {first['msg']}"
