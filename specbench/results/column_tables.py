"""A table of chosen numbers, each with its error: a row for each entry, the values of one setting side by side, and the
p-values of paired comparisons with the first row."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specbench.errors import ConfigError, unknown
from specbench.results.category_tables import PATHS, Entry
from specbench.results.comparability import decoded_in_turn, refuse_other_prompts, sortable
from specbench.results.fields import ALSO, FIELDS, UNITS, Field, at
from specbench.results.parquet import load_sums
from specbench.results.table import CellValue, Column, Table, table_columns
from specbench.results.wording import label
from specbench.stats.comparison import SPEEDUP, TOKENS_PER_SECOND, Comparison, compare

P = "p"
USUAL = "tau,alpha,speedup"
INTERVALS = {**dict(PATHS.values()), "speedup/theorem_3_8": "speedup/accounting/theorem_3_8/ci95"}
INTERVALS_OF = {"cost": "cost/ci95", "throughput": "throughput_ci95", "drift": "drift/ci95"}  # by name


def named_columns(text: str) -> list[str]:
    """The names of columns in a text like tau,alpha,p. Raises ConfigError."""
    names = [ALSO.get(name, name) for name in map(str.strip, text.split(","))]
    if wrong := [name for name in names if name not in (*FIELDS, P)]:
        raise unknown(wrong[0], (*FIELDS, *ALSO, P), "column")
    return list(dict.fromkeys(names))


def columns_table(entries: Sequence[Entry], names: Sequence[str], across: str) -> Table:
    """A row for each entry or, with the setting `across`, for all those that differ in it alone. Raises ConfigError."""
    keys = [key for key in dict.fromkeys(key for entry in entries for key in entry.names) if key != across]
    groups = sorted({entry.names[across] for entry in entries}, key=sortable) if across else [""]
    by_row: dict[tuple[str, ...], dict[str, Entry]] = {}
    for entry in entries:
        row = tuple(entry.names.get(key, "-") for key in keys)
        by_row.setdefault(row, {})[entry.names[across] if across else ""] = entry
    columns, notes = table_columns(*((key, "text") for key in keys)), []
    rows: list[list[CellValue]] = [list(row) for row in by_row]
    for group in groups:
        own = [cells.get(group) for cells in by_row.values()]
        compared = compared_with_first([entry for entry in own if entry]) if P in names else None
        notes += [about_p(compared)] if P in names else []
        for column, values in _numbers(own, names, compared, f"{across} {group}".strip()):
            columns.append(column)
            for cells, value in zip(rows, values, strict=True):
                cells.append(value)
    told = (f"{FIELDS[name].head}: {FIELDS[name].about}" for name in names if name != P and FIELDS[name].about)
    return Table("; ".join(told), columns, rows, notes, names=len(keys))


def _numbers(
    entries: Sequence[Entry | None], names: Sequence[str], compared: Comparison | None, group: str
) -> Iterator[tuple[Column, list[Any]]]:
    """The columns of a group, each with its value of every row, and behind it that of its error, if it has one."""
    for name in names:
        if name == P:
            tests = {run.label: run.p_value for run in compared.runs} if compared else {}
            yield table_columns((P, "p"), group=group)[0], [tests.get(row_label(entry)) for entry in entries]
            continue
        field = FIELDS[name]
        unit = "x" if field.path.startswith("speedup/") else ""
        yield Column(field.head, group, field.digits, unit), [_number(entry, field) for entry in entries]
        path, ends = error_of(field.path)
        errors = [at(_tree(entry), path) if entry and path else None for entry in entries]
        if any(error is not None for error in errors):
            yield Column(f"{field.head} {'95 %' if ends else '+-'}", group, field.digits, ends=ends), errors


def _number(entry: Entry | None, field: Field) -> Any:
    """A field of an entry; None if there is none. Raises ConfigError if a row of several runs cannot have it."""
    if entry is None:
        return None
    tree = _tree(entry)
    if len(entry.runs) > 1 and at(tree, field.path.split("/")[0]) is None:
        raise ConfigError(f"--columns {field.name} is not possible for a row of several runs: give --by run")
    return at(tree, field.path)


def _tree(entry: Entry) -> Mapping[str, Any]:
    """The results of a row's run or, of several, what is known of them together, where results.json has it."""
    if len(entry.runs) == 1:
        return entry.runs[0].result
    pooled = entry.overall
    rates = {"speculative_tokens_per_second": pooled["tokens_per_second"],
             "baseline_tokens_per_second": pooled["baseline_tokens_per_second"]}  # fmt: skip
    return {**pooled, "throughput": rates, "counts": {"tokens": pooled["tokens"]}}


def error_of(path: str) -> tuple[str, bool]:
    """Where results.json has the error of a number, if it has one, and whether that is an interval."""
    above, _, last = path.rpartition("/")
    if path in INTERVALS or above in INTERVALS_OF:
        return INTERVALS.get(path) or f"{INTERVALS_OF[above]}/{last}", True
    return f"{above}/stderr" * (last == "mean"), False


def row_label(entry: Entry | None) -> str:
    """What names an entry, in words."""
    return label(entry.names) if entry else ""


def compared_with_first(entries: Sequence[Entry]) -> Comparison | None:
    """The rows of one run each, compared with the first row; None if that is not one of them. Raises ConfigError."""
    runs = {row_label(entry): entry.runs[0] for entry in entries if len(entry.runs) == 1}
    if len(runs) < 2 or len(entries[0].runs) > 1:
        return None
    refuse_other_prompts({label: run.prompts for label, run in runs.items()})
    by = TOKENS_PER_SECOND if decoded_in_turn([run.result for run in runs.values()]) else SPEEDUP
    return compare({label: load_sums(run.folder) for label, run in runs.items()}, by, row_label(entries[0]))


def about_p(found: Comparison | None) -> str:
    """What the p-values of a comparison say, in a sentence."""
    if not found or all(run.p_value is None for run in found.runs):
        return "p is not known: it needs two rows, each of one run in one process, with enough prompts"
    tests = f", corrected by Holm's method for all {len(found.pairs)} pairs of rows" if len(found.pairs) > 1 else ""
    return (
        f"p: of no difference from {found.reference} in {UNITS[found.by]}, on {found.requests} shared requests{tests}"
    )
