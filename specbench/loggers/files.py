"""The files of a run. They are always written; other loggers mirror them."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import yaml

from specbench.results import RunResult, write_json, write_text
from specbench.run import Batch


def write_config(config: dict, out_dir: Path) -> None:
    """config.yaml, as it was resolved; written before the run begins."""
    out_dir.mkdir(parents=True, exist_ok=True)
    write_text(out_dir / "config.yaml", yaml.safe_dump(config, sort_keys=False))


def write_result(result: RunResult, batches: Sequence[Batch], digest: str, out_dir: Path) -> None:
    """prompts.jsonl, rounds.parquet, and last results.json, which says that the others are there."""
    os.replace(out_dir / "prompts.jsonl.part", out_dir / "prompts.jsonl")
    temporary = out_dir / "rounds.parquet.tmp"
    pyarrow.parquet.write_table(rounds_table(batches), temporary)
    os.replace(temporary, out_dir / "rounds.parquet")
    write_json(out_dir / "results.json", result.as_dict() | {"config_digest": digest})


def rounds_table(batches: Sequence[Batch]) -> pyarrow.Table:
    """One row per round and prompt. Seconds are the batch's: with several rows in one batch, the
    rounds that share `batch` and `round` were one call."""
    rows = []
    for index, batch in enumerate(batches):
        if batch.error is not None:
            continue
        number: dict[int, int] = {}
        for r in batch.speculative.rounds:
            record = dataclasses.asdict(r)
            seconds = record.pop("seconds")
            for statistic in ("log_p", "draft_leak"):
                deviation, variance = record.pop(statistic)
                record |= {f"{statistic}_deviation": deviation, f"{statistic}_variance": variance}
            number[r.row] = number.get(r.row, -1) + 1
            place = {"prompt": batch.requests[r.row].id, "batch": index, "round": number[r.row]}
            laps = {f"{name}_seconds": seconds.get(name, 0.0) for name in ("draft", "verify", "accept", "host")}
            rows.append(place | record | laps)
    schema = pyarrow.schema([("beta", pyarrow.list_(pyarrow.float64()))])
    table = pyarrow.Table.from_pylist(rows)
    return table.set_column(table.schema.get_field_index("beta"), "beta", table["beta"].cast(schema.field(0).type))


def is_finished(out_dir: Path, digest: str) -> bool:
    """Whether this very configuration has a complete result in `out_dir`."""
    try:
        found = json.loads((out_dir / "results.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    return found.get("config_digest") == digest and found.get("status") == "complete"
