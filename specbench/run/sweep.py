"""Sweeps: all jobs are checked before the first one starts; at the end there are a table, summary.csv and a page."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from specbench.errors import ConfigError

if TYPE_CHECKING:
    from specbench.run.jobs import Job


def jobs_of(config: DictConfig, loader: ConfigLoader, folder: Path, kind: str = "job") -> "list[Job]":
    """The checked jobs of a sweep, whose folders are below `folder`. Raises ConfigError if one is not possible."""
    from specbench.config.check import check
    from specbench.config.compose import explained
    from specbench.run.jobs import Job

    swept = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    given: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    with explained([*swept, *given]):
        parsed = OverridesParser.create().parse_overrides([*swept, *given])
        every = BasicSweeper.split_arguments(parsed, None)[0]
    jobs = []
    for number, words in enumerate(every):
        with explained(words):
            own = loader.load_sweep_config(config, list(words))
        with open_dict(own):
            own.hydra.job.id = own.hydra.job.num = number
        try:
            jobs.append(Job(folder / str(own.hydra.sweep.subdir), check(own), list(words), kind))
        except ConfigError as error:
            # The sentence names the job, by the words that not all jobs have.
            name = " ".join(word for word in words if any(word not in others for others in every))
            if not name or name in str(error):
                raise
            raise ConfigError(f"{name}: {error}") from error
    return jobs


def summarise(jobs: "Sequence[Job]", folder: Path) -> tuple[str, int]:
    """Prints the table of the finished jobs, and writes summary.csv and the page. Returns a sentence and the exit code:
    1 if a job has no results, 3 if one with strict=true has no good verdict."""
    from specbench.report import files, page, tables, terminal
    from specbench.run.jobs import finished, not_shown_lossless

    found = [finished(job.folder, job.checked.resolved) for job in jobs]
    labels = files.labels_of([job.overrides for job in jobs])
    runs = [replace(run, label=label) for run, label in zip(found, labels, strict=True) if run is not None]
    if runs:
        terminal.answer(f"{len(runs)} runs", tables.runs_table(runs), folder)
        files.write_text(folder / "summary.csv", tables.sweep_csv(runs).to_csv(index=False))
        files.write_text(folder / files.PAGE, page.sweep_page(runs, folder.name))
    if len(runs) < len(jobs):
        return f"{len(jobs) - len(runs)} of {len(jobs)} jobs have no results, see run.log in their folders", 1
    bad = sum(not_shown_lossless(job, run) for job, run in zip(jobs, runs, strict=True))
    return (f"strict=true: {bad} of {len(jobs)} jobs are not shown to be lossless", 3) if bad else ("", 0)
