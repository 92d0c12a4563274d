"""rounds.parquet, positions.parquet and sums.parquet: their columns, and how they are written and read."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from specbench.decoding.timer import KEPT
from specbench.errors import ConfigError
from specbench.results.atomic_files import reason, refuse_no_file, replacing
from specbench.stats.records import PerRequestSums, PositionStats, Round, RunRecord

ROWS = 2000  # in memory at a time
CONTEXT_TOKENS = 16  # decoded before a token, enough to get its text right
KINDS: dict[Any, pyarrow.DataType] = {int: pyarrow.int64(), int | None: pyarrow.int64(), float: pyarrow.float64(),
                                      list[float]: pyarrow.list_(pyarrow.float64())}  # fmt: skip
SPLIT = ("numbers", "seconds")  # fields of a round that become several columns
ROUNDS = pyarrow.schema([
    ("prompt", pyarrow.string()), ("batch", pyarrow.int64()), ("round", pyarrow.int64()),
    *((field.name, KINDS[field.type]) for field in dataclasses.fields(Round) if field.name not in SPLIT),
    *((f"{lap}_seconds", pyarrow.float64()) for lap in KEPT),
    *((name, pyarrow.string()) for name in ("accepted_text", "own_text", "rejected_text")),
])  # fmt: skip
POSITIONS = pyarrow.schema(
    [("prompt", pyarrow.string()), ("position", pyarrow.int64()), ("outcome", pyarrow.int8()),
     ("token", pyarrow.int64()), *((field.name, pyarrow.float64()) for field in dataclasses.fields(PositionStats))]
)  # fmt: skip

FILE = "sums.parquet"  # sums over each finished request, from which ratios and intervals can be made again
GROUP_ROWS = 10_000  # of it
PLACES = [("request", pyarrow.string()), ("prompt", pyarrow.string()), ("category", pyarrow.string()),
          ("cluster", pyarrow.int64()), ("process", pyarrow.int64())]  # fmt: skip
NEEDED = ("tokens", "seconds", "plain_tokens", "plain_seconds", "plain_step_seconds", "plain_calls", "rounds", "beta",
          "tested", "drafted", "draft_seconds", "steps", "verify_seconds", "calls", "expected", "stops",
          "text_beta", "text_tested")  # fmt: skip


def write_rows(path: Path, rows: Iterable[dict[str, Any]], schema: pyarrow.Schema) -> None:
    """Replaces a parquet file, ROWS rows at a time. Raises ConfigError."""
    with replacing(path) as temporary, pyarrow.parquet.ParquetWriter(temporary, schema) as file:
        rest = iter(rows)
        while some := list(islice(rest, ROWS)):
            file.write_table(pyarrow.Table.from_pylist(some, schema=schema))


def read_table(path: Path, columns: pyarrow.Schema, most: int | None = None) -> pyarrow.Table:
    """A parquet file that has at least these columns, or about its first `most` rows. Raises ConfigError."""
    try:
        refuse_no_file(path)
        with pyarrow.parquet.ParquetFile(path) as file:
            groups, rows = 0, 0
            while groups < file.num_row_groups and (most is None or rows < most):
                rows, groups = rows + file.metadata.row_group(groups).num_rows, groups + 1
            table = file.read_row_groups(range(groups))
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read ({reason(error)})") from error
    for field in columns:
        if field.name not in table.column_names:
            raise ConfigError(f"{path} cannot be used: it has no column {field.name}")
        if (found := table.schema.field(field.name).type) != field.type:
            raise ConfigError(f"{path} cannot be used: its column {field.name} is {found}, not {field.type}")
        if field.type == pyarrow.string() and table[field.name].null_count:
            raise ConfigError(f"{path} cannot be used: its column {field.name} holds null")
    return table


def rounds_schema(record: RunRecord) -> pyarrow.Schema:
    """The columns of rounds.parquet, with those of the run's metrics."""
    metrics = [f"{metric}_{column}" for metric, names in record.columns.items() for column in names]
    return pyarrow.schema([*ROUNDS, *((name, pyarrow.float64()) for name in metrics)])


def round_rows(record: RunRecord, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """rounds.parquet: one row per round and prompt, with the text that was accepted, added and rejected. Seconds are
    those of the whole batch: rows with the same `batch` and `round` were one call."""
    for index, group in enumerate(record.groups):
        number: dict[int, int] = {}
        for r in group.speculative.rounds:
            number[r.row] = number.get(r.row, -1) + 1
            result = group.results[r.row]
            row = {"prompt": result.request.id, "batch": index, "round": number[r.row], **vars(r)}
            for name, found in row.pop("numbers").items():
                row |= {f"{name}_{column}": value for column, value in zip(record.columns[name], found, strict=True)}
            seconds = row.pop("seconds")
            row |= {f"{lap}_seconds": seconds.get(lap, 0.0) for lap in KEPT}
            yield row | _texts(r, result.speculative.tokens, tokenizer)


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
        if (laws := result.speculative_laws) is None:
            continue
        columns: dict[str, Any] = {"outcome": result.speculative.outcomes(), "token": result.speculative.tokens}
        columns |= {name: values.tolist() for name, values in vars(laws).items()}
        for position in range(len(laws.beta)):
            found = {name: values[position] for name, values in columns.items()}
            yield {"prompt": result.request.id, "position": position, **found}


def _sums_schema(numbers: Iterable[str]) -> pyarrow.Schema:
    return pyarrow.schema([*PLACES, *((name, pyarrow.float64()) for name in numbers)])


def write_all_sums(folder: Path, processes: Iterable[PerRequestSums], names: Sequence[str]) -> None:
    """Replaces sums.parquet in a run's folder by the sums of its processes, all with these columns: those that are
    missing are 0. Raises ConfigError."""
    schema = _sums_schema(names)
    with replacing(folder / FILE) as temporary, pyarrow.parquet.ParquetWriter(temporary, schema) as file:
        for sums in processes:
            nothing = np.zeros(len(sums.requests))
            columns = [sums.columns.get(name, nothing) for name in names]
            places = [sums.requests, sums.prompts, sums.categories, sums.clusters, sums.processes]
            file.write_table(pyarrow.table([*places, *columns], schema=schema), GROUP_ROWS)


def load_sums(folder: Path) -> PerRequestSums:
    """sums.parquet of a run's folder. Raises ConfigError."""
    path = folder / FILE
    table = read_table(path, _sums_schema(NEEDED))
    if not table.num_rows:
        raise ConfigError(f"{path} cannot be used: it has no rows")
    names = table.column_names[len(PLACES) :]
    for name in names:
        if not pyarrow.types.is_floating(table[name].type) or table[name].null_count:
            raise ConfigError(f"{path} cannot be used: its column {name} is not of numbers alone")
    requests, prompts, categories, clusters, processes = (table[name].to_pylist() for name, _ in PLACES)
    columns = {name: table[name].to_numpy() for name in names}
    return PerRequestSums(requests, prompts, categories, clusters, processes, columns)
