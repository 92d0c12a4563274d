"""`python -m specbench`: validates, builds, runs and writes. `--help` lists what can be set."""

import logging
import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.text import Text

from specbench.paths import conf_dir, register_resolvers
from specbench.settings import ConfigError, VerdictError, comes_from, explain, stop

log = logging.getLogger("specbench")
register_resolvers()


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
def job(config: DictConfig) -> float | None:
    """Runs one job of Hydra's. In a multirun a job that fails is logged, and the next one starts."""
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        try:
            return one_run(config)
        except ConfigError as error:  # before Hydra adds a line of its own
            stop(str(error), 2)
        except VerdictError as error:
            stop(str(error), 3)
    try:
        return one_run(config, skip_finished=True)
    except (ConfigError, VerdictError) as error:
        log.error("%s", error)
    except Exception:
        log.exception("the job failed")
    return None


def one_run(config: DictConfig, skip_finished: bool = False) -> float | None:
    """Runs the composed configuration. Returns the measured speedup, for Hydra's optimisers; None if the run was
    finished before and is skipped. Raises ConfigError, or VerdictError with strict=true."""
    from specbench.config.build import build
    from specbench.config.checks import check
    from specbench.progress import decoding_progress
    from specbench.report.run_table import run_table
    from specbench.report.tables import GOOD, show
    from specbench.run.run import run
    from specbench.storage.read import is_finished
    from specbench.storage.write import write_config, write_result

    runtime = HydraConfig.get().runtime
    out_dir = Path(runtime.output_dir)
    checked = check(config, runtime.choices)
    if skip_finished and not checked.root.force and is_finished(out_dir, checked.digest):
        log.warning("finished before, skipped (force=true redoes it): %s", out_dir)
        return None
    write_config(checked.resolved, out_dir)
    parts = build(checked, lambda text: show(Text(text, style="dim")))
    with decoding_progress() as progress:
        result, record = run(parts, out_dir, progress)
    write_result(result, record, checked.digest, out_dir, parts.target.tokenizer)
    show(run_table(result.as_dict(), out_dir))
    logger = checked.choices["logger"]
    logger.kind.from_settings(logger.settings).log(result, record, out_dir)
    if result.status == "interrupted":
        raise KeyboardInterrupt
    lossless = result.lossless
    if checked.root.strict and lossless.verdict not in GOOD:
        raise VerdictError(f"strict=true: the verdict is {lossless.verdict} ({lossless.reason}), see {out_dir}")
    return result.speedup.measured


def main() -> None:
    """Runs Hydra; a mistake of the user's becomes one sentence and exit code 2, without a traceback."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra hands exceptions to us instead of exiting
    sys.argv[0] = "specbench"
    try:
        job()
    except ConfigError as error:
        stop(str(error), 2)
    except KeyboardInterrupt:
        stop("interrupted", 130)
    except Exception as error:
        if comes_from(one_run, error):
            raise
        from specbench.config.schema import known_keys

        stop(explain(error, known_keys(sys.argv[1:]), sys.argv[1:]), 2)


if __name__ == "__main__":
    main()
