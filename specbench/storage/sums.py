"""sums.parquet: sums over each finished request, from which ratios and their intervals can be made again."""

from pathlib import Path

import pyarrow
import pyarrow.parquet

from specbench.decoded import RequestSums
from specbench.settings import ConfigError
from specbench.storage.atomic import replacing
from specbench.storage.read import read_table

FILE = "sums.parquet"
ROWS = 10_000  # of a row group
PLACES = {"request": "text", "prompt": "text", "category": "text", "cluster": "integer"}
NEEDED = ("tokens", "seconds", "plain_tokens", "plain_seconds", "plain_step_seconds", "plain_calls", "rounds", "beta",
          "tested", "drafted", "draft_seconds", "steps", "verify_seconds", "calls", "expected", "stops")  # fmt: skip


def write_sums(folder: Path, sums: RequestSums) -> None:
    """Replaces sums.parquet in a run's folder. Raises ConfigError."""
    places = zip(PLACES, (sums.requests, sums.prompts, sums.categories, sums.clusters), strict=True)
    kinds = (pyarrow.string(), pyarrow.string(), pyarrow.string(), pyarrow.int64())
    columns = {name: pyarrow.array(values, kind) for (name, values), kind in zip(places, kinds, strict=True)}
    columns |= {name: pyarrow.array(values, pyarrow.float64()) for name, values in sums.columns.items()}
    with replacing(folder / FILE) as temporary:
        pyarrow.parquet.write_table(pyarrow.table(columns), temporary, row_group_size=ROWS)


def load_sums(folder: Path) -> RequestSums:
    """sums.parquet of a run's folder. Raises ConfigError, also for a run of an earlier version, which has none."""
    path = folder / FILE
    if not path.exists():
        raise ConfigError(f"{folder} has no {FILE}, which earlier versions did not write: run it again")
    table = read_table(path, PLACES | dict.fromkeys(NEEDED, "number"))
    if not table.num_rows:
        raise ConfigError(f"{path} cannot be used: it has no rows")
    names = [name for name in table.column_names if name not in PLACES]
    for name, found in ((name, table[name]) for name in names):
        if not pyarrow.types.is_floating(found.type) or found.null_count:
            raise ConfigError(f"{path} cannot be used: its column {name} is not of numbers alone")
    requests, prompts, categories, clusters = (table[name].to_pylist() for name in PLACES)
    return RequestSums(requests, prompts, categories, clusters, {name: table[name].to_numpy() for name in names})
