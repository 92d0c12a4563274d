"""The logger of a run, whose errors never lose results."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specbench.config.validate import ValidatedConfig
from specbench.errors import ConfigError, first_line
from specbench.results.loggers.base import Logger, Opening
from specbench.results.schema import RunResult
from specbench.stats.records import Group, RunRecord

log = logging.getLogger(__name__)


class LoggerGuard:
    """The logger of a run: opened before decoding, told of each group of prompts, and given the results."""

    def __init__(self, name: str, logger: Logger, out_dir: Path):
        self.name, self.logger, self.out_dir = name, logger, out_dir
        self.well, self.done = True, False

    def progress(self, group: Group) -> None:
        """Tells the logger of a group. An error is logged once, and the run goes on."""
        if not self.well:
            return
        try:
            self.logger.progress(group)
        except Exception as error:
            self.well = False
            log.warning("logger=%s is not told of further requests (%s)", self.name, first_line(error))
            log.info("the logger failed", exc_info=error)

    def finish(self, result: RunResult, record: RunRecord) -> None:
        """Gives the logger a run that is saved. Raises ConfigError if that fails."""
        self.done = True
        try:
            self.logger.log(result, record, self.out_dir)
        except Exception as error:
            log.info("the logger failed", exc_info=error)
            raise ConfigError(
                f"logger={self.name} failed ({first_line(error)}): the results are in {self.out_dir}"
            ) from error

    def abandon(self, status: str) -> None:
        """Tells the logger that there will be no results."""
        try:
            self.logger.abandon(status)
        except Exception as error:
            log.info("the logger failed", exc_info=error)


def logger_of(checked: ValidatedConfig, out_dir: Path, overrides: Sequence[str], kind: str) -> tuple[Logger, Opening]:
    """The logger of a run, not yet opened, and what it is opened with."""
    choice = checked.choices["logger"]
    choices = {group: chosen.name for group, chosen in checked.choices.groups.items()}
    opening = Opening(checked.root.name, checked.resolved, choices, out_dir, kind, overrides)
    return choice.kind.from_settings(choice.settings), opening


@contextmanager
def logged(
    checked: ValidatedConfig, out_dir: Path, overrides: Sequence[str] = (), kind: str = "run"
) -> Iterator[LoggerGuard]:
    """The logger of a run, opened; if the context is left without `finish`, it is told so. Raises ConfigError if it
    cannot be opened."""
    name, (logger, opening) = checked.choices["logger"].name, logger_of(checked, out_dir, overrides, kind)
    guard = LoggerGuard(name, logger, out_dir)
    try:
        logger.open(opening)
    except Exception as error:
        log.info("the logger could not be opened", exc_info=error)
        raise ConfigError(
            f"logger={name} could not be opened ({first_line(error)}): nothing was decoded, use logger=none"
        ) from error
    status = "failed"
    try:
        yield guard
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        if not guard.done:
            guard.abandon(status)
