"""`python -m specbench.compare drafter=stdlib,ngram`: ways of decoding, compared on each prompt in turn.

With overrides, every job of the sweep runs in this process: one target, one plain decoding for all that can share it,
each prompt decoded in all ways before the next one. With folders, finished runs are compared on the prompts they share.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.config.paths import conf_dir, register_resolvers
from specbench.errors import ConfigError, explain, stop
from specbench.run.signals import exit_code, handled

if TYPE_CHECKING:
    from rich.text import Text

    from specbench.results.reader import StoredRun
    from specbench.run.compare import Job
    from specbench.run.sweep import Sweep
    from specbench.stats.comparison import Comparison

register_resolvers()
NAME = "compare"  # of the folder in outputs/, unless a name or an experiment is given
FILES = ("comparison.json", "comparison.csv")
DRAWN = ("report.html", "figures")  # from FILES


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="specbench.compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("inputs", nargs="+", help="a sweep, as of python -m specbench -m, or folders of finished runs")
    parser.add_argument("-m", "--multirun", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--also", metavar="OVERRIDES", action="append", default=[],
                        help='the same with these overrides too, as in "gamma=2,3"')  # fmt: skip
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; a mistake of the user's becomes one sentence and exit code 2."""
    args = parser().parse_intermixed_args(arguments)
    inputs = args.inputs
    try:
        with handled():
            of_folders = any(Path(i).is_dir() for i in inputs)
            if missing := [i for i in inputs if of_folders and not Path(i).is_dir()]:
                raise ConfigError(f"{missing[0]} is no folder: give folders of finished runs alone, or overrides alone")
            if of_folders and args.also:
                raise ConfigError("--also cannot apply to runs that are over: leave it out")
            code = compare_folders(inputs) if of_folders else compare_sweep(inputs, args.also)
    except ConfigError as error:
        stop(str(error), 2)
    except KeyboardInterrupt as error:
        stop(f"interrupted: {error}" if error.args else "interrupted before anything was finished", exit_code())
    sys.exit(code)


def compare_folders(folders: Sequence[str]) -> int:
    """Compares finished runs with the first one. Raises ConfigError."""
    from specbench.errors import visible
    from specbench.results.comparison_tables import sentence, tables
    from specbench.results.reader import load_runs
    from specbench.results.sums_file import load_sums
    from specbench.results.tables import own_words, show
    from specbench.run.compare import labels_of
    from specbench.stats.comparison import SPEEDUP, TOKENS_PER_SECOND, compare

    found = {run.folder: run for folder in folders for run in load_runs(Path(folder))}
    if len(found) < 2:
        raise ConfigError(f"{folders[0]} holds one run: give two or more folders")
    words = own_words([run.result.get("overrides") or [] for run in found.values()])
    labels = labels_of(words)
    if len({*labels}) < len(labels):
        words, labels = [{"run": str(folder)} for folder in found], [str(folder) for folder in found]
    runs = dict(zip(labels, found.values(), strict=True))
    together = [run.result.get("in_turn") for run in runs.values()]
    by = TOKENS_PER_SECOND if together[0] and all(found == together[0] for found in together) else SPEEDUP
    compared = compare({label: load_sums(run.folder) for label, run in runs.items()}, by, labels[0])
    results = {label: run.result for label, run in runs.items()}
    show(lead({"task": {}, **asdict(compared)}, results))
    show(*tables(compared, dict(zip(labels, words, strict=True)), ""))
    for warning in not_alike(runs):
        print(visible(f"note: {warning}"))
    if len(runs) == 2:
        print(visible(sentence(compared)))
    return 0


def not_alike(runs: Mapping[str, "StoredRun"]) -> list[str]:
    """In what the runs differ that is no part of a way of decoding, in sentences. Raises ConfigError if prompts of the
    same id are not the same."""
    from specbench.results.comparability import TASK

    first, *others = runs
    texts = {record["id"]: record.get("prompt") for record in runs[first].prompts}
    for label in others:
        for record in runs[label].prompts:
            if texts.get(record["id"], record.get("prompt")) != record.get("prompt"):
                raise ConfigError(f"{label} cannot be compared with {first}: their prompts {record['id']} differ")
    results = {label: run.result for label, run in runs.items()}
    configs = [result["config"] for result in results.values()]
    keys = [key for key in TASK if key != "data" and any(config.get(key) != configs[0].get(key) for config in configs)]
    found = [f"the runs differ in {', '.join(keys)}: they did not do the same work"] if keys else []
    machines = {result["provenance"]["device"] for result in results.values()}
    found += [f"the runs are of different machines: {', '.join(sorted(machines))}"] if len(machines) > 1 else []
    bad = [label for label, result in results.items() if result["lossless"].get("verdict") in ("failed", "lossy")]
    found += [f"not lossless: {', '.join(bad)}"] if bad else []
    pooled = [label for label, result in results.items() if result.get("repeats")]
    return found + ([f"how processes differ is no part of the intervals of {', '.join(pooled)}"] if pooled else [])


def compare_sweep(overrides: Sequence[str], also: Sequence[str] = ()) -> int:
    """Runs the jobs of a sweep in turn and compares them; `also` are overrides of further ones. Returns the exit code.
    Raises ConfigError."""
    from hydra.core.utils import configure_log
    from omegaconf import open_dict
    from rich.text import Text

    from specbench.results.tables import show
    from specbench.run.compare import Job, is_finished, run_jobs
    from specbench.run.signals import defer_signals

    config, sweep = expected(overrides, also)
    jobs = [Job(*job) for job in sweep.jobs]
    if len(jobs) < 2:
        raise ConfigError(f"{' '.join(overrides)} is one way of decoding: give several, as in drafter=stdlib,ngram")
    if any(job.checked.root.repeats > 1 for job in jobs):
        raise ConfigError("repeats is not possible with specbench.compare, whose ways share a process: leave it out")
    if any(job.checked.root.workers > 1 for job in jobs):
        raise ConfigError("workers is not possible with specbench.compare, whose ways share a process: leave it out")
    sweep.folder.mkdir(parents=True, exist_ok=True)
    with open_dict(config):
        config.hydra.runtime.output_dir = str(sweep.folder)
    configure_log(config.hydra.job_logging, False)
    status = "complete"
    if is_finished(jobs) and not any(job.checked.root.force for job in jobs):
        show(Text("finished before: the files are compared again (force=true decodes again)", style="dim"))
    else:
        with defer_signals():
            status = run_jobs(jobs, lambda text: show(Text(text, style="dim")))
    told, code = sweep.summarise(printed=False, page=False)
    show_comparison(sweep, jobs)
    for warning in notes_of(jobs):
        show(Text(f"note: {warning}"))
    if status == "interrupted":
        raise KeyboardInterrupt(f"what was finished is in {sweep.folder}")
    if code or status == "incomplete":
        stop(told if code else "a way has no results: see run.log", code or 1)
    return 0


def notes_of(jobs: Sequence["Job"]) -> list[str]:
    """What a reader of a ranking must know, in sentences: verdicts, the machine, engines that differ."""
    from specbench.results.reader import read_result
    from specbench.results.tables import own_words, word
    from specbench.run.compare import labels_of

    done = [job for job in jobs if (job.folder / "results.json").exists()]
    names = labels_of(own_words([job.overrides for job in jobs]))
    results = {names[jobs.index(job)]: read_result(job.folder) for job in done}
    found = []
    for verdict in ("failed", "lossy", "inconclusive", "untested"):
        if those := [name for name, result in results.items() if word(result["lossless"]) == verdict]:
            found.append(f"the verdict is {verdict} of {', '.join(those)}")
    unsteady = [result["machine"]["reasons"] for result in results.values() if not result["machine"]["steady"]]
    found += [f"the machine was not steady: {'; '.join(unsteady[0])}"] if unsteady else []
    used = [result.get("executor", {}).get("programs", {}).get("used") for result in results.values()]
    if len({use for use in used if use is not None}) > 1:
        there = sum(map(bool, used))
        found.append(f"compiled programs were there for {there} of {len(used)} ways: executor=compiled makes them")
    return found


def expected(overrides: Sequence[str], also: Sequence[str] = ()) -> tuple[Any, "Sweep"]:
    """The composed configuration and its sweep, whose jobs have been checked; a job that is asked for twice comes once.
    Raises ConfigError."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    from specbench.config.paths import fields
    from specbench.config.schema import known_keys
    from specbench.run.sweep import Sweep, name_of_command

    keys = {override.partition("=")[0] for override in overrides}
    words = list(overrides) if keys & {"name", "experiment"} else [*overrides, f"name={NAME}"]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        loader, sweep, first = GlobalHydra.instance().config_loader(), Sweep(), None
        for more in ([], *map(shlex.split, also)):
            given = [
                *(word for word in words if word.partition("=")[0] not in {m.partition("=")[0] for m in more}),
                *more,
            ]
            try:
                config = loader.load_configuration("config", given, RunMode.MULTIRUN)
            except Exception as error:  # Hydra's composition fails with errors of any class
                raise ConfigError(explain(error, known_keys(given), given)) from error
            first = first or config
            sweep.expect_all(config)
    assert first is not None
    sweep.command = fields("+".join([name_of_command(first), *also]))
    sweep.jobs = list({str(folder): (words, folder, checked) for words, folder, checked in sweep.jobs}.values())
    return first, sweep


def show_comparison(sweep: "Sweep", jobs: Sequence["Job"]) -> None:
    """Prints the comparison of each task's jobs, and writes FILES. Raises ConfigError."""
    from specbench.results.atomic_files import as_json, write_text
    from specbench.results.comparability import TASK
    from specbench.results.comparison_tables import rows, tables
    from specbench.results.completion import keep_others
    from specbench.results.reader import read_result
    from specbench.results.sweep_summary import SUMMARIES
    from specbench.results.tables import own_words, show, to_csv
    from specbench.run.compare import labels_of, tasks_of

    every, table, written = [*tasks_of(jobs)], [], []
    words = dict(zip((str(job.folder) for job in jobs), own_words([job.overrides for job in jobs]), strict=True))
    for task in every:
        done = [job for job in task if (job.folder / "results.json").exists()]
        if len(done) < 2:
            continue
        common = {k: v for k, v in words[str(done[0].folder)].items() if k in TASK}
        own = [{k: v for k, v in words[str(job.folder)].items() if k not in common} for job in done]
        named = dict(zip(labels_of(own), done, strict=True))
        names = {label: {k: v for k, v in words[str(job.folder)].items() if k not in common}
                 for label, job in named.items()}  # fmt: skip
        found = _compared(named)
        title = ", ".join(f"{key} {value}" for key, value in common.items())
        table += rows(found, names, common)
        folders = {label: job.folder for label, job in named.items()}
        runs = [{"folder": folders[run.label].name, **asdict(run)} for run in found.runs]
        written.append({"task": common, **asdict(found), "runs": runs})
        results = {label: read_result(folder) for label, folder in folders.items()}
        show(lead(written[-1], results), *tables(found, names, f"{title}: " if title else ""))
    if written:
        paths = [sweep.folder / name for name in FILES]
        texts = dict(zip(paths, (as_json({"comparisons": written}), to_csv(table)), strict=True))
        if kept := keep_others(texts, [sweep.folder / name for name in DRAWN]):
            moved = ", ".join(path.name for path in kept)
            show(f"the earlier comparison is now {moved}; its summary is in {SUMMARIES}/")
        for path, text in texts.items():
            write_text(path, text)
        files = [*FILES, *page_of(sweep.folder, [job.folder for job in jobs]), "summary.csv"]
        show(f"written to {sweep.folder}: {', '.join(files)}, and a folder for each way")


def lead(entry: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> "Text":
    """Which way is fastest, before the table, from an entry of comparison.json and the results by label."""
    from rich.text import Text

    from specbench.results.comparison_sentence import ranking

    runs = [run | {"result": results[run["label"]]} for run in entry["runs"]]
    return Text(f"\n{ranking({**entry, 'runs': runs})}", style="bold")


def page_of(folder: Path, ways: Sequence[Path]) -> list[str]:
    """Writes the page of a comparison, where its ways have pages too: with a logger. Returns its name. Raises
    ConfigError."""
    from specbench.results.reader import load_runs
    from specbench.results.report.page import write_report

    runs = load_runs(*(way for way in ways if (way / "results.json").exists()))
    if all(run.result["choices"].get("logger") == "none" for run in runs):
        return []
    return [write_report(folder, runs).name]


def _compared(jobs: Mapping[str, "Job"]) -> "Comparison":
    from specbench.results.sums_file import load_sums
    from specbench.stats.comparison import TOKENS_PER_SECOND, compare

    return compare({label: load_sums(job.folder) for label, job in jobs.items()}, TOKENS_PER_SECOND)
