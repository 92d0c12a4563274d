"""Sweeps: all jobs are checked before the first one starts; at the end there are a table, summary.csv and a page."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from specbench.errors import ConfigError, VerdictError, first_line, stop

if TYPE_CHECKING:
    from specbench.report.files import Run
    from specbench.run.jobs import Job

log = logging.getLogger(__name__)


class Sweep(Callback):
    """Hydra callback of every command; a single run has none of its events. Jobs may run in other processes, as with
    Hydra's launchers for joblib, Slurm and Ray: nothing is kept but what stands in their folders."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.folder = Path()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Checks every job, so that a mistake in the last one is not found after hours of the others."""
        self.folder = Path(config.hydra.sweep.dir)
        try:
            if not config.hydra.sweeper._target_.endswith(".BasicSweeper"):
                raise ConfigError("hydra/sweeper must be basic: all jobs are known before the first one begins")
            self.jobs = jobs_of(config, GlobalHydra.instance().config_loader(), self.folder)
        except ConfigError as error:  # Hydra would only warn of it
            stop(str(error), 2)
        except Exception as error:  # likewise
            log.info("the sweep was not begun", exc_info=error)
            stop(f"the sweep cannot begin ({first_line(error)})", 1)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            sentence, code = summarise(self.jobs, self.folder)
        except Exception as error:  # Hydra would only warn of it
            log.exception("no summary")
            sentence, code = f"the sweep has no summary ({first_line(error)}): its jobs have their results", 1
        if code:
            stop(sentence, code)


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
        with named(words, every):
            jobs.append(Job(folder / str(own.hydra.sweep.subdir), check(own), list(words), kind))
    return jobs


@contextmanager
def named(words: Sequence[str], every: Sequence[Sequence[str]]) -> Iterator[None]:
    """Inside, a ConfigError names the job of these words, by those that not all jobs have."""
    try:
        yield
    except ConfigError as error:
        own = " ".join(word for word in words if any(word not in others for others in every))
        if not own or own in str(error):
            raise
        raise ConfigError(f"{own}: {error}") from error


def summarise(jobs: "Sequence[Job]", folder: Path) -> tuple[str, int]:
    """Prints the table of the finished jobs, and writes summary.csv and the page. Returns a sentence and the exit code:
    1 if a job has no results, 3 if one with strict=true has no good verdict."""
    from specbench.report import files, page, tables, terminal
    from specbench.run.jobs import finished

    found = [finished(job.folder, job.checked.resolved) for job in jobs]
    labels = files.labels_of([job.overrides for job in jobs])
    runs = [replace(run, label=label) for run, label in zip(found, labels, strict=True) if run is not None]
    if runs:
        terminal.answer(f"{len(runs)} runs", tables.runs_table(runs), folder)
        files.write_text(folder / "summary.csv", tables.sweep_csv(runs).to_csv(index=False))
        files.write_text(folder / files.PAGE, page.sweep_page(runs, folder.name))
    if len(runs) < len(jobs):
        return f"{len(jobs) - len(runs)} of {len(jobs)} jobs have no results, see run.log in their folders", 1
    bad = sum(not_lossless(job, run) for job, run in zip(jobs, runs, strict=True))
    return (f"strict=true: {bad} of {len(jobs)} jobs are not shown to be lossless", 3) if bad else ("", 0)


def not_lossless(job: "Job", run: "Run") -> bool:
    """Whether a job with strict=true has no good verdict."""
    from specbench.run.command import refuse_verdict

    try:
        refuse_verdict(job, run)
    except VerdictError:
        return True
    return False
