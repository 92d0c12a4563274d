"""Tables of speedup and block efficiency by category of prompts, of runs, or of runs pooled by their settings."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specbench.data.records import MT_BENCH
from specbench.errors import ConfigError, shown
from specbench.results.comparability import (
    SAME_WORK,
    TASK,
    alike,
    differences,
    keys_to_tell_apart,
    setting_of,
    short_paths,
)
from specbench.results.fields import FIELDS, at
from specbench.results.parquet import load_sums
from specbench.results.reader import StoredRun
from specbench.results.table import CellValue, Column, Table, table_columns
from specbench.results.wording import label, unsteady, word
from specbench.stats.bootstrap import BootstrapSums
from specbench.stats.breakdown import category_numbers
from specbench.stats.records import PerRequestSums
from specbench.stats.two_way_bootstrap import Estimator, TwoWaySums

OVERALL, TAU = "overall", FIELDS["tau"]
SPEEDUPS = {"measured": "speedup", "end_to_end": "speedup with prefill", "geometric_mean": "geometric mean of speedups"}
PATHS = {"measured": ("speedup/measured", "speedup/ci95"),
         "end_to_end": ("speedup/end_to_end", "speedup/end_to_end_ci95"),
         "geometric_mean": ("speedup/geometric_mean/mean", "speedup/geometric_mean/ci95")}  # fmt: skip
CategoryDict = Mapping[str, Any]  # `CategoryNumbers`, or nothing
Folds = Mapping[str, Sequence[str]]  # categories by the name that they have together


@dataclass
class Entry:
    """One or several runs: what names them, their numbers by category, and those of all prompts."""

    names: Mapping[str, str]  # {"drafter": "ngram"}
    overall: CategoryDict
    categories: Mapping[str, CategoryDict] = field(default_factory=dict)
    runs: Sequence[StoredRun] = ()

    def of(self, category: str) -> CategoryDict:
        """The numbers of a category; none if it has none."""
        return self.overall if category == OVERALL else self.categories.get(category, {})

    def pair(self, category: str, kind: str) -> list[CellValue]:
        """Block efficiency and speedup of a category."""
        return [at(self.of(category), "block_efficiency/mean"), at(self.of(category), PATHS[kind][0])]


def overall_numbers(result: Mapping[str, Any]) -> CategoryDict:
    """The numbers of all prompts of a run."""
    rates, names = result["throughput"], ("block_efficiency", "alpha", "recited", "speedup")
    found = {name: result["counts"][name] for name in ("prompts", "tokens", "rounds")}
    found |= {"tokens_per_second": rates["speculative_tokens_per_second"]}
    found |= {"baseline_tokens_per_second": rates["baseline_tokens_per_second"]}
    return found | {name: result.get(name) for name in names}


def _pair_columns(group: str) -> list[Column]:
    return table_columns((TAU.head, 2), ("speedup", "x"), group=group)


def categories_table(entries: Sequence[Entry], title: str, kind: str, head: str = "category") -> Table:
    """A row for each category, below `head`: of one entry with all that is known of it, of several with block
    efficiency and speedup of each."""
    categories = [*dict.fromkeys(name for entry in entries for name in entry.categories), OVERALL]
    columns = table_columns((head, "text"))
    if len(entries) == 1 and kind == "measured":
        columns += table_columns(("requests", 0), (TAU.head, 2), ("alpha", 3), ("recited", "%"), ("speedup", "x"),
                              ("95 %", "interval"), ("geo. mean", "x"), ("tokens/s", 1), ("plain", 1))  # fmt: skip
        paths = ("prompts", "block_efficiency/mean", "alpha/mean", "recited", *PATHS[kind],
                 PATHS["geometric_mean"][0], "tokens_per_second", "baseline_tokens_per_second")  # fmt: skip
        return Table(
            title, columns, [[name, *(at(entries[0].of(name), path) for path in paths)] for name in categories]
        )
    columns += [column for entry in entries for column in _pair_columns(" ".join(entry.names.values()))]
    rows: list[list[CellValue]] = [[name, *(value for entry in entries for value in entry.pair(name, kind))]
                                   for name in categories]  # fmt: skip
    return Table(title, columns, rows)


def entries_table(entries: Sequence[Entry], title: str, kind: str) -> Table:
    """A row for each entry, and for each category its block efficiency and speedup."""
    keys = list(dict.fromkeys(key for entry in entries for key in entry.names))
    categories = [*dict.fromkeys(name for entry in entries for name in entry.categories), OVERALL]
    columns = table_columns(*((key, "text") for key in keys))
    columns += [column for name in categories for column in _pair_columns(name)]
    columns += table_columns(("95 %", "interval"), ("tokens/s", 1), group=OVERALL)
    rows: list[list[CellValue]] = [
        [*(entry.names.get(key, "-") for key in keys),
         *(value for name in categories for value in entry.pair(name, kind)),
         at(entry.overall, PATHS[kind][1]), entry.overall["tokens_per_second"]]
        for entry in entries
    ]  # fmt: skip
    return Table(title, columns, rows, names=len(keys))


def folds_of(texts: Sequence[str]) -> Folds:
    """From texts like NAME=A,B, or spec_bench. Raises ConfigError."""
    found: dict[str, Sequence[str]] = {}
    for text in texts:
        name, _, names = text.partition("=")
        if text == "spec_bench":
            found["mt_bench"] = MT_BENCH
        elif not (name and names):
            raise ConfigError(f"--fold {shown(text)} is not allowed: it must be NAME=A,B, or spec_bench")
        else:
            found[name] = names.split(",")
    return found


def entries_of(runs: Sequence[StoredRun], by: Sequence[str], folds: Folds) -> list[Entry]:
    """A row for each run or, with settings in `by`, for each combination of their values. Raises ConfigError if a row
    would mix runs that did different things."""
    found = []
    for names, own in grouped(runs, by):
        if mixed := differences(results := [run.result for run in own]):
            keys = [key for part in mixed for key in keys_to_tell_apart(results, part)]
            raise ConfigError(
                f"the row {' '.join(names.values())} would mix runs that differ in {', '.join(keys or mixed)}: "
                + (f"add {','.join(keys)} to --by, or " if keys else "")
                + "leave folders out"
            )
        found.append(_entry(names, own, folds))
    if missing := [name for name in folds if not any(name in entry.categories for entry in found)]:
        raise ConfigError(f"--fold {missing[0]} has no effect: no run has categories of these names")
    return found


def grouped(runs: Sequence[StoredRun], by: Sequence[str]) -> list[tuple[dict[str, str], list[StoredRun]]]:
    """The runs of each row, and what names it. Raises ConfigError for what is no setting."""
    if not by:
        return [(names, [run]) for names, run in zip(names_of_runs(runs), runs, strict=True)]
    found: dict[tuple[str, ...], list[StoredRun]] = {}
    settings = [[setting_of(run.result, key) or run.keys.get(key) for key in by] for run in runs]
    if missing := [key for key, *values in zip(by, *settings, strict=True) if not any(values)]:
        raise ConfigError(f"--by {shown(missing[0])} is not possible: {runs[0].folder} has no such setting")
    for run, values in zip(runs, settings, strict=True):
        found.setdefault(tuple("-" if value is None else alike(value) for value in values), []).append(run)
    names = with_short_paths([dict(zip(by, values, strict=True)) for values in found])
    return list(zip(names, found.values(), strict=True))


def with_short_paths(names: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The same, with paths as short as they can be told apart."""
    short = {key: short_paths([own[key] for own in names]) for key in names[0]}
    return [{key: short[key].get(value, value) for key, value in own.items()} for own in names]


def names_of_runs(runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    """The overrides in which a run differs from the others or, where they do not tell all of them apart, its folder."""
    keys = dict.fromkeys(key for run in runs for key in run.keys)
    if len({tuple(run.keys.items()) for run in runs}) == len(runs) > 1:
        return with_short_paths([{key: run.keys.get(key, "-") for key in keys} for run in runs])
    return with_short_paths([{"run": str(run.folder)} for run in runs])


def _entry(names: Mapping[str, str], runs: Sequence[StoredRun], folds: Folds) -> Entry:
    if len(runs) == 1 and not folds:
        return Entry(names, overall_numbers(runs[0].result), runs[0].result["by_category"], runs)
    processes = [process for run in runs for process in load_sums(run.folder).by_process()]
    folded = {member: name for name, members in folds.items() for member in members}
    as_named = [[folded.get(category, category) for category in process.categories] for process in processes]
    parts = {
        name: _numbers([process.only([i for i, found in enumerate(own) if found == name])
                        for process, own in zip(processes, as_named, strict=True)])
        for name in dict.fromkeys(name for own in as_named for name in own if name)
    }  # fmt: skip
    return Entry(names, overall_numbers(runs[0].result) if len(runs) == 1 else _numbers(processes), parts, runs)


def _numbers(processes: Sequence[PerRequestSums]) -> CategoryDict:
    sums: Estimator = BootstrapSums.of(processes[0]) if len(processes) == 1 else TwoWaySums.of(lambda: processes)
    return asdict(category_numbers(sums))


def table_notes(runs: Sequence[StoredRun], told: Collection[str]) -> Iterator[str]:
    """What a reader must know before comparing rows, in sentences; `told` are settings that rows are named by."""
    results, many = [run.result for run in runs], len(runs) > 1
    verdicts: dict[str, list[str]] = {}
    for run, names in zip(runs, names_of_runs(runs), strict=True):
        verdicts.setdefault(word(run.result["lossless"]), []).append(label(names))
    for verdict in ("failed", "lossy", "inconclusive", "untested"):
        if found := verdicts.get(verdict):
            yield f"the verdict on losslessness is {verdict}" + f" of {'; '.join(found)}" * (len(verdicts) > 1)
    parts = {key.partition(".")[0] for key in told}
    if work := [key for key in differences(results, SAME_WORK) if key in TASK and key not in parts]:
        yield f"the runs differ in {', '.join(work)}: they did not do the same work"
    if len(machines := {result["provenance"]["device"] for result in results}) > 1:
        yield f"the runs are of different machines: {', '.join(sorted(machines))}"
    if shaky := [result for result in results if unsteady(result)]:
        yield "the machine was not steady" + f" in {len(shaky)} of {len(runs)} runs" * many
    if partly := [result["status"] for result in results if result["status"] != "complete"]:
        yield f"{len(partly)} of {len(runs)} runs are not complete: {', '.join(sorted({*partly}))}"
    if any(result["speedup"]["ci95"] is None for result in results):
        yield "too few prompts, or groups of rows, for intervals" + " of some runs" * many
    if any(result["speedup"]["ci95"] is not None and not result["repeats"] for result in results):
        yield "95 % intervals are of this run's prompts: another process may lie outside"
