"""Compares jobs whose prompts were decoded in turn: whether they are done, running them, and what is shown of them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from specbench.errors import ConfigError, first_line
from specbench.results.atomic_files import as_json, write_text
from specbench.results.comparability import TASK
from specbench.results.comparison_tables import ranking, rows, tables
from specbench.results.completion import examine, keep_others
from specbench.results.folder_lock import locked
from specbench.results.parquet import load_sums
from specbench.results.reader import StoredRun, load_runs, read_result
from specbench.results.sweep_table import own_words
from specbench.results.table import Table, to_csv
from specbench.results.terminal import show
from specbench.results.wording import word
from specbench.run.execute import Outcome, execute
from specbench.run.jobs import RunJob, jobs_of_one_task, labels_of
from specbench.run.sweep_summary import SUMMARIES
from specbench.stats.comparison import TOKENS_PER_SECOND, compare

log = logging.getLogger(__name__)
FILES = ("comparison.json", "comparison.csv")
DRAWN = ("report.html", "figures")  # from FILES


def is_finished(jobs: Sequence[RunJob]) -> bool:
    """Whether every job's folder holds its finished run, all of them of one comparison."""
    earlier = [examine(job.folder, job.checked.identity()) for job in jobs]
    if any(run.result is None or not run.finished for run in earlier):
        return False
    ways = [(run.result or {}).get("in_turn") for run in earlier]
    return ways[0] is not None and all(way == ways[0] for way in ways) and len(ways[0]["runs"]) == len(jobs)


def run_jobs(jobs: Sequence[RunJob], announce: Callable[[str], None]) -> str:
    """Executes all jobs in one process. Returns the status: "complete", "interrupted" or, if a way has no results,
    "incomplete". Raises ConfigError, or KeyboardInterrupt if nothing was written."""
    with ExitStack() as locks:
        for job in jobs:
            locks.enter_context(locked(job.folder))
        outcomes = execute(jobs, "way", announce=announce)
    for outcome in outcomes:
        if outcome.error is not None:
            log.error("%s", in_words(outcome))
    if kept := [outcome.kept for outcome in outcomes if outcome.kept is not None]:
        announce(
            f"earlier runs of {len(kept)} of {len(jobs)} ways are now in {kept[0]}" + " and the like" * (len(kept) > 1)
        )
    statuses = {"incomplete" if outcome.result is None else outcome.result.status for outcome in outcomes}
    return next((status for status in ("interrupted", "incomplete") if status in statuses), "complete")


def in_words(outcome: Outcome) -> str:
    """What went wrong with a job."""
    error = outcome.error
    if isinstance(error, RuntimeError):  # of decoding
        return f"{' '.join(outcome.job.overrides)}: {first_line(error)}"
    return str(error)


def differences_in_work(runs: Mapping[str, StoredRun]) -> list[str]:
    """In what the runs differ that is no part of a way of decoding, in sentences. Raises ConfigError if prompts of the
    same id are not the same."""
    first, *others = runs
    texts = {record["id"]: record.get("prompt") for record in runs[first].prompts}
    for label in others:
        for record in runs[label].prompts:
            if texts.get(record["id"], record.get("prompt")) != record.get("prompt"):
                raise ConfigError(f"{label} cannot be compared with {first}: their prompts {record['id']} differ")
    results = {label: run.result for label, run in runs.items()}
    configs = [result["config"] for result in results.values()]
    keys = [key for key in TASK if key != "data" and any(config.get(key) != configs[0].get(key) for config in configs)]
    notes = [f"the runs differ in {', '.join(keys)}: they did not do the same work"] if keys else []
    machines = {result["provenance"]["device"] for result in results.values()}
    notes += [f"the runs are of different machines: {', '.join(sorted(machines))}"] if len(machines) > 1 else []
    bad = [label for label, result in results.items() if result["lossless"].get("verdict") in ("failed", "lossy")]
    notes += [f"not lossless: {', '.join(bad)}"] if bad else []
    pooled = [label for label, result in results.items() if result.get("repeats")]
    return notes + ([f"how processes differ is no part of the intervals of {', '.join(pooled)}"] if pooled else [])


def notes_on_comparison(jobs: Sequence[RunJob]) -> list[str]:
    """What a reader of a ranking must know, in sentences: verdicts, the machine, engines that differ."""
    done = [job for job in jobs if (job.folder / "results.json").exists()]
    names = labels_of(own_words([list(job.overrides) for job in jobs]))
    results = {names[jobs.index(job)]: read_result(job.folder) for job in done}
    notes = []
    for verdict in ("failed", "lossy", "inconclusive", "untested"):
        if those := [name for name, result in results.items() if word(result["lossless"]) == verdict]:
            notes.append(f"the verdict is {verdict} of {', '.join(those)}")
    unsteady = [result["machine"]["reasons"] for result in results.values() if not result["machine"]["steady"]]
    notes += [f"the machine was not steady: {'; '.join(unsteady[0])}"] if unsteady else []
    used = [result.get("executor", {}).get("programs", {}).get("used") for result in results.values()]
    if len({use for use in used if use is not None}) > 1:
        there = sum(map(bool, used))
        notes.append(f"compiled programs were there for {there} of {len(used)} ways: executor=compiled makes them")
    return notes


def show_comparison(folder: Path, jobs: Sequence[RunJob]) -> None:
    """Prints the comparison of each task's jobs, and writes FILES into the sweep's folder. Raises ConfigError."""
    table, written = [], []
    words = dict(zip((job.folder for job in jobs), own_words([list(job.overrides) for job in jobs]), strict=True))
    for task in jobs_of_one_task(jobs):
        done = [job for job in task if (job.folder / "results.json").exists()]
        if len(done) < 2:
            continue
        common = {k: v for k, v in words[done[0].folder].items() if k in TASK}
        own = [{k: v for k, v in words[job.folder].items() if k not in common} for job in done]
        labels = labels_of(own)
        names, folders = (
            dict(zip(labels, own, strict=True)),
            dict(zip(labels, (job.folder for job in done), strict=True)),
        )
        compared = compare({label: load_sums(folders[label]) for label in labels}, TOKENS_PER_SECOND)
        title = ", ".join(f"{key} {value}" for key, value in common.items())
        table += rows(compared, names, common)
        runs = [{"folder": folders[run.label].name, **asdict(run)} for run in compared.runs]
        written.append({"task": common, **asdict(compared), "runs": runs})
        results = {label: read_result(folders[label]) for label in labels}
        show(lead(written[-1], results), *tables(compared, names, f"{title}: " if title else ""))
    if not written:
        return
    texts = {folder / FILES[0]: as_json({"comparisons": written}), folder / FILES[1]: to_csv(Table.of(table))}
    if kept := keep_others(texts, [folder / name for name in DRAWN]):
        moved = ", ".join(path.name for path in kept)
        show(f"the earlier comparison is now {moved}; its summary is in {SUMMARIES}/")
    for path, text in texts.items():
        write_text(path, text)
    files = [*FILES, *page_of(folder, [job.folder for job in jobs]), "summary.csv"]
    show(f"written to {folder}: {', '.join(files)}, and a folder for each way")


def lead(entry: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> Text:
    """Which way is fastest, before the table, from an entry of comparison.json and the results by label."""
    runs = [run | {"result": results[run["label"]]} for run in entry["runs"]]
    return Text(f"\n{ranking({**entry, 'runs': runs})}", style="bold")


def page_of(folder: Path, ways: Sequence[Path]) -> list[str]:
    """Writes the page of a comparison, where its ways have pages too: with a logger. Returns its name. Raises
    ConfigError."""
    from specbench.results.report.page import write_report

    runs = load_runs(*(way for way in ways if (way / "results.json").exists()))
    if all(run.result["choices"].get("logger") == "none" for run in runs):
        return []
    return [write_report(folder, runs).name]
