"""The files of a run. They are always written; other loggers mirror them."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml

from specbench.batch import Batch
from specbench.measure.recorder import Round
from specbench.measure.text import TextLaws
from specbench.results import RunResult, write_json, write_text

CONTEXT_TOKENS = 16  # before a token, enough to know how it is written


def write_config(config: dict, out_dir: Path) -> None:
    """config.yaml, as it was resolved; written before the run begins."""
    out_dir.mkdir(parents=True, exist_ok=True)
    write_text(out_dir / "config.yaml", yaml.safe_dump(config, sort_keys=False))


def write_result(result: RunResult, batches: Sequence[Batch], digest: str, out_dir: Path, tokenizer: Any) -> None:
    """prompts.jsonl, rounds.parquet, positions.parquet, and last results.json, which says that the
    others are there. The tokenizer turns each round's tokens into text."""
    os.replace(out_dir / "prompts.jsonl.part", out_dir / "prompts.jsonl")
    temporary = out_dir / "rounds.parquet.tmp"
    pyarrow.parquet.write_table(rounds_table(batches, tokenizer), temporary)
    os.replace(temporary, out_dir / "rounds.parquet")
    temporary = out_dir / "positions.parquet.tmp"
    pyarrow.parquet.write_table(positions_table(batches), temporary)
    os.replace(temporary, out_dir / "positions.parquet")
    write_json(out_dir / "results.json", result.as_dict() | {"config_digest": digest})


def rounds_table(batches: Sequence[Batch], tokenizer: Any) -> pyarrow.Table:
    """One row per round and prompt, with the text that it kept, added and turned down. Seconds are the
    batch's: with several rows in one batch, the rounds that share `batch` and `round` were one call."""
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
            rows.append(place | record | laps | _texts(r, batch.speculative.tokens[r.row], tokenizer))
    schema = pyarrow.schema([("beta", pyarrow.list_(pyarrow.float64()))])
    table = pyarrow.Table.from_pylist(rows)
    return table.set_column(table.schema.get_field_index("beta"), "beta", table["beta"].cast(schema.field(0).type))


def _texts(r: Round, tokens: Sequence[int], tokenizer: Any) -> dict[str, str]:
    """What the round wrote: as the difference of two texts, since some tokenizers join by context."""
    begin = max(0, r.position - CONTEXT_TOKENS)

    def upto(end: int, *more: int) -> str:
        return tokenizer.decode([*tokens[begin:end], *more], skip_special_tokens=False)

    middle, end = r.position + r.accepted, r.position + r.tokens
    before, kept = upto(r.position), upto(middle)
    rejected = "" if r.rejected is None else upto(middle, r.rejected)[len(kept) :]
    return {"accepted_text": kept[len(before) :], "own_text": upto(end)[len(kept) :], "rejected_text": rejected}


def positions_table(batches: Sequence[Batch]) -> pyarrow.Table:
    """One row per token of the speculated text: what `read_text` found there, and `outcome`: 1 for a
    guess that was accepted, 0 for the token in the place of a rejected one, null where none was tested."""
    rows = []
    for batch in batches:
        for row, laws in enumerate(batch.texts.get("speculative", [])):
            outcomes = batch.speculative.outcomes_of(row)
            columns = {name: values.tolist() for name, values in vars(laws).items()}
            for position in range(len(laws.beta)):
                found = {name: values[position] for name, values in columns.items()}
                place = {"prompt": batch.requests[row].id, "position": position, "outcome": outcomes[position]}
                rows.append(place | {"token": batch.speculative.tokens[row][position]} | found)
    fields = [("prompt", pyarrow.string()), ("position", pyarrow.int64()), ("outcome", pyarrow.int8())]
    fields += [("token", pyarrow.int64())] + [(f.name, pyarrow.float64()) for f in dataclasses.fields(TextLaws)]
    return pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(fields))


def is_finished(out_dir: Path, digest: str) -> bool:
    """Whether this very configuration has a complete result in `out_dir`."""
    try:
        found = json.loads((out_dir / "results.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    return found.get("config_digest") == digest and found.get("status") == "complete"
