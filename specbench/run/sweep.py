"""A sweep: its jobs, all checked before the first one begins, and at its end a table, summary.csv and a page."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from specbench.config.compose import explained
from specbench.errors import ConfigError, first_line, stop
from specbench.report import files
from specbench.run.jobs import Job, finished, job_of, not_shown_lossless

log = logging.getLogger(__name__)


def begin(config: DictConfig) -> list[Job]:
    """The checked jobs, so that a mistake in the last one is not found after hours. Ends the program for a mistake."""
    try:
        if not config.hydra.sweeper._target_.endswith(".BasicSweeper"):
            raise ConfigError("hydra/sweeper must be basic: all jobs are known before the first one begins")
        return jobs_of(config, GlobalHydra.instance().config_loader(), Path(config.hydra.sweep.dir))
    except ConfigError as error:  # Hydra would only warn of it
        stop(str(error), 2)
    except Exception as error:  # likewise
        log.info("the sweep was not begun", exc_info=error)
        stop(f"the sweep cannot begin ({first_line(error)})", 1)


def end(jobs: Sequence[Job], folder: Path) -> None:
    """Summarises the jobs. Ends the program with an exit code if not all of them are as they should be."""
    try:
        sentence, code = summarise(jobs, folder)
    except Exception as error:  # Hydra would only warn of it
        log.exception("no summary")
        sentence, code = f"the sweep has no summary ({first_line(error)}): its jobs have their results", 1
    if code:
        stop(sentence, code)


def jobs_of(config: DictConfig, loader: ConfigLoader, folder: Path, kind: str = "job") -> list[Job]:
    """The checked jobs of a sweep, whose folders are below `folder`. Raises ConfigError if one is not possible."""
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
            jobs.append(job_of(own, folder / str(own.hydra.sweep.subdir), words, kind))
        except ConfigError as error:
            # The sentence names the job, by the words that not all jobs have.
            name = " ".join(word for word in words if any(word not in others for others in every))
            if not name or name in str(error):
                raise
            raise ConfigError(f"{name}: {error}") from error
    return jobs


def summarise(jobs: Sequence[Job], folder: Path) -> tuple[str, int]:
    """Prints the table of finished jobs; writes summary.csv and the page, of all runs in the folder. Returns a sentence
    and the exit code: 1 if a job has no results, 3 if one with strict=true has no good verdict."""
    from specbench.report import several  # which loads pandas and matplotlib

    found = [finished(job.folder, job.checked.resolved) for job in jobs]
    labels = files.labels_of([job.overrides for job in jobs])
    runs = [replace(run, label=label) for run, label in zip(found, labels, strict=True) if run is not None]
    if runs:
        several.answer(several.sweep_headline(runs), runs, several.runs_table(runs), folder)
        every = [run for run in files.read_all(folder) if run.results["status"] == "complete"]  # of other sweeps too
        every = runs if (folder / files.RESULTS).is_file() else every
        files.write_text(folder / "summary.csv", several.sweep_csv(every).to_csv(index=False))
        files.write_text(folder / files.PAGE, several.sweep_page(every, folder.name, several.sweep_headline(runs)))
    if len(runs) < len(jobs):
        return f"{len(jobs) - len(runs)} of {len(jobs)} jobs have no results, see run.log in their folders", 1
    bad = sum(not_shown_lossless(job, run) for job, run in zip(jobs, runs, strict=True))
    return (f"strict=true: {bad} of {len(jobs)} jobs are not shown to be lossless", 3) if bad else ("", 0)
