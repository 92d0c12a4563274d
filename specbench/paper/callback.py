"""At the end of a sweep that an experiment named after a table or figure has begun: prints it beside the paper's."""

import logging
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.text import Text

from specbench.report.tables import show
from specbench.settings import ConfigError
from specbench.visible import first_line

log = logging.getLogger(__name__)


class BesideThePaper(Callback):
    """Hydra callback: writes NAME.md and NAME.png of each named table or figure into the sweep's folder."""

    def __init__(self, names: list[str]):
        self.names = names

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from specbench.paper.page import write
        from specbench.storage.read import load_runs

        folder = Path(config.hydra.sweep.dir)
        try:
            runs = load_runs(folder)
            for name in self.names:
                show(Text(write(name, runs, folder)))
            show(Text(f"written to {folder}: " + ", ".join(f"{name}.md, {name}.png" for name in self.names)))
        except (ConfigError, OSError) as error:  # the sweep's own table says which jobs failed
            show(Text(f"{', '.join(self.names)} cannot be shown: {first_line(error)}", style="yellow"))
        except Exception as error:  # Hydra would only warn of it; the runs are written
            log.exception("no comparison with the paper")
            show(Text(f"{', '.join(self.names)} cannot be shown: {first_line(error)}", style="yellow"))
