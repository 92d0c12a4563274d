"""Sweeps whose jobs run in other processes, at the same time or on other machines."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from specbench.config.validate import ValidatedConfig
from specbench.contrib.cluster import cpu_affinity, launchers
from specbench.contrib.cluster.job_list import SERIAL, JobList, NotedIdentity, read_list
from specbench.contrib.cluster.preemption import preemption_signal
from specbench.errors import ConfigError, first_line
from specbench.results.console import Pace, info
from specbench.results.fingerprint import Identity
from specbench.results.schema import Placement
from specbench.run.sweep import Sweep
from specbench.run.sweep_summary import summarise
from specbench.run_config import RunConfig

log = logging.getLogger(__name__)


class ClusterSweep(Sweep):
    """Lists all jobs in the sweep's folder. Launchers take it to the processes of their jobs, where it knows of its own
    job only, gives it cores of its own, and, if the job ends last, makes the summary."""

    def __init__(self) -> None:
        super().__init__()
        self.launcher = SERIAL
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
        from specbench.run.command import ignore_schema_warning

        self.__init__()  # type: ignore[misc]
        ignore_schema_warning()
        self.of_job = True
        self.place, self.launcher = state["place"], state["launcher"]
        self.argv, self.cwd = state["argv"], state["cwd"]
        if os.path.isdir(self.cwd):
            os.chdir(self.cwd)

    @property
    def here(self) -> bool:  # type: ignore[override]
        return not launchers.launcher_named(self.launcher).elsewhere

    def begin(self, config: DictConfig) -> None:
        self.launcher = launcher_of(config.hydra)
        super().begin(config)
        launchers.refuse(self.launcher, settings_of_launcher(config.hydra), str(config.device))
        self.list = self.planned()
        self.list.write()

    def refuse(self, root: RunConfig) -> None:
        refuse_workers_of_jobs(root.workers, self.launcher)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if self.of_job:
            Sweep.current, self.pace = self, Pace(0, alone=False)
            sys.argv = self.argv or sys.argv  # what was asked for, and not how the launcher started this process

    @contextmanager
    def running(self, config: DictConfig) -> Iterator[None]:
        """Inside, a job of a launcher that runs several at a time has cores, and a CUDA device, of its own."""
        hydra = HydraConfig.get()
        name = launcher_of(hydra)
        if name == SERIAL:
            yield
            return
        refuse_workers_of_jobs(int(config.workers), name)
        cores = launchers.cores_of(name, settings_of_launcher(hydra))
        device = launchers.needs_device(name, str(config.device))
        with preemption_signal(), cpu_affinity.pin_cores(name, cores, device, info):
            yield

    def placement(self) -> Placement | None:
        return cpu_affinity.placement()

    def planned(self) -> JobList:
        if self.place is not None:  # in the process of a job
            return read_list(self.place)
        jobs = super().planned()
        start: dict[str, Any] = {} if self.list is None else {"id": self.list.id, "started": self.list.started}
        return JobList(**vars(jobs), launcher=self.launcher, **start)

    def identity_of(self, checked: ValidatedConfig) -> Identity:
        identity = checked.identity(self.here)
        return identity if self.here else NotedIdentity(**vars(identity))

    def all_overrides(self) -> list[list[str]]:
        return super().all_overrides() or [job.overrides for job in (self.list.jobs if self.list else ())]

    def end(self, folder: Path, ran: bool, failed: str) -> None:
        """As of any sweep. Where no process waits for all jobs, the last one makes the summary."""
        try:
            if self.place is not None:
                self.list = read_list(self.place)
            number = None if self.list is None else self.list.number_of(folder)
            if self.list is not None and number is not None:
                self.list.end(number, failed)
        except ConfigError as error:
            log.warning("%s", error)
        if self.of_job and self.list is not None:
            self.pace.jobs, self.pace.over = len(self.list.jobs), len(self.list.over()) - 1
        super().end(folder, ran, failed)
        if self.of_job and self.list is not None and self.list.all_over():
            last_job(self.list)

    def interrupted(self) -> str:
        return super().interrupted() + launchers.go_on(self.launcher, self.folder)

    def ended_early(self, error: Exception) -> str | None:
        """A sentence after the launcher, which runs jobs in other processes, has failed."""
        if self.launcher == SERIAL:
            return None
        log.info("the launcher failed", exc_info=error)
        why = f"{type(error).__name__}: {first_line(error)}"
        sentence, _ = self.summarise()
        return f"hydra/launcher={self.launcher} ended early ({why}): {sentence}; the same command goes on from there"


def last_job(jobs: JobList) -> None:
    """Makes the summary in the process of the job that ended last. That it fails is logged: the files are there."""
    try:
        log.info("the last job of the sweep: the summary is in %s", jobs.folder)
        summarise(jobs, printed=False)
    except Exception as error:
        log.warning("no summary of the sweep (%s): python -m specbench.collect %s", first_line(error), jobs.folder)
        log.info("no summary", exc_info=error)


def launcher_of(hydra: Any) -> str:
    """The name of the launcher of a sweep, from `hydra` of its configuration."""
    return str(hydra.runtime.choices.get("hydra/launcher", SERIAL))


def settings_of_launcher(hydra: Any) -> Any:
    """The settings of the launcher as plain Python."""
    return OmegaConf.to_container(hydra.launcher, resolve=True)


def refuse_workers_of_jobs(workers: int, launcher: str) -> None:
    """Raises ConfigError if a job that another process runs, beside other jobs, would have several workers: they would
    want cores that the jobs have."""
    if workers > 1 and launcher != SERIAL:
        raise ConfigError(
            f"workers={workers} is not possible with hydra/launcher={launcher}: jobs and their workers would wait for "
            "each other's cores, so use workers=1, or hydra/launcher=basic"
        )
