"""Records of several processes as one run: repeats=R, and `python -m specbench.collect FOLDER FOLDER --into D`, which
joins parts of one data set that were run apart."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from specbench.errors import ConfigError, answering, first_line, shown
from specbench.measure.record import Facts, Record
from specbench.measure.results import facts_of, results
from specbench.report import files, terminal
from specbench.report.files import Run
from specbench.report.page import write_run
from specbench.run.jobs import locked, settings

# Settings in which parts of one run may differ: which prompts, and how many processes there were.
OF_PARTS = ("skip", "take", "order", "repeats")


def main(words: Sequence[str] | None = None) -> None:
    """Joins parts of one data set, which were run apart, as one run."""
    parser = argparse.ArgumentParser(prog="python -m specbench.collect", description=main.__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of finished runs, as with skip=0 and skip=40")
    parser.add_argument("--into", type=Path, required=True, metavar="D", help="the folder of the new run")
    args = parser.parse_args(words)
    with answering():
        terminal.summary(pool(args.folders, args.into).results, args.into)


def pool(folders: Sequence[Path], into: Path) -> Run:
    """Writes the run of several folders into one. Raises ConfigError if they are no parts of one run."""
    runs = [files.read_run(folder) for folder in folders]
    refuse_different(runs)
    own = re.compile(rf"({'|'.join(OF_PARTS)}|hydra\..*)=")
    overrides = [word for word in runs[0].results["details"]["overrides"] if not own.match(word)]
    config = runs[0].results["config"] | {"skip": 0, "take": 0}
    with locked(into):
        try:
            return write_pooled(into, runs, config, overrides=overrides)
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:  # each is read, and yet
            raise ConfigError(f"{' and '.join(map(str, folders))} cannot be joined: {first_line(error)}") from error


def refuse_different(runs: Sequence[Run]) -> None:
    """Raises ConfigError if a run has other settings than the first."""
    first = settings(runs[0].results["config"], OF_PARTS)
    for run in runs[1:]:
        other = settings(run.results["config"], OF_PARTS)
        for key in dict.fromkeys([*first, *other]):
            if first.get(key) != other.get(key):
                raise ConfigError(
                    f"{run.folder} has {key}={shown(other.get(key))} and {runs[0].folder} {shown(first.get(key))}: "
                    f"runs are joined that differ in {', '.join(OF_PARTS)} alone"
                )


def pooled(runs: Sequence[Run]) -> tuple[list[Record], Facts]:
    """The records of several runs, each of which is a process, and the facts of all together: those of the first, with
    sums of seconds, the largest memory, and everybody's notes."""
    records = [replace(record, process=number) for number, run in enumerate(runs) for record in run.records]
    every = [facts_of(run.results) for run in runs]
    known = [facts.provenance for facts in every]
    parts = dict.fromkeys(name for facts in every for name in facts.seconds)
    complete = all(facts.status == "complete" for facts in every)
    return records, replace(
        every[0],
        provenance=known[0]
        | {"started": min(own["started"] for own in known), "seconds": sum(own["seconds"] for own in known)},
        peak_bytes_per_second=sum(facts.peak_bytes_per_second for facts in every) / len(every),
        memory={name: max(facts.memory[name] for facts in every) for name in every[0].memory},
        seconds={name: sum(facts.seconds.get(name, 0.0) for facts in every) for name in parts},
        too_long=sum(facts.too_long for facts in every),
        status="complete" if complete else "interrupted",
        notes=list(dict.fromkeys(note for facts in every for note in facts.notes)),
    )


def write_pooled(folder: Path, runs: Sequence[Run], config: Mapping[str, Any], **changes: Any) -> Run:
    """Writes the files of pooled runs into a folder; `changes` are of their facts."""
    records, facts = pooled(runs)
    found = results(records, replace(facts, config=dict(config), **changes))
    found["details"]["pooled"] = [str(run.folder) for run in runs]
    if "beam" in runs[0].results["details"]:  # a beam search is judged by itself, here by the worst of all processes
        found["details"]["beam"] = runs[0].results["details"]["beam"]
        found["lossless"] = min((run.results["lossless"] for run in runs), key=lambda own: own["passed"] is True)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(folder / files.CONFIG, OmegaConf.to_yaml(OmegaConf.create(dict(config))))
    files.write_text(folder / files.RECORDS, "".join(record.line() + "\n" for record in records))
    return write_run(folder, found, records)
