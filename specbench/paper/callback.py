"""At the end of a sweep that an experiment named after a table or figure has begun: writes it beside the paper's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console


class BesideThePaper(Callback):
    """Hydra callback: writes NAME.md and NAME.png of each named table or figure into the sweep's folder."""

    def __init__(self, names: Sequence[str]):
        self.names = names

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder, console = Path(config.hydra.sweep.dir), Console()
        for name in self.names:
            console.print(write(name, folder), markup=False)
        console.print(f"written to {folder}: {', '.join(f'{name}.md, {name}.png' for name in self.names)}")


def write(name: str, folder: Path) -> str:
    """Writes NAME.md and NAME.png from the finished runs of a folder; returns the text."""
    from specbench.paper.figures import figure
    from specbench.paper.tables import page
    from specbench.report.files import read_all

    runs = read_all(folder)
    text = page(name, runs)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    figure(name, runs).savefig(folder / f"{name}.png", dpi=130)
    return text
