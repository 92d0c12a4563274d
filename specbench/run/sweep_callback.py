"""Hydra's callback of every command: loads what a sweep needs when one begins, which a single run does without."""

from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from specbench.errors import first_line, stop


class SweepCallback(Callback):
    """Hands Hydra's events of a multirun to a `Sweep` that also knows launchers; a single run has none."""

    def __init__(self) -> None:
        self.sweep: Any = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            from specbench.run.sweep import Sweep

            self.sweep = Sweep()
        except Exception as error:  # Hydra would only warn of it, and run the jobs unchecked
            stop(f"sweeps cannot be loaded ({first_line(error)})", 1)
        self.sweep.on_multirun_start(config, **kwargs)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if self.sweep is not None:
            self.sweep.on_job_start(config, **kwargs)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if self.sweep is not None:
            self.sweep.on_multirun_end(config, **kwargs)
