"""The rows of tables of runs: a run, or all runs with the same settings, pooled."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict

from specbench.data.records import MT_BENCH
from specbench.errors import ConfigError, shown
from specbench.results.category_tables import Entry, overall_numbers
from specbench.results.comparability import SAME_WORK, TASK, differences
from specbench.results.fields import at
from specbench.results.override_diff import alike
from specbench.results.reader import StoredRun
from specbench.results.sums_file import load_sums
from specbench.results.wording import unsteady, word
from specbench.stats.bootstrap import BootstrapSums
from specbench.stats.breakdown import category_numbers
from specbench.stats.records import PerRequestSums
from specbench.stats.two_way_bootstrap import Estimator, TwoWaySums

Folds = Mapping[str, Sequence[str]]  # categories by the name that they have together


def folds_of(texts: Sequence[str]) -> Folds:
    """From texts like NAME=A,B, or spec_bench. Raises ConfigError."""
    found: dict[str, Sequence[str]] = {}
    for text in texts:
        name, equals, names = text.partition("=")
        if text == "spec_bench":
            found["mt_bench"] = MT_BENCH
        elif not (name and equals and names):
            raise ConfigError(f"--fold {shown(text)} is not allowed: it must be NAME=A,B, or spec_bench")
        else:
            found[name] = names.split(",")
    return found


def entries_of(runs: Sequence[StoredRun], by: Sequence[str], folds: Folds) -> list[Entry]:
    """A row for each run or, with settings in `by`, for each combination of their values. Raises ConfigError if a row
    would mix runs that did different things."""
    found = []
    for names, own in grouped(runs, by):
        if mixed := differences([run.result for run in own]):
            raise ConfigError(
                f"the row {' '.join(names.values())} would mix runs that differ in {', '.join(mixed)}: "
                f"add {mixed[0]} to --by, or leave folders out"
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
    for run in runs:
        found.setdefault(tuple(alike(_value(run, key)) for key in by), []).append(run)
    return [(dict(zip(by, values, strict=True)), own) for values, own in found.items()]


def names_of_runs(runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    """The overrides in which a run differs from the others or, where they do not tell all of them apart, its folder."""
    keys = dict.fromkeys(key for run in runs for key in run.keys)
    if len({tuple(run.keys.items()) for run in runs}) == len(runs) > 1:
        return [{key: run.keys.get(key, "-") for key in keys} for run in runs]
    return [{"run": run.folder.name if len(runs) == 1 else str(run.folder)} for run in runs]


def _value(run: StoredRun, key: str) -> str:
    """The option or value of a setting of a run. Raises ConfigError if there is none."""
    if (choice := run.result["choices"].get(key)) is not None:
        return str(choice)
    value = at(run.result["config"], key.replace(".", "/"))
    if value is None or isinstance(value, dict):
        raise ConfigError(f"--by {shown(key)} is not possible: {run.folder} has no such setting")
    return str(value)


def _entry(names: Mapping[str, str], runs: Sequence[StoredRun], folds: Folds) -> Entry:
    if len(runs) == 1 and not folds:
        return Entry(names, overall_numbers(runs[0].result), runs[0].result["by_category"])
    processes = [process for run in runs for process in load_sums(run.folder).by_process()]
    folded = {member: name for name, members in folds.items() for member in members}
    as_named = [[folded.get(category, category) for category in process.categories] for process in processes]
    categories = dict.fromkeys(name for own in as_named for name in own if name)
    parts = {
        name: [process.only([i for i, found in enumerate(own) if found == name])
               for process, own in zip(processes, as_named, strict=True)]
        for name in categories
    }  # fmt: skip
    overall = overall_numbers(runs[0].result) if len(runs) == 1 else asdict(category_numbers(_source(processes)))
    return Entry(names, overall, {name: asdict(category_numbers(_source(own))) for name, own in parts.items()})


def _source(processes: Sequence[PerRequestSums]) -> Estimator:
    return BootstrapSums.of(processes[0]) if len(processes) == 1 else TwoWaySums.of(lambda: processes)


def table_notes(runs: Sequence[StoredRun], told: Collection[str]) -> Iterator[str]:
    """What a reader must know before comparing rows, in sentences; `told` are settings that rows are named by."""
    results = [run.result for run in runs]
    verdicts: dict[str, list[str]] = {}
    for run in runs:
        verdicts.setdefault(word(run.result["lossless"]), []).append(run.label)
    for verdict in ("failed", "lossy", "inconclusive", "untested"):
        if found := verdicts.get(verdict):
            yield f"the verdict on losslessness is {verdict}" + (f" of {'; '.join(found)}" if len(verdicts) > 1 else "")
    parts = {key.partition(".")[0] for key in told}
    if work := [key for key in differences(results, SAME_WORK) if key in TASK and key not in parts]:
        yield f"the runs differ in {', '.join(work)}: they did not do the same work"
    machines = {result["provenance"]["device"] for result in results}
    if len(machines) > 1:
        yield f"the runs are of different machines: {', '.join(sorted(machines))}"
    if shaky := [result for result in results if unsteady(result)]:
        yield "the machine was not steady" + (f" in {len(shaky)} of {len(runs)} runs" if len(runs) > 1 else "")
    if partly := [run.result["status"] for run in runs if run.result["status"] != "complete"]:
        yield f"{len(partly)} of {len(runs)} runs are not complete: {', '.join(sorted({*partly}))}"
    if any(result["speedup"]["ci95"] is None for result in results):
        yield "too few prompts, or groups of rows, for intervals" + (" of some runs" if len(runs) > 1 else "")
    if any(result["speedup"]["ci95"] is not None and not result["repeats"] for result in results):
        yield "95 % intervals are those of one process"
