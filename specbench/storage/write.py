"""Writes the files of a run, which every run leaves; loggers mirror them."""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml

from specbench.decoded import Failure, Group, Record, Round, TextLaws
from specbench.decoding.clock import DECODING
from specbench.results import RunResult
from specbench.storage.atomic import replacing, synchronise, write_json, write_text, writing
from specbench.storage.finished import FILES, RESULTS, contents

PART = "prompts.jsonl.part"
CONTEXT_TOKENS = 16  # decoded before a token, enough to get its text right


def write_config(config: dict[str, Any], out_dir: Path) -> None:
    """Writes the resolved configuration to config.yaml, before the run begins. Raises ConfigError."""
    with writing(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    write_text(out_dir / "config.yaml", yaml.safe_dump(config, sort_keys=False))


class PromptsFile:
    """prompts.jsonl.part, which grows while a run decodes."""

    def __init__(self, out_dir: Path):
        """Raises ConfigError if it cannot be written."""
        self.path = out_dir / PART
        with writing(self.path):
            out_dir.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("wb", buffering=0)

    def __enter__(self) -> "PromptsFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Appends one line per record, all of them or, where the disk is full, none. Raises ConfigError."""
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        rest, whole = memoryview(text.encode("utf-8", "backslashreplace")), self.file.tell()
        with writing(self.path):
            try:
                while rest:
                    rest = rest[self.file.write(rest) :]
            except OSError:
                self.file.truncate(self.file.seek(whole))
                raise


def write_result(
    result: RunResult,
    record: Record,
    digest: str,
    out_dir: Path,
    tokenizer: Any,
    identity: Mapping[str, Any] | None = None,
    overrides: Sequence[str] | None = None,
) -> None:
    """Writes prompts.jsonl, rounds.parquet, positions.parquet and, last, results.json, which shows that the others are
    complete. The tokenizer turns each round's tokens into text. With `identity`, of what the run was made of, a sweep
    can use the results again. Raises ConfigError."""
    part = out_dir / PART
    with writing(out_dir / "prompts.jsonl"):
        (out_dir / RESULTS).unlink(missing_ok=True)
        synchronise(part)
        os.replace(part, out_dir / "prompts.jsonl")
    _write_table(rounds_table(record, tokenizer), out_dir / "rounds.parquet")
    _write_table(positions_table(record), out_dir / "positions.parquet")
    found: dict[str, Any] = {"config_digest": digest, "overrides": None if overrides is None else list(overrides)}
    if identity is not None:
        found["identity"] = {**identity, "files": {name: contents(out_dir / name) for name in FILES}}
    write_json(out_dir / RESULTS, result.as_dict() | found)


def _write_table(table: pyarrow.Table, path: Path) -> None:
    with replacing(path) as temporary:
        pyarrow.parquet.write_table(table, temporary)


def prompt_records(group: Group, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Lines of prompts.jsonl: text in, text out, counts, and times in seconds. If rows decode together, each has its
    share of the seconds."""
    for result in group.results:
        request, ours, plain = result.request, result.speculative, result.baseline
        betas = [beta for r in ours.rounds for beta in r.beta]
        yield {
            "id": request.id,
            "category": request.category,
            "prompt_tokens": len(request.tokens),
            "limit": result.limit,
            "tokens": len(ours.tokens),
            "baseline_tokens": len(plain.tokens),
            "rounds": len(ours.rounds),
            "alpha": sum(betas) / len(betas) if betas else None,
            "block_efficiency": sum(r.tokens for r in ours.rounds) / len(ours.rounds),
            "decode_seconds": ours.seconds,
            "baseline_decode_seconds": plain.seconds,
            "prefill_seconds": group.speculative.prefill_seconds / len(group.results),
            "baseline_prefill_seconds": group.baseline.prefill_seconds / len(group.results),
            **{f"{peer}_decode_seconds": output.decode_seconds for peer, output in result.peers.items()},
            **{f"{peer}_tokens": len(output.tokens) for peer, output in result.peers.items()},
            "prompt": request.text,
            "output": tokenizer.decode(ours.tokens, skip_special_tokens=True),
            "baseline_output": tokenizer.decode(plain.tokens, skip_special_tokens=True),
        }


def failure_records(failure: Failure) -> Iterator[dict[str, Any]]:
    """Lines of prompts.jsonl for requests that could not be decoded."""
    for request in failure.requests:
        yield {
            "id": request.id,
            "category": request.category,
            "prompt_tokens": len(request.tokens),
            "error": failure.error,
            "prompt": request.text,
        }


def rounds_table(record: Record, tokenizer: Any) -> pyarrow.Table:
    """rounds.parquet: one row per round and prompt, with the text that was accepted, added and rejected. Seconds are
    those of the whole batch: rows with the same `batch` and `round` were one call."""
    rows = []
    for index, group in enumerate(record.groups):
        number: dict[int, int] = {}
        for r in group.speculative.rounds:
            number[r.row] = number.get(r.row, -1) + 1
            result = group.results[r.row]
            place = {"prompt": result.request.id, "batch": index, "round": number[r.row]}
            rows.append(place | _round_record(r, record) | _texts(r, result.speculative.tokens, tokenizer))
    table = pyarrow.Table.from_pylist(rows)
    if not rows:
        return table
    betas = table["beta"].cast(pyarrow.list_(pyarrow.float64()))
    return table.set_column(table.schema.get_field_index("beta"), "beta", betas)


def _round_record(r: Round, record: Record) -> dict[str, Any]:
    """A round as columns: its fields, the numbers of each metric, and the seconds of each lap."""
    row = dataclasses.asdict(r)
    row.pop("seconds")
    numbers = row.pop("numbers")
    for name, found in numbers.items():
        row |= {f"{name}_{column}": value for column, value in zip(record.columns[name], found, strict=True)}
    return row | {f"{lap}_seconds": r.seconds.get(lap, 0.0) for lap in DECODING}


def _texts(r: Round, tokens: Sequence[int], tokenizer: Any) -> dict[str, str]:
    """The text of the round's accepted, added and rejected tokens: differences of longer texts, since some tokenizers
    join tokens by context."""
    begin = max(0, r.position - CONTEXT_TOKENS)

    def upto(end: int, *more: int) -> str:
        text: str = tokenizer.decode([*tokens[begin:end], *more], skip_special_tokens=False)
        return text

    middle, end = r.position + r.accepted, r.position + r.tokens
    before, kept = upto(r.position), upto(middle)
    rejected = "" if r.rejected is None else upto(middle, r.rejected)[len(kept) :]
    return {"accepted_text": kept[len(before) :], "own_text": upto(end)[len(kept) :], "rejected_text": rejected}


def positions_table(record: Record) -> pyarrow.Table:
    """positions.parquet: one row per token of the speculated text, with what `read_text` found there, and `outcome`: 1
    for an accepted guess, 0 for the token in the place of a rejected one, null if no guess was tested."""
    rows = []
    for result in record.results:
        laws = result.speculative_laws
        if laws is None:
            continue
        outcomes = result.speculative.outcomes()
        columns = {name: values.tolist() for name, values in vars(laws).items()}
        for position in range(len(laws.beta)):
            found = {name: values[position] for name, values in columns.items()}
            place = {"prompt": result.request.id, "position": position, "outcome": outcomes[position]}
            rows.append(place | {"token": result.speculative.tokens[position]} | found)
    fields = [("prompt", pyarrow.string()), ("position", pyarrow.int64()), ("outcome", pyarrow.int8())]
    fields += [("token", pyarrow.int64())] + [(f.name, pyarrow.float64()) for f in dataclasses.fields(TextLaws)]
    return pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(fields))
