"""Stored runs: whether a folder holds the run that is wanted, and runs pooled into one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from specbench.config.scalars import LABELS
from specbench.errors import ConfigError
from specbench.measure.record import Facts, Record, read
from specbench.report import files
from specbench.report.files import Run


def settings(config: Mapping[str, Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of a configuration that numbers depend on, as JSON has them."""
    kept = {key: value for key, value in config.items() if key not in (*LABELS, *without)}
    found: dict[str, Any] = json.loads(json.dumps(kept))
    return found


def finished(folder: Path, config: Mapping[str, Any]) -> Run | None:
    """The run in a folder if it is complete and has these settings, else None."""
    try:
        run = files.read_run(folder)
    except ConfigError:
        return None
    same = settings(run.results["config"]) == settings(config)
    return run if same and run.results["status"] == "complete" else None


def decoded_before(folder: Path, config: Mapping[str, Any]) -> list[Record]:
    """The records of a run in a folder that was interrupted, if it had these settings; those of a finished run are not
    taken, since it is to be done again."""
    path = folder / files.CONFIG
    if not path.is_file() or finished(folder, config) is not None:
        return []
    before = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(before, dict) or settings({str(key): before[key] for key in before}) != settings(config):
        return []
    return [record for record in read(folder / files.RECORDS) if not record.failed]


def pooled(runs: Sequence[Run]) -> tuple[list[Record], Facts]:
    """The records of several runs, each of which is a process, and the facts of all together: those of the first, with
    sums of seconds, the largest memory, and everybody's notes."""
    from specbench.measure.results import facts_of

    records = [replace(record, process=number) for number, run in enumerate(runs) for record in run.records]
    every = [facts_of(run.results) for run in runs]
    known = [facts.provenance for facts in every]
    provenance = known[0] | {
        "started": min(own["started"] for own in known),
        "seconds": sum(own["seconds"] for own in known),
    }
    complete = all(facts.status == "complete" for facts in every)
    return records, replace(
        every[0],
        provenance=provenance,
        peak_bytes_per_second=sum(facts.peak_bytes_per_second for facts in every) / len(every),
        memory={name: max(facts.memory[name] for facts in every) for name in every[0].memory},
        seconds=total([facts.seconds for facts in every]),
        too_long=sum(facts.too_long for facts in every),
        status="complete" if complete else "interrupted",
        notes=list(dict.fromkeys(note for facts in every for note in facts.notes)),
    )


def total(entries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sums of mappings of numbers, by key."""
    names = dict.fromkeys(name for entry in entries for name in entry)
    return {name: sum(entry.get(name, 0.0) for entry in entries) for name in names}


def write_pooled(folder: Path, runs: Sequence[Run], config: Mapping[str, Any], **changes: Any) -> Run:
    """Writes the files of pooled runs into a folder; `changes` are of their facts."""
    from specbench.measure.results import results

    records, facts = pooled(runs)
    found = results(records, replace(facts, config=dict(config), **changes))
    found["details"]["pooled"] = [str(run.folder) for run in runs]
    if "beam" in runs[0].results["details"]:  # a beam search is judged by itself, here by the worst of all processes
        found["details"]["beam"] = runs[0].results["details"]["beam"]
        found["lossless"] = min((run.results["lossless"] for run in runs), key=lambda own: own["passed"] is True)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(folder / files.CONFIG, OmegaConf.to_yaml(OmegaConf.create(dict(config))))
    files.write_text(folder / files.RECORDS, "".join(record.line() + "\n" for record in records))
    from specbench.report.page import write_run  # loads matplotlib

    return write_run(folder, found, records)
