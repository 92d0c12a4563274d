"""`python -m specbench`: one run, or the jobs of a multirun."""

import gc
import logging
import os
import shlex
import shutil
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from specbench import BEGUN, __version__
from specbench.config.paths import conf_dir
from specbench.errors import ConfigError, IncompleteError, VerdictError, answering, comes_from, stop
from specbench.run.signals import exit_code, handled

if TYPE_CHECKING:
    from specbench.run.sweep import Sweep

log = logging.getLogger("specbench")
WAIT = 7 * 86400.0  # seconds that a job waits for another process that runs the same one, if several run at a time
_begun = [BEGUN]  # until the first run has taken it


def main() -> None:
    """Runs Hydra; a mistake of the user's becomes one sentence and exit code 2, without a traceback."""
    if "torch" not in sys.modules:
        gc.disable()  # until all is imported: a million objects that are never garbage, and a second to look at them
    ignore_schema_warning()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra hands exceptions to us instead of exiting
    sys.argv[0] = "specbench"
    if str(Path.cwd()) not in sys.path:  # the console script has not what `python -m` has: modules beside the user
        sys.path.append(str(Path.cwd()))
    if "--version" in sys.argv[1:]:  # Hydra would print its own
        print(f"specbench {__version__}")
        return
    try:
        with answering(), handled():
            _main()
    except KeyboardInterrupt as error:
        stop(f"interrupted: {error}" if error.args else "interrupted before anything was finished", exit_code())


def ignore_schema_warning() -> None:
    """Hydra checks our configuration of a launcher against the launcher's own types, as it should, and warns that a
    later version will not."""
    warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")


def _main() -> None:
    refuse_words_of_no_run()
    if any(word.lstrip("+").startswith("target") for word in sys.argv[1:]):
        from specbench.config.default_drafter import with_drafter
        from specbench.results.terminal import show

        sys.argv[1:] = with_drafter(sys.argv[1:], show)
    try:
        job()
    except (ConfigError, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        if (sweep := current_sweep()) is None:
            raise
        raise KeyboardInterrupt(sweep.interrupted()) from None
    except Exception as error:
        if comes_from(one_run, error):
            raise
        if (sweep := current_sweep()) is not None and (sentence := sweep.ended_early(error)):
            stop(sentence, 1)
        refused_by_hydra(error)


def refuse_words_of_no_run() -> None:
    """Raises ConfigError for words of the command line that Hydra would misread or not explain."""
    from specbench.config.compose import refuse_no_overrides

    refuse_no_overrides(sys.argv[1:], get_args_parser()._option_string_actions)


def current_sweep() -> "Sweep | None":
    """The sweep that this process runs, until its summary is written."""
    loaded = sys.modules.get("specbench.run.sweep")  # no mistake waits until it is loaded
    return None if loaded is None else loaded.Sweep.current


def refused_by_hydra(error: Exception) -> NoReturn:
    """Ends the program after an error of Hydra's composition, or of the folder or its run.log, which Hydra makes."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError) and not isinstance(cause, HydraException):  # some of Hydra's own are OSErrors too
        log.debug("the run ended with an error", exc_info=error)
        where = f"{cause.filename} cannot be used" if cause.filename else "a file cannot be read or written"
        stop(f"{where} ({cause.strerror or cause}): choose another folder with hydra.run.dir=D or name=NAME", 2)
    from specbench.config.compose import explain

    stop(explain(error, sys.argv[1:]), 2)


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
def job(config: DictConfig) -> None:
    """Runs one job of Hydra's. In a multirun a job that fails is logged, and the next one starts."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        job_of_sweep(config)
        return
    try:
        one_run(config)
    except ConfigError as error:  # before Hydra adds a line of its own
        refused(error)
    except (VerdictError, IncompleteError) as error:
        stop(str(error), 3 if isinstance(error, VerdictError) else 1)


def refused(error: ConfigError) -> NoReturn:
    """Ends the program; a folder that holds nothing but Hydra's files goes, unless the user has named it. Where nothing
    was decoded the configuration goes in any case: what was refused may hold a password."""
    from specbench.results.atomic_files import PART
    from specbench.results.folder_lock import remove_if_empty

    logging.getLogger().error("%s", error)  # in run.log alone, if the folder stays
    folder = Path(HydraConfig.get().runtime.output_dir)
    if not (folder / PART).exists():
        shutil.rmtree(folder / ".hydra", ignore_errors=True)
    keys = {override.lstrip("+").partition("=")[0] for override in HydraConfig.get().overrides.hydra}
    if not keys & {"hydra.run.dir", "hydra.run"}:
        remove_if_empty(folder)
    stop(str(error), 2)


def job_of_sweep(config: DictConfig) -> None:
    """Runs a job and prints its line."""
    from specbench.config.memory import give_back
    from specbench.run.sweep import Sweep

    sweep = Sweep.current or Sweep()
    if sweep.of_job:
        _begun.clear()  # another process has, by its own clock
    ran, failed = True, ""
    try:
        with sweep.running(config):
            give_back()  # of the job before
            ran = one_run(config, sweep)
    except (ConfigError, VerdictError, IncompleteError) as error:
        log.error("%s", error)
        failed = str(error)
    except Exception as error:
        log.exception("the job failed")
        failed = type(error).__name__
    sweep.end(Path(HydraConfig.get().runtime.output_dir), ran, failed)


def one_run(config: DictConfig, sweep: "Sweep | None" = None) -> bool:
    """Runs the composed configuration; as a job of a sweep not if its folder holds the results. Returns whether it ran.
    Raises ConfigError, VerdictError with strict=true, or IncompleteError with repeats."""
    from specbench.config.validate import check

    begun, hydra_config = _begun.pop() if _begun else time.perf_counter(), HydraConfig.get()
    out_dir = Path(hydra_config.runtime.output_dir)
    checked = check(config, hydra_config.runtime.choices)
    from specbench.results.console import in_parallel, info, place_of_job, print_result
    from specbench.run.execute import claimed, execute_one
    from specbench.run.jobs import RunJob

    log.info("%s", shlex.join(sys.argv))
    job = RunJob(list(hydra_config.overrides.task), out_dir, checked)
    placement = sweep.placement if sweep is not None else lambda: None
    with claimed(job, WAIT if in_parallel() else 0) as earlier:
        if sweep is not None and earlier.finished and not checked.root.force:
            return False
        if sweep is not None and earlier.again and not earlier.corrupt:
            log.warning("%s is run again: %s", out_dir, earlier.again)
        if checked.root.repeats > 1:
            from specbench.run.repeats import run_repeats

            gc.enable()
            run_repeats(config, job, placement)
            return True
        if sweep is None and earlier.finished:
            info("This run is in its folder already: it is measured again, and the earlier results are kept beside it.")
        import specbench.config.build
        import specbench.run.run  # noqa: F401

        gc.enable()
        kind, written = "run" if sweep is None else "job", partial(print_result, folder=out_dir)
        execute_one(job, kind, announce=info, place=place_of_job(), written=written, begun=begun, placement=placement)
    return True
