"""Multiruns: checks every job before the first one starts, and prints a table of all jobs at the end."""

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from specbench.config.checks import Checked, check, check_early
from specbench.config.schema import known_keys
from specbench.interrupts import held
from specbench.paths import fields
from specbench.report.tables import GOOD, multirun_rows, multirun_tables, own_words, show, to_csv, word
from specbench.settings import ConfigError, explain, stop
from specbench.storage.atomic import write_text, writing
from specbench.told import Pace, in_short
from specbench.visible import first_line

log = logging.getLogger(__name__)
SUMMARIES = "summaries"  # the folder of each command's own summary.csv


class Sweep(Callback):
    """Hydra callback: checks all jobs at the start; at the end prints one row per job and writes summary.csv."""

    running: ClassVar["Sweep | None"] = None  # until its summary is written

    def __init__(self) -> None:
        self.jobs: list[tuple[list[str], Path, Checked]] = []
        self.folder = Path()
        self.command = "default"  # its overrides, as the name of a file
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.known = False  # whether `jobs` are all of them, before they start
        self.pace = Pace(0)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Checks every job, so that a mistake in the last one is not found after hours of the others."""
        self.folder = Path(config.hydra.sweep.dir)
        self.command = name_of_command(config)
        self.known = config.hydra.sweeper._target_.endswith(".BasicSweeper")
        try:
            if self.known:  # otherwise an optimiser chooses each job after the one before
                self.expect_all(config)
        except ConfigError as error:  # Hydra would only warn of it
            stop(str(error), 2)
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
                check_early(job)  # all of them before torch is loaded
                jobs.append((job, list(overrides), Path(job.hydra.sweep.dir) / str(job.hydra.sweep.subdir)))
            for expected in jobs:
                self._expect(*expected)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(explain(error, known_keys(given), [*wanted, *given])) from error

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if Sweep.running is self and not self.known:
            self._expect(config, list(config.hydra.overrides.task), Path(config.hydra.runtime.output_dir))

    def name_of(self, number: int, overrides: list[str]) -> str:
        """What tells a job from the others, in words."""
        if number >= len(self.jobs):
            return " ".join(overrides) or "without overrides"
        words = own_words([given for given, _, _ in self.jobs])[number]
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
        checked = check(config)
        refuse_blocked(folder)
        self.jobs.append((overrides, folder, checked))

    def summarise(self, printed: bool = True) -> tuple[str, int]:
        """Writes summary.csv, and the same into a file of this command's, and, unless `printed` is False, prints the
        table, from the jobs that are finished now or were before. Returns a sentence and the exit code: 1 if a job has
        no result, 3 if the verdict of one with strict=true is not good. Raises ConfigError if summary.csv cannot be
        written."""
        from specbench.storage.finished import examine

        with held():
            found = [(overrides, examine(folder, checked.identity())) for overrides, folder, checked in self.jobs]
            rows = multirun_rows([(overrides, e.result if e.finished else None) for overrides, e in found])
            path, own = self.folder / "summary.csv", self.folder / SUMMARIES / f"{self.command}.csv"
            if printed:
                show(*multirun_tables(rows, f"{len(rows)} job{'s' * (len(rows) > 1)}, written to {path}", path.name))
            with writing(path):
                own.parent.mkdir(parents=True, exist_ok=True)
            for file in (own, path):
                write_text(file, to_csv(rows))
            Sweep.running = None
            # A parallel launcher's jobs are other processes: of theirs only the times are known, in seconds.
            later = any(e.result is not None and e.result["provenance"]["started"] > self.started for _, e in found)
            if self.pace.seconds or later:
                log_sweep(self.jobs[0][2], rows, self.folder)
        missing = sum(not earlier.finished for _, earlier in found)
        strict = [checked.root.strict for _, _, checked in self.jobs]
        bad = sum(s and e.result is not None and word(e.result["lossless"]) not in GOOD
                  for s, (_, e) in zip(strict, found, strict=True))  # fmt: skip
        if bad and not missing:
            return f"strict=true: the verdict of {bad} of {len(rows)} jobs is not passed", 3
        return f"{missing} of {len(rows)} jobs have no result, see their run.log", int(missing > 0)


def name_of_command(config: DictConfig) -> str:
    """The overrides of a sweep as the name of a file, without those that its results do not depend on; what is swept
    may be given as `hydra.sweeper.params` too."""
    own: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    own += [word for word in config.hydra.overrides.hydra if word.lstrip("+~").startswith("hydra.sweeper.params")]
    ignored = {*config.hydra.job.config.override_dirname.exclude_keys} - {"experiment"}
    return fields(",".join(word for word in own if word.lstrip("+~").partition("=")[0] not in ignored))


def end_of_job(folder: Path, ran: bool, failed: str) -> dict[str, Any] | None:
    """Prints the line of a job that is over, and returns its results if it has any. `failed` says why it ended, if not
    as it should."""
    from specbench.storage.read import read_result

    result = None
    try:
        result = read_result(folder)
        told = in_short(result)
    except ConfigError:
        told = "no result"
    if failed:
        told = f"failed, see {folder / 'run.log'}"
    elif not ran:
        told = f"finished before, skipped (force=true redoes it): {told}"
    job = HydraConfig.get()
    sweep = Sweep.running or Sweep()  # a parallel launcher's processes know nothing of each other
    sweep.pace.end(f"{sweep.name_of(job.job.num, list(job.overrides.task))}: {told}", ran)
    return None if failed else result


def log_sweep(checked: Checked, rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Gives the table of a sweep to the logger of its jobs. That it fails is logged: the files are there."""
    choice = checked.choices["logger"]
    try:
        choice.kind.from_settings(choice.settings).log_sweep(checked.root.name, rows, folder)
    except Exception as error:
        log.warning("logger=%s has no table of the sweep (%s)", choice.name, first_line(error))


def refuse_blocked(folder: Path) -> None:
    """Raises ConfigError if something stands where a job's folder, or the files that Hydra opens in it, should be."""
    for path in (folder / ".hydra", folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file where a folder should be: remove it, or choose another folder")
    if (folder / "run.log").is_dir():
        raise ConfigError(f"{folder / 'run.log'} is a folder where a file should be: remove it")
