"""`specbench.evaluate`: a run from Python, with the folder that the command line leaves, and its results."""

import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf

from specbench.config.compose import compose, explained
from specbench.errors import ConfigError, VisibleFormatter, first_line
from specbench.report.files import RESULTS

if TYPE_CHECKING:
    from specbench.report.files import Run
    from specbench.run.jobs import Job

# Texts that need no quotation marks.
BARE = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z_./][\w./:@-]*", re.IGNORECASE | re.ASCII)
_RUNNING = threading.RLock()  # one run at a time: each would be in the other's times


class Fields(dict[str, Any]):
    """A mapping of results.json whose entries are attributes too: `result.speedup.measured`."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"{name!r} is not in results.json here: it has {', '.join(self)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self]


class Evaluation(Fields):
    """A finished run: what its results.json holds, as attributes and as a mapping, and the `folder` of its files."""

    def __init__(self, folder: Path):
        super().__init__(json.loads((folder / RESULTS).read_bytes(), object_hook=Fields))
        self.folder = folder

    def __repr__(self) -> str:
        from specbench.report.terminal import headline

        return f"{headline(self)} ({self.folder})"


def evaluate(*overrides: str | Mapping[str, Any], **settings: Any) -> Evaluation:
    """See `specbench.evaluate`."""
    with _RUNNING:
        return _evaluate(words_of([*overrides, settings]))


def _evaluate(words: Sequence[str]) -> Evaluation:
    from specbench.run.jobs import job_of, refuse_verdict

    config = compose(words)
    with explained(words):
        folder = Path(config.hydra.run.dir).absolute()
    OmegaConf.set_readonly(config.hydra, False)
    config.hydra.runtime.output_dir = str(folder)
    job = job_of(config, folder, config.hydra.overrides.task)
    if job.checked.root.repeats > 1:
        raise ConfigError(f"repeats={job.checked.root.repeats} is not possible from Python: use the command line")
    run = run_logged(job)
    refuse_verdict(job, run)
    return Evaluation(folder)


def run_logged(job: "Job", **how: Any) -> "Run":
    """The run of a job, with the options of `execute_one`, and its run.log; a refused one leaves no folder."""
    from specbench.run.jobs import remove_unused
    from specbench.run.run import execute_one

    known = job.folder.exists()
    try:
        with logged(job.folder):
            return execute_one(job, **how)
    except ConfigError:
        if not known:
            remove_unused(job.folder)
        raise


@contextmanager
def logged(folder: Path) -> Iterator[None]:
    """Inside, what specbench logs goes to run.log, as with the command line."""
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / "run.log", encoding="utf-8")
    handler.setFormatter(VisibleFormatter("[%(asctime)s][%(name)s][%(levelname)s] %(message)s"))
    logger = logging.getLogger("specbench")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(logging.INFO, level or logging.INFO))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()


def words_of(entries: Sequence[str | Mapping[str, Any]]) -> list[str]:
    """All overrides as the command line has them. Raises ConfigError."""
    words: list[str] = []
    for entry in entries:
        if isinstance(entry, Mapping):
            try:
                words += [word for key, value in entry.items() for word in _words(str(key), value)]
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"a value is not possible: {first_line(error)}") from error
        elif isinstance(entry, str) and not entry.startswith("-"):
            words.append(entry)
        else:
            raise ConfigError(f"{entry!r} is not an override: give a text as in 'drafter=ngram', or a mapping of keys")
    return words


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
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(spelled, value))}]"
    if isinstance(value, bytes | bytearray):
        raise ValueError(f"{value[:80]!r} is bytes and not a text")
    text = str(value)
    return text if BARE.fullmatch(text) else QuotedString(text=text, quote=Quote.single).with_quotes()
