"""At the end of a sweep that an experiment named after a table or figure has begun: writes it beside the paper's."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
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


class WholePaper(Callback):
    """Hydra callback of experiment=paper: after its own sweep, of which `names` are made, runs the experiments that the
    other tables and figures are made of (`others`, by table or figure), below the sweep's folder, with its own number
    of prompts and tokens and what else the command said. All of them go into paper.md."""

    def __init__(self, names: Sequence[str], others: Mapping[str, str]):
        self.names, self.others = names, others

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder, console = Path(config.hydra.sweep.dir), Console()
        given = [word for word in config.hydra.overrides.task if not word.startswith(("experiment=", "name="))]
        keys = {word.lstrip("+").partition("=")[0] for word in given}
        size = [f"{key}={OmegaConf.select(config, key)}" for key in ("data.limit", "max_new_tokens") if key not in keys]
        for experiment in dict.fromkeys(self.others.values()):
            words = [f"experiment={experiment}", f"hydra.sweep.dir={folder / experiment}", *size, *given]
            if subprocess.run([sys.executable, "-m", "specbench", *words], check=False).returncode:
                console.print(f"experiment={experiment} failed: its tables and figures lack rows", style="yellow")
        pages = []
        for name in sorted([*self.names, *self.others]):
            place = folder / self.others.get(name, "")
            image = (place / f"{name}.png").relative_to(folder)
            pages.append(f"{write(name, place)}\n![{name}]({image})\n")
        (folder / "paper.md").write_text("\n".join(pages), encoding="utf-8")
        console.print(f"written to {folder}: paper.md")


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
