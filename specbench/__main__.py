"""`python -m specbench`: validates, builds, runs and writes. `--help` lists what can be set."""

import logging
import os
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from specbench import BEGUN
from specbench.config.paths import conf_dir, register_resolvers
from specbench.errors import ConfigError, IncompleteError, VerdictError, answering, comes_from, explain, stop
from specbench.run.signals import exit_code, handled
from specbench.run.startup import imported, importing, quiet

if TYPE_CHECKING:
    from specbench.config.validate import ValidatedConfig

log = logging.getLogger("specbench")
register_resolvers()
WAIT = 7 * 86400.0  # seconds that a job waits for another process that runs the same one, if several run at a time
_begun = [BEGUN]  # until the first run has taken it


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
def job(config: DictConfig) -> float | None:
    """Runs one job of Hydra's. In a multirun a job that fails is logged, and the next one starts."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return job_of_sweep(config)
    try:
        one_run(config)
    except ConfigError as error:  # before Hydra adds a line of its own
        refused(error)
    except VerdictError as error:
        stop(str(error), 3)
    except IncompleteError as error:
        stop(str(error), 1)
    return None


def refused(error: ConfigError) -> NoReturn:
    """Ends the program; a folder that holds nothing but Hydra's files goes, unless the user has named it."""
    from specbench.results.empty_dirs import remove_if_empty

    logging.getLogger().error("%s", error)  # in run.log alone, if the folder stays
    keys = {override.lstrip("+").partition("=")[0] for override in HydraConfig.get().overrides.hydra}
    if not keys & {"hydra.run.dir", "hydra.run"}:
        remove_if_empty(Path(HydraConfig.get().runtime.output_dir))
    stop(str(error), 2)


def job_of_sweep(config: DictConfig) -> float | None:
    """Runs a job and prints its line. Returns the measured speedup, for Hydra's optimisers, or None if it failed."""
    from specbench.config.memory import give_back
    from specbench.run.signals import preemption_signal
    from specbench.run.sweep import Sweep, end_of_job, own_place

    if Sweep.of_job is not None:
        _begun.clear()  # another process has, by its own clock
    ran, failed = True, ""
    try:
        with preemption_signal(), own_place(config):
            give_back()  # of the job before
            ran = one_run(config, skip_finished=True)
    except (ConfigError, VerdictError, IncompleteError) as error:
        log.error("%s", error)
        failed = str(error)
    except Exception as error:
        log.exception("the job failed")
        failed = type(error).__name__
    result = end_of_job(config, Path(HydraConfig.get().runtime.output_dir), ran, failed)
    return None if result is None else float(result["speedup"]["measured"])


def one_run(config: DictConfig, skip_finished: bool = False) -> bool:
    """Runs the composed configuration; with `skip_finished` not if its folder holds the results. Returns whether it
    ran. Raises ConfigError, VerdictError with strict=true, or IncompleteError with repeats."""
    from specbench.config.validate import check

    begun, runtime = _begun.pop() if _begun else time.perf_counter(), HydraConfig.get().runtime
    out_dir = Path(runtime.output_dir)
    checked = check(config, runtime.choices)
    if checked.choices["target"].settings.processes() > 1:
        from specbench.component import from_ring
        from specbench.decoding import processes

        ran: bool | None = from_ring("tensor_parallel.launcher.run_elsewhere")(checked, out_dir, skip_finished)
        if ran is not None:
            return ran
        if not processes.current.is_first_rank:
            imported()
            from_ring("tensor_parallel.launcher.run_worker_rank")(checked)
            return True

    from specbench.results.completion import examine, move_aside
    from specbench.results.console import in_parallel
    from specbench.results.folder_lock import locked

    log.info("%s", shlex.join(sys.argv))
    with locked(out_dir, WAIT if in_parallel() else 0):
        earlier = examine(out_dir, checked.identity())
        if earlier.finished and skip_finished and not checked.root.force:
            return False
        if earlier.corrupt:
            log.warning("%s is run again: %s; moved to %s", out_dir, earlier.corrupt, move_aside(out_dir))
        elif skip_finished and earlier.again:
            log.warning("%s is run again: %s", out_dir, earlier.again)
        elif earlier.finished and not skip_finished and checked.root.repeats == 1:
            from specbench.results.console import tell

            tell("This run is in its folder already: it is measured again, and the earlier results are kept beside it.")
        if checked.root.repeats > 1:
            from specbench.run.repeats import run_repeats

            imported()
            run_repeats(config, checked, out_dir)
        else:
            _measure(checked, out_dir, "job" if skip_finished else "run", begun)
        return True


def _measure(checked: "ValidatedConfig", out_dir: Path, kind: str, begun: float) -> None:
    """Runs the configuration in `out_dir`, which is locked, and prints the results. `kind` is what the logger is told:
    "run" or "job"; `begun` is when it began. Raises ConfigError, or VerdictError with strict=true."""
    import specbench.config.build
    import specbench.run.run  # noqa: F401
    from specbench.results.console import place_of_job, print_result, tell
    from specbench.run.execute import measure

    imported()
    overrides = list(HydraConfig.get().overrides.task)
    measure(checked, out_dir, overrides, kind, tell, place_of_job(), partial(print_result, folder=out_dir), begun)


def main() -> None:
    """Runs Hydra; a mistake of the user's becomes one sentence and exit code 2, without a traceback."""
    importing()
    quiet()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra hands exceptions to us instead of exiting
    sys.argv[0] = "specbench"
    if str(Path.cwd()) not in sys.path:  # the console script has not what `python -m` has: modules beside the user
        sys.path.append(str(Path.cwd()))
    if "--version" in sys.argv[1:]:  # Hydra would print its own
        from specbench import __version__

        print(f"specbench {__version__}")
        return
    try:
        with answering(), handled():
            _main()
    except KeyboardInterrupt as error:
        stop(f"interrupted: {error}" if error.args else "interrupted before anything was finished", exit_code())


def _main() -> None:
    try:
        job()
    except (ConfigError, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        from specbench.contrib.cluster.launchers import go_on
        from specbench.run.sweep import Sweep

        if Sweep.running is None:
            raise
        try:
            sweep = Sweep.running
            told, _ = sweep.summarise()
        except ConfigError as error:
            told = str(error)
        raise KeyboardInterrupt(told + go_on(sweep.launcher, sweep.folder)) from None
    except Exception as error:
        if comes_from(one_run, error):
            raise
        ended_early(error)
        cause = error if isinstance(error, OSError) else error.__cause__
        # Of the folder, or of its run.log, which Hydra makes; some of Hydra's own errors are OSErrors too.
        if isinstance(cause, OSError) and not isinstance(cause, HydraException):
            log.debug("the run ended with an error", exc_info=error)
            where = f"{cause.filename} cannot be used" if cause.filename else "a file cannot be read or written"
            stop(f"{where} ({cause.strerror or cause}): choose another folder with hydra.run.dir=D or name=NAME", 2)
        from specbench.config.schema import known_keys

        stop(explain(error, known_keys(sys.argv[1:]), sys.argv[1:]), 2)


def ended_early(error: Exception) -> None:
    """Ends the program with the summary of a sweep whose launcher, which runs its jobs in other processes, has failed;
    does nothing if there is none."""
    from specbench.contrib.cluster.launchers import SERIAL
    from specbench.errors import first_line
    from specbench.run.sweep import Sweep

    sweep = Sweep.running
    if sweep is None or sweep.launcher == SERIAL:
        return
    log.info("the launcher failed", exc_info=error)
    told, _ = sweep.summarise()
    why = f"{type(error).__name__}: {first_line(error)}"
    stop(f"hydra/launcher={sweep.launcher} ended early ({why}): {told}; the same command goes on from there", 1)


if __name__ == "__main__":
    main()
