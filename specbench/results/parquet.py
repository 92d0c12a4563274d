"""rounds.parquet and positions.parquet, written some rows at a time."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from specbench.decoding.timer import KEPT
from specbench.results.atomic_files import replacing
from specbench.stats.records import PositionStats, Round, RunRecord

ROWS = 2000  # in memory at a time
CONTEXT_TOKENS = 16  # decoded before a token, enough to get its text right
KINDS = {"int": pyarrow.int64(), "int | None": pyarrow.int64(), "float": pyarrow.float64(),
         "list[float]": pyarrow.list_(pyarrow.float64())}  # fmt: skip
TEXTS = ("accepted_text", "own_text", "rejected_text")
POSITIONS = pyarrow.schema(
    [("prompt", pyarrow.string()), ("position", pyarrow.int64()), ("outcome", pyarrow.int8()),
     ("token", pyarrow.int64()), *((field.name, pyarrow.float64()) for field in dataclasses.fields(PositionStats))]
)  # fmt: skip


def write_rows(path: Path, rows: Iterable[dict[str, Any]], schema: pyarrow.Schema) -> None:
    """Replaces a parquet file, ROWS rows at a time. Raises ConfigError."""
    with replacing(path) as temporary, pyarrow.parquet.ParquetWriter(temporary, schema) as file:
        rest = iter(rows)
        while some := list(islice(rest, ROWS)):
            file.write_table(pyarrow.Table.from_pylist(some, schema=schema))


def rounds_schema(record: RunRecord) -> pyarrow.Schema:
    """The columns of rounds.parquet, with those of the run's metrics."""
    own = [(f.name, f.type.__name__ if isinstance(f.type, type) else str(f.type)) for f in dataclasses.fields(Round)]
    place = [("prompt", pyarrow.string()), ("batch", pyarrow.int64()), ("round", pyarrow.int64())]
    columns = [(name, KINDS[kind]) for name, kind in own if name not in SPLIT]
    metrics = [f"{metric}_{column}" for metric, names in record.columns.items() for column in names]
    numbers = [(name, pyarrow.float64()) for name in (*metrics, *(f"{lap}_seconds" for lap in KEPT))]
    return pyarrow.schema([*place, *columns, *numbers, *((name, pyarrow.string()) for name in TEXTS)])


def round_rows(record: RunRecord, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """rounds.parquet: one row per round and prompt, with the text that was accepted, added and rejected. Seconds are
    those of the whole batch: rows with the same `batch` and `round` were one call."""
    for index, group in enumerate(record.groups):
        number: dict[int, int] = {}
        for r in group.speculative.rounds:
            number[r.row] = number.get(r.row, -1) + 1
            result = group.results[r.row]
            place = {"prompt": result.request.id, "batch": index, "round": number[r.row]}
            yield place | _round_record(r, record) | _texts(r, result.speculative.tokens, tokenizer)


SPLIT = ("numbers", "seconds")  # fields of a round that become several columns


def _round_record(r: Round, record: RunRecord) -> dict[str, Any]:
    """A round as columns: its fields, the numbers of each metric, and the seconds of each lap."""
    row = {name: value for name, value in vars(r).items() if name not in SPLIT}
    for name, found in r.numbers.items():
        row |= {f"{name}_{column}": value for column, value in zip(record.columns[name], found, strict=True)}
    return row | {f"{lap}_seconds": r.seconds.get(lap, 0.0) for lap in KEPT}


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


def position_rows(record: RunRecord) -> Iterator[dict[str, Any]]:
    """positions.parquet: one row per token of the speculated text, with what `read_text` found there, and `outcome`: 1
    for an accepted guess, 0 for the token in the place of a rejected one, null if no guess was tested."""
    for result in record.results:
        laws = result.speculative_laws
        if laws is None:
            continue
        outcomes = result.speculative.outcomes()
        columns = {name: values.tolist() for name, values in vars(laws).items()}
        for position in range(len(laws.beta)):
            found = {name: values[position] for name, values in columns.items()}
            place = {"prompt": result.request.id, "position": position, "outcome": outcomes[position]}
            yield place | {"token": result.speculative.tokens[position]} | found
