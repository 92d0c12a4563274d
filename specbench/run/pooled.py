"""Records of several processes as one run: repeats=R, and `python -m specbench.collect`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from specbench.measure.record import Facts, Record
from specbench.measure.results import facts_of, results
from specbench.report import files
from specbench.report.files import Run
from specbench.report.page import write_run


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
