"""`specbench.evaluate`: a whole run from Python, with the folder that the command line leaves, and its results."""

import difflib
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from specbench.config.compose import compose, explained
from specbench.config.default_drafter import with_drafter
from specbench.config.validate import check
from specbench.errors import ConfigError, Visible, VisibleFormatter, first_line
from specbench.run.jobs import RunJob

WIDTH = 100  # characters of the table, where nothing says how wide the output is
# Texts that need no quotation marks.
BARE = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z_./][\w./:@-]*", re.IGNORECASE | re.ASCII)

_RUNNING = threading.RLock()


class Fields(dict[str, Any]):
    """A mapping of results.json whose entries are attributes too: `result.speedup.measured`."""

    def __init__(self, entries: Mapping[str, Any]):
        super().__init__({key: _fields(value) for key, value in entries.items()})

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"{name!r} is not in results.json here{self._meant(name)}: it has {', '.join(self)}")
        return self[name]

    def _meant(self, name: str) -> str:
        """The entry that a name stands for elsewhere, or one that is spelled nearly so."""
        from specbench.results.fields import ALSO, FIELDS, at

        field = FIELDS.get(ALSO.get(name, name))
        if field and at(self, field.path) is not None:
            return f", did you mean {field.path.replace('/', '.')}?"
        close = difflib.get_close_matches(name, self, n=1)
        return f", did you mean {close[0]}?" if close else ""

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self]


def _fields(value: Any) -> Any:
    """Mappings as `Fields`, at any depth of lists."""
    if isinstance(value, dict):
        return Fields(value)
    return [_fields(entry) for entry in value] if isinstance(value, list) else value


class Evaluation(Fields):
    """A finished run: what its results.json holds, as attributes and as a mapping, and the `folder` of its files."""

    def __init__(self, entries: Mapping[str, Any], folder: Path):
        super().__init__(entries)
        self.folder = folder

    def __repr__(self) -> str:
        """The table that the command prints."""
        return self._printed().export_text()

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        template = '<pre style="line-height:1.2;overflow-x:auto">{code}</pre>'
        return self._printed().export_html(inline_styles=True, code_format=template)

    def _printed(self) -> Console:
        from specbench.results.run_table import run_table

        console = Console(file=StringIO(), width=_width(), record=True, markup=False, emoji=False,
                          force_jupyter=False)  # else Rich shows it in the notebook at once  # fmt: skip
        console.print(Visible(run_table(self, self.folder)), crop=False)
        return console


def _width() -> int:
    """Characters of a line of the terminal or the notebook, or $COLUMNS."""
    console = Console()
    known = console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ
    return console.width if known else WIDTH


def evaluate(*overrides: str | Mapping[str, Any], **settings: Any) -> Evaluation:
    """See `specbench.evaluate`. One run at a time: each would be in the other's times."""
    with _RUNNING:
        return _evaluate(overrides, settings)


def _evaluate(overrides: Sequence[str | Mapping[str, Any]], settings: Mapping[str, Any]) -> Evaluation:
    from specbench.results.console import log_result
    from specbench.results.folder_lock import remove_if_empty
    from specbench.results.reader import read_result
    from specbench.run.execute import claimed, execute_one

    words = with_drafter(words_of(overrides, settings), logging.getLogger(__name__).info)
    config = compose(words)
    with explained(words):
        folder = Path(config.hydra.run.dir).absolute()
    OmegaConf.set_readonly(config.hydra, False)
    config.hydra.runtime.output_dir = str(folder)
    job = RunJob(list(config.hydra.overrides.task), folder, check(config))
    if job.checked.root.repeats > 1:
        raise ConfigError(f"repeats={job.checked.root.repeats} is not possible from Python: use the command line")
    known, call = folder.exists(), f"specbench.evaluate({', '.join(map(repr, words))})"
    log, written = logging.getLogger(__name__), partial(log_result, folder=folder)
    try:
        with warnings.catch_warnings():  # of a module that would draw bars in a notebook, and is not used
            warnings.filterwarnings("ignore", message="IProgress not found")
            with claimed(job), _files_of_hydra(config, job, call):
                execute_one(job, announce=log.info, written=written, call=call)
                return Evaluation(read_result(folder), folder)
    except ConfigError:
        if not known:
            remove_if_empty(folder)
        raise


def words_of(overrides: Sequence[str | Mapping[str, Any]], settings: Mapping[str, Any]) -> list[str]:
    """All overrides as the command line has them. Raises ConfigError."""
    words: list[str] = []
    try:
        _add_words(words, (*overrides, settings))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"a value is not possible: {first_line(error)}") from error
    return words


def _add_words(words: list[str], entries: Sequence[str | Mapping[str, Any]]) -> None:
    for entry in entries:
        if isinstance(entry, str) and entry.startswith("-"):
            raise ConfigError(
                f"{entry!r} is an option of the command line and no override: for several runs use python -m "
                "specbench.compare, or python -m specbench -m"
            )
        if isinstance(entry, str):
            words.append(entry)
        elif isinstance(entry, Mapping):
            words += [word for key, value in entry.items() for word in _words(str(key), value)]
        else:
            raise ConfigError(f"{entry!r} is not an override: give a text as in 'drafter=ngram', or a mapping of keys")


def _words(key: str, value: Any) -> Iterator[str]:
    """A setting as overrides: a mapping is one for each of its keys, `data={"limit": 3}` is data.limit=3."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _words(f"{key}.{name}", entry)
    else:
        yield f"{key}={spelled(value)}"


def spelled(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(spelled, value))}]"
    if isinstance(value, bytes | bytearray):
        raise ConfigError(f"{value[:80]!r} is not possible: a text is needed and not bytes")
    bare = (isinstance(value, int | float) and not isinstance(value, str)) or BARE.fullmatch(str(value))
    return str(value) if bare else QuotedString(text=str(value), quote=Quote.single).with_quotes()


@contextmanager
def _files_of_hydra(config: DictConfig, job: RunJob, call: str) -> Iterator[None]:
    """Writes .hydra/ as the command line does, and, inside this context, what specbench logs to run.log."""
    from specbench.results.atomic_files import LogFile, write_text, writing

    folder = job.folder
    with writing(folder / "run.log"):
        handler = LogFile(folder / "run.log")
    with writing(folder / ".hydra"):
        (folder / ".hydra").mkdir(exist_ok=True)
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    hydra = OmegaConf.masked_copy(config, ["hydra"])
    for name, node in (("config", own), ("hydra", hydra), ("overrides", OmegaConf.create(list(job.overrides)))):
        write_text(folder / ".hydra" / f"{name}.yaml", OmegaConf.to_yaml(node))
    handler.setFormatter(VisibleFormatter("[%(asctime)s][%(name)s][%(levelname)s] %(message)s"))
    logger = logging.getLogger("specbench")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(logging.INFO, level or logging.INFO))
    try:
        logger.info("%s in %s", call, sys.argv[0] or "python")
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
