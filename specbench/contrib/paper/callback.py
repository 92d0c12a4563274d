"""At the end of a sweep that an experiment named after a table or figure has begun: prints it beside the paper's."""

import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.text import Text

from specbench.errors import ConfigError, first_line
from specbench.results.atomic_files import write_text
from specbench.results.terminal import show

log = logging.getLogger(__name__)


class BesideThePaper(Callback):
    """Hydra callback: writes NAME.md and NAME.png of each named table or figure into the sweep's folder."""

    def __init__(self, names: list[str]):
        self.names = names

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        try:
            show(Text("\n".join(written(self.names, folder))))
            show(Text(f"written to {folder}: " + ", ".join(f"{name}.md, {name}.png" for name in self.names)))
        except (ConfigError, OSError) as error:  # the sweep's own table says which jobs failed
            show(Text(f"{', '.join(self.names)} cannot be shown: {first_line(error)}", style="yellow"))
        except Exception as error:  # Hydra would only warn of it; the runs are written
            log.exception("no comparison with the paper")
            show(Text(f"{', '.join(self.names)} cannot be shown: {first_line(error)}", style="yellow"))


class WholePaper(Callback):
    """Hydra callback of experiment=paper: after its own sweep, of which `names` are made, runs the experiments that the
    other tables and figures are made of, below the sweep's folder, with its own number of prompts and tokens and what
    else the command said; then puts all of them into paper.md."""

    def __init__(self, names: list[str], others: Mapping[str, str]):
        """`others`: by table or figure, the experiment."""
        self.names, self.others = names, others

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        said = [word for word in config.hydra.overrides.task if not word.startswith(("experiment=", "name="))]
        keys = {word.lstrip("+").partition("=")[0] for word in said}
        size = [f"{key}={OmegaConf.select(config, key)}" for key in ("data.limit", "max_new_tokens") if key not in keys]
        for name in dict.fromkeys(self.others.values()):
            asked = [f"experiment={name}", f"hydra.sweep.dir={folder / name}", *size, *said]
            if subprocess.run([sys.executable, "-m", "specbench", *asked], check=False).returncode:
                show(Text(f"experiment={name} has failed: its tables and figures lack rows", style="yellow"))
        pages = {}
        for name in sorted([*self.names, *self.others], key=in_order):
            place = folder / self.others[name] if name in self.others else folder
            try:
                image = (place / f"{name}.png").relative_to(folder)
                pages[name] = f"{written([name], place)[0]}\n![{name}]({image})\n"
            except (ConfigError, OSError) as error:
                pages[name] = f"# {name}\n\nNot there: {first_line(error)}\n"
        write_text(folder / "paper.md", "\n".join(pages.values()))
        show(Text(f"written to {folder}: paper.md with {', '.join(pages)}"))


def in_order(name: str) -> int:
    """The place of a table or figure in the page."""
    from specbench.contrib.paper.measured import OURS

    return [*OURS].index(name)


def written(names: list[str], folder: Path) -> list[str]:
    """The pages of tables and figures made of a sweep's folder, and written there. Raises ConfigError."""
    from specbench.contrib.paper.page import write
    from specbench.results.reader import load_runs

    runs = load_runs(folder)
    return [write(name, runs, folder) for name in names]
