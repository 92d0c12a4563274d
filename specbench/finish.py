"""What becomes of a run that is measured: its files, and its logger."""

import logging
from collections.abc import Sequence
from pathlib import Path

from specbench.config.checks import Checked
from specbench.decoded import Record
from specbench.results import RunResult
from specbench.run.parts import Parts
from specbench.settings import ConfigError
from specbench.storage.finished import make_room
from specbench.storage.write import write_config, write_result
from specbench.visible import first_line

log = logging.getLogger(__name__)


def save(
    checked: Checked, parts: Parts, result: RunResult, record: Record, out_dir: Path, overrides: Sequence[str]
) -> Path | None:
    """Writes the files of this run into the folder, which is locked. Returns the folder into which those of an earlier
    run went, if there were any. Raises ConfigError."""
    kept = make_room(out_dir)
    write_config(checked.resolved, out_dir)
    identity = checked.identity().as_dict()  # a checkpoint of the hub has its commit now that it is there
    write_result(result, record, checked.digest, out_dir, parts.target.tokenizer, identity, overrides)
    return kept


def log_to(checked: Checked, result: RunResult, record: Record, out_dir: Path) -> None:
    """Gives a run that is saved to its logger. Raises ConfigError if that fails."""
    logger = checked.choices["logger"]
    try:
        logger.kind.from_settings(logger.settings).log(result, record, out_dir)
    except Exception as error:
        log.info("the logger failed", exc_info=error)
        raise ConfigError(f"logger={logger.name} failed ({first_line(error)}): the results are in {out_dir}") from error
