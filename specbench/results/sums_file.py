"""sums.parquet: sums over each finished request, from which ratios and their intervals can be made again."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from specbench.errors import ConfigError
from specbench.results.atomic_files import replacing
from specbench.results.reader import read_table
from specbench.stats.records import PerRequestSums

FILE = "sums.parquet"
ROWS = 10_000  # of a row group
PLACES = {"request": pyarrow.string(), "prompt": pyarrow.string(), "category": pyarrow.string(),
          "cluster": pyarrow.int64(), "process": pyarrow.int64()}  # fmt: skip
NEEDED = ("tokens", "seconds", "plain_tokens", "plain_seconds", "plain_step_seconds", "plain_calls", "rounds", "beta",
          "tested", "drafted", "draft_seconds", "steps", "verify_seconds", "calls", "expected", "stops",
          "text_beta", "text_tested")  # fmt: skip


def write_sums(folder: Path, *processes: PerRequestSums) -> None:
    """Replaces sums.parquet in a run's folder. Raises ConfigError."""
    write_all_sums(folder, processes, list(dict.fromkeys(name for sums in processes for name in sums.columns)))


def write_all_sums(folder: Path, processes: Iterable[PerRequestSums], names: Sequence[str]) -> None:
    """The same for the sums of several processes, one after the other, all with these columns: those that are missing
    are 0. Raises ConfigError."""
    schema = pyarrow.schema([*PLACES.items(), *((name, pyarrow.float64()) for name in names)])
    with replacing(folder / FILE) as temporary, pyarrow.parquet.ParquetWriter(temporary, schema) as file:
        for sums in processes:
            nothing = np.zeros(len(sums.requests))
            columns = [sums.columns.get(name, nothing) for name in names]
            places = [sums.requests, sums.prompts, sums.categories, sums.clusters, sums.processes]
            file.write_table(pyarrow.table([*places, *columns], schema=schema), ROWS)


def load_sums(folder: Path) -> PerRequestSums:
    """sums.parquet of a run's folder. Raises ConfigError."""
    path = folder / FILE
    kinds = {name: "integer" if kind == pyarrow.int64() else "text" for name, kind in PLACES.items()}
    table = read_table(path, kinds | dict.fromkeys(NEEDED, "number"))
    if not table.num_rows:
        raise ConfigError(f"{path} cannot be used: it has no rows")
    names = [name for name in table.column_names if name not in PLACES]
    for name, found in ((name, table[name]) for name in names):
        if not pyarrow.types.is_floating(found.type) or found.null_count:
            raise ConfigError(f"{path} cannot be used: its column {name} is not of numbers alone")
    requests, prompts, categories, clusters, processes = (table[name].to_pylist() for name in PLACES)
    columns = {name: table[name].to_numpy() for name in names}
    return PerRequestSums(requests, prompts, categories, clusters, processes, columns)
