"""Multiruns: checks every job before the first one starts, and prints a table of all jobs at the end."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from specbench.config.compose import explain, explained
from specbench.config.paths import fields
from specbench.config.validate import ValidatedConfig, check, check_early
from specbench.errors import ConfigError, first_line, stop
from specbench.results.console import Pace, one_line
from specbench.results.fingerprint import Identity
from specbench.results.schema import Placement
from specbench.results.sweep_table import own_words
from specbench.run.jobs import RunJob
from specbench.run.sweep_summary import PlannedJob, SweepJobs, summarise
from specbench.run_config import RunConfig

log = logging.getLogger(__name__)


class Sweep(Callback):
    """Hydra callback: checks all jobs at the start; at the end prints one row per job and writes summary.csv. Jobs run
    one after the other in this process; a subclass, which `hydra.callbacks.sweep` names, may do otherwise."""

    current: ClassVar["Sweep | None"] = None  # in this process, until its summary is written
    of_job = False  # whether this process runs a job that another one has handed out
    here = True  # whether jobs run on this machine, and not on one that a scheduler chooses

    def __init__(self) -> None:
        self.jobs: list[RunJob] = []
        self.folder = Path()
        self.command = "default"  # its overrides, as the name of a file
        self.pace = Pace(0)
        self.failures: list[str] = []  # why jobs of this process have no result

    # -- Hydra's events -------------------------------------------------------------------------

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Checks every job, so that a mistake in the last one is not found after hours of the others."""
        try:
            self.begin(config)
        except ConfigError as error:  # Hydra would only warn of it
            stop(str(error), 2)
        except Exception as error:  # likewise
            log.info("the sweep was not begun", exc_info=error)
            stop(explain(error, keys=()), 2)
        Sweep.current, self.pace = self, Pace(len(self.jobs))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            sentence, code = self.summarise()
        except ConfigError as error:
            sentence, code = str(error), 2
        except Exception as error:  # Hydra would only warn of it
            log.exception("no summary")
            path = self.folder / "summary.csv"
            sentence, code = f"{path} could not be made ({first_line(error)}): the jobs have their results", 1
        if code:
            stop(sentence + (f"; the first has failed: {self.failures[0]}" if self.failures else ""), code)

    # -- What a subclass may do otherwise -------------------------------------------------------

    def begin(self, config: DictConfig) -> None:
        """Checks the sweep before its first job. Raises ConfigError."""
        if not config.hydra.sweeper._target_.endswith(".BasicSweeper"):
            raise ConfigError("hydra/sweeper must be basic: a sweep knows all of its jobs before the first one begins")
        self.command = name_of_command(config)
        self.expect_all(config)

    def refuse(self, root: RunConfig) -> None:
        """Raises ConfigError if a job with these scalars cannot run beside the others."""

    @contextmanager
    def running(self, config: DictConfig) -> Iterator[None]:
        """The context in which a job runs. Raises ConfigError."""
        yield

    def placement(self) -> Placement | None:
        """What the job that runs has of its machine, if others run beside it."""
        return None

    def end(self, folder: Path, ran: bool, failed: str) -> None:
        """Prints the line of a job that is over. `failed` says why it ended, if not as it should."""
        from specbench.results.reader import read_result

        try:
            text = one_line(read_result(folder))
        except ConfigError:
            text = "no result"
        if failed:
            self.failures.append(failed)
            text = f"failed, see {folder / 'run.log'}"
        elif not ran:
            text = f"finished before, skipped (force=true redoes it): {text}"
        job, known = HydraConfig.get(), self.all_overrides()
        words = (
            own_words(known)[job.job.num] if known else dict(o.split("=", 1) for o in job.overrides.task if "=" in o)
        )
        name = ", ".join(f"{key}={value}" for key, value in words.items()) or "without overrides"
        self.pace.end(f"{name}: {text}", ran)

    def planned(self) -> SweepJobs:
        """The jobs that are known, with what they are made of as it is now."""
        planned = [
            PlannedJob(number, list(job.overrides), job.folder, self.identity_of(job.checked), job.checked.root.strict)
            for number, job in enumerate(self.jobs)
        ]
        config = self.jobs[0].checked.resolved
        return SweepJobs(self.folder, self.command, config["name"], config["logger"], planned)

    def identity_of(self, checked: ValidatedConfig) -> Identity:
        """What a job is made of, as far as this machine knows it."""
        return checked.identity()

    def all_overrides(self) -> list[list[str]]:
        """The overrides of all jobs that are known."""
        return [list(job.overrides) for job in self.jobs]

    def interrupted(self) -> str:
        """Makes the summary after a signal. Returns a sentence on what is there."""
        try:
            return self.summarise()[0]
        except ConfigError as error:
            return str(error)

    def ended_early(self, error: Exception) -> str | None:
        """After an error that is no job's: a sentence, if the sweep has a summary nevertheless."""
        return None

    # -- Its jobs -------------------------------------------------------------------------------

    def expect_all(self, config: DictConfig, hint: str = "", by: ConfigLoader | None = None) -> None:
        """Notes every job of a sweep, read `by` this loader or else by Hydra's own. Raises ConfigError if one is not
        possible; `hint` is said of a setting that one of several jobs does not have."""
        self.folder = Path(config.hydra.sweep.dir)
        given: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        swept = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        loader = by or GlobalHydra.instance().config_loader()
        with explained([*swept, *given]):
            parsed = OverridesParser.create().parse_overrides([*swept, *given])
            jobs = []
            every = BasicSweeper.split_arguments(parsed, None)[0]
            for number, overrides in enumerate(every):
                try:
                    with explained(overrides):
                        job = loader.load_sweep_config(config, list(overrides))
                except ConfigError as error:
                    own = ", ".join(f"{key}={value}" for key, value in own_words(every)[number].items())
                    text = f"{own}: {error}" if own and own not in str(error) else str(error)
                    lacks = hint and "is not a setting of the chosen" in text
                    raise ConfigError(f"{text} {hint}" if lacks else text) from error
                with open_dict(job):
                    job.hydra.job.id = job.hydra.job.num = number
                self.refuse(check_early(job)[0])  # all of them before torch is loaded
                jobs.append((job, list(overrides)))
            for job, overrides in jobs:
                folder = self.folder / str(job.hydra.sweep.subdir)
                checked = check(job, here=self.here)
                refuse_blocked(folder)
                self.jobs.append(RunJob(overrides, folder, checked))

    def summarise(self, printed: bool = True, page: bool = True) -> tuple[str, int]:
        """Makes the summary of the jobs that are finished, as `specbench.run.sweep_summary` does. Returns a sentence
        and the exit code. Raises ConfigError if summary.csv cannot be written."""
        summary = summarise(self.planned(), printed, page)
        Sweep.current = None
        return summary


def name_of_command(config: DictConfig) -> str:
    """The overrides of a sweep as the name of a file, without those that its results do not depend on; what is swept
    may be given as `hydra.sweeper.params` too."""
    own: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    own += [word for word in config.hydra.overrides.hydra if word.lstrip("+~").startswith("hydra.sweeper.params")]
    ignored = {*config.hydra.job.config.override_dirname.exclude_keys} - {"experiment"}
    return fields(",".join(word for word in own if word.lstrip("+~").partition("=")[0] not in ignored))


def refuse_blocked(folder: Path) -> None:
    """Raises ConfigError if something stands where a job's folder, or the files that Hydra opens in it, should be."""
    for path in (folder / ".hydra", folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file where a folder should be: remove it, or choose another folder")
    if (folder / "run.log").is_dir():
        raise ConfigError(f"{folder / 'run.log'} is a folder where a file should be: remove it")
