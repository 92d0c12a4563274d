"""Multiruns: checks every job before the first one starts, and prints a table of all jobs at the end."""

import sys
from pathlib import Path
from typing import Any

from hydra import compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from specbench.config.checks import check
from specbench.report.tables import GOOD, multirun_rows, multirun_tables, show, to_csv, word
from specbench.settings import ConfigError, explain, stop
from specbench.storage.atomic import write_text
from specbench.storage.read import read_result


class Sweep(Callback):
    """Hydra callback: checks all jobs at the start; at the end prints one row per job and writes summary.csv."""

    def __init__(self) -> None:
        self.jobs: list[tuple[list[str], Path]] = []
        self.strict = False

    def on_multirun_start(self, config: DictConfig, config_name: str = "config", **kwargs: Any) -> None:
        """Checks every job, so that a mistake in the last one is not found after hours of the others."""
        if not config.hydra.sweeper._target_.endswith(".BasicSweeper"):
            return  # an optimiser chooses each job after the one before
        wanted = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        given: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        parsed = OverridesParser.create().parse_overrides([*wanted, *given])
        try:
            for overrides in BasicSweeper.split_arguments(parsed, None)[0]:
                check(compose(config_name, overrides=overrides, return_hydra_config=True))
        except ConfigError as error:  # Hydra would only warn of it
            stop(str(error), 2)
        except Exception as error:
            stop(explain(error, [], [*wanted, *given]), 2)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        self.strict = self.strict or config.strict
        self.jobs.append((list(job_return.overrides or []), Path(config.hydra.runtime.output_dir)))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        found = [(overrides, read_result(out_dir)) for overrides, out_dir in self.jobs]
        rows = multirun_rows(found)
        write_text(folder / "summary.csv", to_csv(rows))
        show(*multirun_tables(rows, f"{len(rows)} jobs, written to {folder / 'summary.csv'}"))
        missing = sum(result is None for _, result in found)
        if missing:
            sys.exit(f"specbench: {missing} of {len(rows)} jobs have no result, see their run.log")
        bad = sum(word(result["lossless"]) not in GOOD for _, result in found if result is not None)
        if self.strict and bad:
            stop(f"the verdict on losslessness is not good in {bad} of {len(rows)} jobs", 3)
