"""Multiruns: checks every job before the first one starts, and prints a table of all jobs at the end."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from specbench.config.paths import fields
from specbench.config.schema import known_keys
from specbench.config.validate import ValidatedConfig, check, check_early
from specbench.contrib.cluster.cpu_affinity import pin_cores
from specbench.contrib.cluster.job_list import JobList, PlannedJob, read_list
from specbench.contrib.cluster.launchers import SERIAL, cores_of, known, needs_device, refuse
from specbench.contrib.ray.rules import refuse_workers_of_jobs
from specbench.errors import ConfigError, explain, first_line, stop
from specbench.results.console import Pace, one_line, tell
from specbench.results.fingerprint import Identity, NotedIdentity
from specbench.results.sweep_summary import summarise
from specbench.results.tables import own_words
from specbench.run.startup import quiet

log = logging.getLogger(__name__)
NOTHING = Identity("", {}, {}, {}, {})  # of a job that was refused


class Sweep(Callback):
    """Hydra callback: checks all jobs at the start and lists them in the sweep's folder; at the end prints one row per
    job and writes summary.csv. Launchers take it to the processes of their jobs, where it knows of its own job only,
    and where the job that ends last makes the summary."""

    running: ClassVar["Sweep | None"] = None  # in the process that began the sweep, until its summary is written
    of_job: ClassVar["Sweep | None"] = None  # in the process of a job that another process began

    def __init__(self) -> None:
        self.jobs: list[tuple[list[str], Path, ValidatedConfig]] = []
        self.folder = Path()
        self.command = "default"  # its overrides, as the name of a file
        self.launcher = SERIAL
        self.known = False  # whether `jobs` are all of them, before they start
        self.pace = Pace(0)
        self.list: JobList | None = None  # as it is in the sweep's folder
        self.place: Path | None = None  # of the list, in the process of a job
        self.argv: list[str] = []  # of the sweep's command, likewise
        self.cwd = ""  # where it was typed, likewise

    def __getstate__(self) -> dict[str, Any]:
        """What the process of a job gets: where the list is, and where the command was typed."""
        place = self.place if self.list is None else self.list.place.absolute()
        argv, cwd = self.argv or sys.argv, self.cwd or os.getcwd()  # a job that is queued again is pickled twice
        return {"place": place, "launcher": self.launcher, "argv": argv, "cwd": cwd}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the process of a job, before Hydra finds its folder. A process that a cluster's daemon has started, as
        Ray's does, works elsewhere: relative paths are those of the command."""
        self.__init__()  # type: ignore[misc]
        quiet()
        self.place, self.launcher = state["place"], state["launcher"]
        self.argv, self.cwd = state["argv"], state["cwd"]
        if os.path.isdir(self.cwd):
            os.chdir(self.cwd)

    @property
    def here(self) -> bool:
        """Whether jobs run on this machine, and not on one that a scheduler chooses."""
        return not known(self.launcher).elsewhere

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Checks every job, so that a mistake in the last one is not found after hours of the others."""
        self.folder = Path(config.hydra.sweep.dir)
        self.command = name_of_command(config)
        self.launcher = launcher_of(config.hydra)
        self.known = config.hydra.sweeper._target_.endswith(".BasicSweeper")
        try:
            if self.known:  # otherwise an optimiser chooses each job after the one before
                self.expect_all(config)
            settings: Any = OmegaConf.to_container(config.hydra.launcher, resolve=True)
            refuse(self.launcher, settings, str(config.device))
            self.list = self.as_list(config)
            self.list.write()
        except ConfigError as error:  # Hydra would only warn of it
            stop(str(error), 2)
        except Exception as error:  # likewise
            log.info("the sweep was not begun", exc_info=error)
            stop(explain(error, ()), 2)
        Sweep.running, self.pace = self, Pace(len(self.jobs))

    def expect_all(self, config: DictConfig) -> None:
        """Notes every job of a sweep. Raises ConfigError if one is not possible."""
        self.folder = Path(config.hydra.sweep.dir)
        given: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        wanted = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        loader = GlobalHydra.instance().config_loader()
        try:
            parsed = OverridesParser.create().parse_overrides([*wanted, *given])
            jobs = []
            for number, overrides in enumerate(BasicSweeper.split_arguments(parsed, None)[0]):
                job = loader.load_sweep_config(config, list(overrides))
                with open_dict(job):
                    job.hydra.job.id = job.hydra.job.num = number
                root, _ = check_early(job)  # all of them before torch is loaded
                refuse_workers_of_jobs(root.workers, self.launcher)
                jobs.append((job, list(overrides), Path(job.hydra.sweep.dir) / str(job.hydra.sweep.subdir)))
            for expected in jobs:
                self._expect(*expected)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(explain(error, known_keys(given), [*wanted, *given])) from error

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if Sweep.running is not self:
            Sweep.of_job, self.pace = self, Pace(0, alone=False)
            sys.argv = self.argv or sys.argv  # what was asked for, and not how the launcher started this process
        elif not self.known:
            self._expect(config, list(config.hydra.overrides.task), Path(config.hydra.runtime.output_dir))

    def name_of(self, number: int, overrides: list[str]) -> str:
        """What tells a job from the others, in words."""
        given = [words for words, _, _ in self.jobs] or [job.overrides for job in (self.list.jobs if self.list else ())]
        if number >= len(given):
            return " ".join(overrides) or "without overrides"
        words = own_words(given)[number]
        return ", ".join(f"{key}={value}" for key, value in words.items()) or "without overrides"

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            told, code = self.summarise()
        except ConfigError as error:
            stop(str(error), 2)
        except Exception as error:  # Hydra would only warn of it
            log.exception("no summary")
            stop(
                f"{self.folder / 'summary.csv'} could not be made ({first_line(error)}): the jobs have their results", 1
            )
        if code:
            stop(told, code)

    def _expect(self, config: DictConfig, overrides: list[str], folder: Path) -> None:
        """Notes a job. Raises ConfigError if it is not possible."""
        checked = check(config, here=self.here)
        refuse_blocked(folder)
        self.jobs.append((overrides, folder, checked))

    def as_list(self, config: DictConfig | None = None) -> JobList:
        """The jobs that are noted, with what they are made of as it is now. `config` is of one without jobs."""
        planned = [
            PlannedJob(number, overrides, folder, self.identity_of(checked), checked.root.strict)
            for number, (overrides, folder, checked) in enumerate(self.jobs)
        ]
        one: Any = self.jobs[0][2].resolved if self.jobs else config
        logger = OmegaConf.to_container(OmegaConf.create(one["logger"]), resolve=True)
        start = {} if self.list is None else {"id": self.list.id, "started": self.list.started}
        return JobList(self.folder, self.command, str(one["name"]), self.launcher, logger, self.known, planned, **start)  # type: ignore[arg-type]

    def identity_of(self, checked: ValidatedConfig) -> Identity:
        """What a job is made of, as far as this machine knows it."""
        found = checked.identity(self.here)
        return found if self.here else NotedIdentity(**vars(found))

    def summarise(self, printed: bool = True, page: bool = True) -> tuple[str, int]:
        """Makes the summary of the jobs that are finished, as `specbench.results.sweep_summary` does.
        Jobs that an optimiser has chosen for other processes are those that have ended. Returns a sentence and the exit
        code. Raises ConfigError if summary.csv cannot be written."""
        jobs = self.as_list() if self.jobs or self.list is None else read_list(self.list.place)
        found = summarise(jobs, printed, page)
        Sweep.running = None
        return found

    def end(self, config: DictConfig, folder: Path, failed: str) -> JobList | None:
        """Notes that this process's job is over; `failed` says why it has no result. Returns the list as it is now;
        None if the sweep has none. Raises ConfigError."""
        job = HydraConfig.get()
        if self.place is not None:
            self.list = read_list(self.place)
        if self.list is None:
            return None
        if self.list.whole:
            number = self.list.number_of(folder)
            if number is not None:
                self.list.end(number, failed)
        else:
            try:
                checked = check(config, job.runtime.choices)
                identity, strict = checked.identity(self.here), checked.root.strict
            except ConfigError:
                identity, strict = NOTHING, False
            self.list.end(PlannedJob(job.job.num, list(job.overrides.task), folder, identity, strict), failed)
        return self.list


def name_of_command(config: DictConfig) -> str:
    """The overrides of a sweep as the name of a file, without those that its results do not depend on; what is swept
    may be given as `hydra.sweeper.params` too."""
    own: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    own += [word for word in config.hydra.overrides.hydra if word.lstrip("+~").startswith("hydra.sweeper.params")]
    ignored = {*config.hydra.job.config.override_dirname.exclude_keys} - {"experiment"}
    return fields(",".join(word for word in own if word.lstrip("+~").partition("=")[0] not in ignored))


def end_of_job(config: DictConfig, folder: Path, ran: bool, failed: str) -> dict[str, Any] | None:
    """Notes and prints that a job is over, and returns its results if it has any. `failed` says why it ended, if not as
    it should. Where no process waits for all jobs, the last one makes the summary."""
    from specbench.results.reader import read_result

    result = None
    try:
        result = read_result(folder)
        told = one_line(result)
    except ConfigError:
        told = "no result"
    if failed:
        told = f"failed, see {folder / 'run.log'}"
    elif not ran:
        told = f"finished before, skipped (force=true redoes it): {told}"
    job, jobs = HydraConfig.get(), None
    sweep = Sweep.running or Sweep.of_job or Sweep()
    try:
        jobs = sweep.end(config, folder, failed)
        if jobs is not None and sweep is Sweep.of_job:
            sweep.pace.jobs, sweep.pace.over = len(jobs.jobs), len(jobs.over()) - 1
    except ConfigError as error:
        log.warning("%s", error)
    sweep.pace.end(f"{sweep.name_of(job.job.num, list(job.overrides.task))}: {told}", ran)
    if jobs is not None and sweep is Sweep.of_job and jobs.all_over():
        last_job(jobs)
    return None if failed else result


def last_job(jobs: JobList) -> None:
    """Makes the summary in the process of the job that ended last. That it fails is logged: the files are there."""
    try:
        log.info("the last job of the sweep: the summary is in %s", jobs.folder)
        summarise(jobs, printed=False)
    except Exception as error:
        log.warning("no summary of the sweep (%s): python -m specbench.collect %s", first_line(error), jobs.folder)
        log.info("no summary", exc_info=error)


@contextmanager
def own_place(config: DictConfig) -> Iterator[None]:
    """Inside, a job of a launcher that runs several at a time has cores, and a CUDA device, of its own. Raises
    ConfigError."""
    hydra = HydraConfig.get()
    name = launcher_of(hydra)
    if name == SERIAL:
        yield
        return
    refuse_workers_of_jobs(int(config.workers), name)
    settings: Any = OmegaConf.to_container(hydra.launcher, resolve=True)
    with pin_cores(name, cores_of(name, settings), needs_device(name, str(config.device)), tell):
        yield


def launcher_of(hydra: Any) -> str:
    """The name of the launcher of a sweep, from `hydra` of its configuration."""
    return str(hydra.runtime.choices.get("hydra/launcher", SERIAL))


def refuse_blocked(folder: Path) -> None:
    """Raises ConfigError if something stands where a job's folder, or the files that Hydra opens in it, should be."""
    for path in (folder / ".hydra", folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file where a folder should be: remove it, or choose another folder")
    if (folder / "run.log").is_dir():
        raise ConfigError(f"{folder / 'run.log'} is a folder where a file should be: remove it")
