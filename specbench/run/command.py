"""`python -m specbench`: one run, or the jobs of a sweep."""

import gc
import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from specbench import BEGUN, __version__
from specbench.config.compose import conf_dir, known_keys, refuse_no_overrides
from specbench.errors import CommandError, ConfigError, answering, comes_from, first_line, stop

log = logging.getLogger("specbench")
INTERRUPTED = 130  # exit code after Ctrl-C or SIGTERM


def main() -> None:
    """Runs Hydra. A mistake of the user's becomes one sentence and exit code 2, without a traceback."""
    if "--version" in sys.argv[1:]:  # Hydra would print its own
        print(f"specbench {__version__}")
        return
    gc.disable()  # until all is imported: a million objects that are never garbage, and a second to look at them
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra hands exceptions to us instead of exiting
    # Hydra checks our settings of a launcher against its own types, as it should, and says that it will not for ever.
    warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")
    sys.argv[0] = "specbench"
    if str(Path.cwd()) not in sys.path:  # the console script lacks what `python -m` has: modules of the working folder
        sys.path.append(str(Path.cwd()))
    with answering(), interruptible():
        refuse_no_overrides(sys.argv[1:], get_args_parser()._option_string_actions)
        try:
            job()
        except (CommandError, BrokenPipeError):
            raise
        except Exception as error:
            if comes_from(run_composed, error):
                raise
            refused_by_hydra(error)


@contextmanager
def interruptible() -> Iterator[None]:
    """The body of a command that decodes: SIGTERM acts as Ctrl-C does, and either ends the program with a sentence."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        left = str(error) or "what was finished is kept"
        stop(f"interrupted: {left}; the same command goes on from there", INTERRUPTED)


def refused_by_hydra(error: Exception) -> NoReturn:
    """Ends the program after an error of Hydra's composition, or of the folder or its run.log, which Hydra makes."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError) and not isinstance(cause, HydraException):  # some of Hydra's own are OSErrors too
        where = f"{cause.filename} cannot be used" if cause.filename else "a file cannot be read or written"
        stop(f"{where} ({cause.strerror or cause}): choose another folder with hydra.run.dir=D or name=NAME", 2)
    from specbench.config.mistakes import explain

    stop(explain(error, sys.argv[1:], known_keys), 2)


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
def job(config: DictConfig) -> None:
    """Runs a job of Hydra's. Errors end a single run here, before Hydra adds a line; in a sweep the next one starts."""
    of_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        said = run_composed(config, folder, of_sweep)
    except CommandError as error:
        logging.getLogger().error("%s", error)  # in run.log alone
        keys = {override.lstrip("+").partition("=")[0] for override in HydraConfig.get().overrides.hydra}
        if isinstance(error, ConfigError) and not keys & {"hydra.run.dir", "hydra.run"}:  # else the user has named it
            from specbench.run.jobs import remove_unused

            remove_unused(folder)
        if not of_sweep:
            stop(str(error), error.code)
        said = str(error)
    except Exception as error:
        if not of_sweep:
            raise
        log.exception("the job failed")
        said = f"failed ({first_line(error)}), see {folder / 'run.log'}"
    if of_sweep:
        print(f"{HydraConfig.get().job.override_dirname or 'default'}: {said}", flush=True)


def run_composed(config: DictConfig, folder: Path, of_sweep: bool) -> str:
    """Runs a configuration and prints its results, in a sweep as one line. Raises CommandError or KeyboardInterrupt."""
    from specbench.run.jobs import finished_job, job_of, refuse_verdict

    known, kind = HydraConfig.get(), "job" if of_sweep else "run"
    wanted = job_of(config, folder, known.overrides.task, kind, known.runtime.choices)
    from specbench.report import terminal

    log.info("%s", shlex.join(sys.argv))
    checked = wanted.checked
    if of_sweep and not checked.root.force and (before := finished_job(wanted)) is not None:
        return f"finished before, skipped (force=true redoes it): {terminal.one_line(before.results)}"
    if checked.root.repeats > 1:
        from specbench.run.collect import run_repeats

        run = run_repeats(wanted)
    else:
        from specbench.run.run import execute_one

        gc.enable()
        how = {"place": f"job {known.job.num + 1}: "} if of_sweep else {"announce": print}
        run = execute_one(wanted, begun=BEGUN, **how)
    if not of_sweep:
        terminal.summary(run.results, folder)
    refuse_verdict(wanted, run)
    return terminal.one_line(run.results)


class Sweep(Callback):
    """Hydra callback of every command; a single run has none of its events. Jobs may run in other processes, as with
    Hydra's launchers for joblib, Slurm and Ray: nothing is kept but what stands in their folders."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        from specbench.run import sweep

        self.jobs = sweep.begin(config)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from specbench.run import sweep

        sweep.end(self.jobs, Path(config.hydra.sweep.dir))
