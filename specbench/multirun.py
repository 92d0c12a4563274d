"""Multiruns: every job is checked before the first one starts, and a table closes the sweep."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from specbench.report.tables import multirun_rows, multirun_table, show, to_csv
from specbench.results import write_text


class CheckedSweeper(BasicSweeper):
    """Hydra's own sweeper, which also refuses a sweep with a job that cannot run."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        from specbench.config import check

        for overrides in batch:
            check(
                self.hydra_context.config_loader.load_sweep_config(
                    master_config=self.config, sweep_overrides=list(overrides)
                )
            )


class SummaryTable(Callback):
    """Prints one row per job at the end of a multirun, and writes the rows to summary.csv."""

    def __init__(self) -> None:
        self.jobs: list[tuple[list[str], Path]] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        self.jobs.append((list(job_return.overrides), Path(config.hydra.runtime.output_dir)))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        found = [(overrides, _read(out_dir / "results.json")) for overrides, out_dir in self.jobs]
        rows = multirun_rows(found)
        write_text(folder / "summary.csv", to_csv(rows))
        show(multirun_table(rows, f"{len(rows)} jobs, written to {folder / 'summary.csv'}"))
        missing = sum(result is None for _, result in found)
        if missing:
            sys.exit(f"specbench: {missing} of {len(rows)} jobs have no result, see their run.log")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
