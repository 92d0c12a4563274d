"""Compares runs: jobs whose prompts are decoded in turn in this process, or finished runs in their folders."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from specbench.errors import ConfigError, first_line
from specbench.results.atomic_files import as_json, write_text
from specbench.results.comparability import TASK, decoded_in_turn, refuse_other_prompts, unlike_engines
from specbench.results.comparison_tables import ranking, rows, sentence, tables
from specbench.results.completion import examine, keep_others
from specbench.results.folder_lock import locked
from specbench.results.parquet import load_sums
from specbench.results.reader import StoredRun, load_runs, read_result
from specbench.results.sweep_table import own_words
from specbench.results.table import Table, to_csv
from specbench.results.terminal import show
from specbench.results.wording import word
from specbench.run.execute import execute
from specbench.run.jobs import RunJob, jobs_of_one_task, labels_of
from specbench.run.sweep_summary import SUMMARIES
from specbench.stats.comparison import SPEEDUP, TOKENS_PER_SECOND, Comparison, compare

log = logging.getLogger(__name__)
FILES = ("comparison.json", "comparison.csv")
DRAWN = ("report.html", "figures")  # from FILES
RunsByLabel = Mapping[str, StoredRun]


def is_finished(jobs: Sequence[RunJob]) -> bool:
    """Whether every job's folder holds its finished run, all of them of one comparison."""
    earlier = [examine(job.folder, job.checked.identity()) for job in jobs]
    results = [run.result for run in earlier if run.result is not None and run.finished]
    return len(results) == len(jobs) and decoded_in_turn(results) and len(results[0]["in_turn"]["runs"]) == len(jobs)


def run_jobs(jobs: Sequence[RunJob], announce: Callable[[str], None]) -> str:
    """Executes all jobs in one process. Returns the status: "complete", "interrupted" or, if a way has no results,
    "incomplete". Raises ConfigError, or KeyboardInterrupt if nothing was written."""
    with ExitStack() as locks:
        for job in jobs:
            locks.enter_context(locked(job.folder))
        outcomes = execute(jobs, "way", announce=announce)
    for outcome in outcomes:
        if isinstance(outcome.error, RuntimeError):  # of decoding
            log.error("%s: %s", " ".join(outcome.job.overrides), first_line(outcome.error))
        elif outcome.error is not None:
            log.error("%s", outcome.error)
    if kept := [outcome.kept for outcome in outcomes if outcome.kept is not None]:
        more = " and the like" * (len(kept) > 1)
        announce(f"earlier runs of {len(kept)} of {len(jobs)} ways are now in {kept[0]}{more}")
    statuses = {"incomplete" if outcome.result is None else outcome.result.status for outcome in outcomes}
    return next((status for status in ("interrupted", "incomplete") if status in statuses), "complete")


def compare_folders(folders: Sequence[str]) -> None:
    """Compares finished runs with the first one. Raises ConfigError."""
    stored = list({run.folder: run for folder in folders for run in load_runs(Path(folder))}.values())
    if len(stored) < 2:
        raise ConfigError(f"{folders[0]} holds one run: give two or more folders")
    words = own_words([run.result.get("overrides") or [] for run in stored])
    if len({*labels_of(words)}) < len(stored):
        words = [{"run": str(run.folder)} for run in stored]
    runs = dict(zip(labels_of(words), stored, strict=True))
    refuse_other_prompts({label: run.prompts for label, run in runs.items()})
    by = TOKENS_PER_SECOND if decoded_in_turn([run.result for run in stored]) else SPEEDUP
    compared = show_ranking(runs, words, {}, by, labels_of(words)[0])
    show(*(Text(f"note: {note}") for note in notes_on(runs)))
    if len(runs) == 2:
        show(Text(sentence(compared)))


def show_comparison(folder: Path, jobs: Sequence[RunJob]) -> None:
    """Prints the comparison of each task's jobs, and writes FILES into the sweep's folder. Raises ConfigError."""
    table: list[dict[str, Any]] = []
    written, notes = [], dict[str, None]()
    every = dict(zip((job.folder for job in jobs), own_words([list(job.overrides) for job in jobs]), strict=True))
    for task in jobs_of_one_task(jobs):
        done = [job.folder for job in task if (job.folder / "results.json").exists()]
        if len(done) < 2:
            continue
        common = {key: value for key, value in every[done[0]].items() if key in TASK}
        words = [{key: value for key, value in every[way].items() if key not in common} for way in done]
        runs = {label: StoredRun(way, read_result(way)) for label, way in zip(labels_of(words), done, strict=True)}
        compared = show_ranking(runs, words, common, TOKENS_PER_SECOND)
        table += rows(compared, dict(zip(runs, words, strict=True)), common)
        named = [{"folder": runs[run.label].folder.name, **asdict(run)} for run in compared.runs]
        written.append({"task": common, **asdict(compared), "runs": named})
        notes |= dict.fromkeys(notes_on(runs))
    if written:
        texts = {folder / FILES[0]: as_json({"comparisons": written}), folder / FILES[1]: to_csv(Table.of(table))}
        if kept := keep_others(texts, [folder / name for name in DRAWN]):
            moved = ", ".join(path.name for path in kept)
            show(f"the earlier comparison is now {moved}; its summary is in {SUMMARIES}/")
        for path, text in texts.items():
            write_text(path, text)
        files = [*FILES, *page_of(folder, [job.folder for job in jobs]), "summary.csv"]
        show(f"written to {folder}: {', '.join(files)}, and a folder for each way")
    show(*(Text(f"note: {note}") for note in notes))


def show_ranking(
    runs: RunsByLabel,
    words: Sequence[Mapping[str, str]],
    task: Mapping[str, str],
    by: str,
    reference: str | None = None,
) -> Comparison:
    """Compares runs, whose own overrides are `words`, and prints which is fastest and why. Raises ConfigError."""
    unlike = unlike_engines([run.result for run in runs.values()], in_turn=by == TOKENS_PER_SECOND)
    compared = compare({label: load_sums(run.folder) for label, run in runs.items()}, by, reference, unlike)
    entry = {"task": task, **asdict(compared)}
    entry["runs"] = [run | {"result": runs[run["label"]].result} for run in entry["runs"]]
    title = ", ".join(f"{key} {value}" for key, value in task.items())
    names = dict(zip(runs, words, strict=True))
    show(Text(f"\n{ranking(entry)}", style="bold"), *tables(compared, names, f"{title}: " if title else ""))
    return compared


def notes_on(runs: RunsByLabel) -> list[str]:
    """What a reader of a ranking must know, in sentences: work and machines that differ, verdicts, the machine, engines
    that differ."""
    results = {label: run.result for label, run in runs.items()}
    every = list(results.values())
    first = every[0]["config"]
    keys = [key for key in TASK if key != "data" and any(r["config"].get(key) != first.get(key) for r in every)]
    notes = [f"the runs differ in {', '.join(keys)}: they did not do the same work"] if keys else []
    machines = {result["provenance"]["device"] for result in every}
    notes += [f"the runs are of different machines: {', '.join(sorted(machines))}"] if len(machines) > 1 else []
    for verdict in ("failed", "lossy", "inconclusive", "untested"):
        those = [label for label, result in results.items() if word(result["lossless"]) == verdict]
        if named := [way for way in those if results[way]["gamma"] != 0 or verdict == "failed"]:
            notes.append(f"the verdict is {verdict} of {', '.join(named)}")
    laws = {label: result["acceptance_law"] for label, result in results.items() if result["counts"]["drafted"]}
    if len({*laws.values()}) > 1:
        of = {law: ", ".join(way for way in laws if laws[way] == law) for law in laws.values() if law}
        notes.append(f"alpha is the mean of {'; '.join(f'{law} of {ways}' for law, ways in of.items())}")
    if pooled := [label for label, result in results.items() if result.get("repeats")]:
        notes.append(f"how processes differ is no part of the intervals of {', '.join(pooled)}")
    unsteady = [
        result["machine"]["reasons"] for result in every if result["machine"] and not result["machine"]["steady"]
    ]
    notes += [f"the machine was not steady: {'; '.join(unsteady[0])}"] if unsteady else []
    left_out = [result.get("executor", {}).get("programs", {}).get("left_out") for result in every]
    return notes + list(dict.fromkeys(told for told in left_out if told))


def page_of(folder: Path, ways: Sequence[Path]) -> list[str]:
    """Writes the page of a comparison, where its ways have pages too: with a logger. Returns its name. Raises
    ConfigError."""
    from specbench.results.report.page import write_report

    runs = load_runs(*(way for way in ways if (way / "results.json").exists()))
    if all(run.result["choices"].get("logger") == "none" for run in runs):
        return []
    return [write_report(folder, runs).name]
