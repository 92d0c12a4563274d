"""What becomes of a run that is measured: its files, and its logger."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbench.config.validate import ValidatedConfig
from specbench.contrib.cluster.cpu_affinity import placement
from specbench.errors import ConfigError, first_line
from specbench.results.completion import make_room
from specbench.results.loggers.base import Logger, Opening
from specbench.results.progress import Told, decoding_progress
from specbench.results.schema import RunResult
from specbench.results.schema_parts import Placement
from specbench.results.tables import refuse_verdict
from specbench.results.writer import write_config, write_result
from specbench.run.phase_timer import Phases
from specbench.run.signals import defer_signals
from specbench.stats.records import Group, RunRecord

log = logging.getLogger(__name__)


def save(
    checked: ValidatedConfig,
    tokenizer: Any,
    result: RunResult,
    record: RunRecord,
    out_dir: Path,
    overrides: Sequence[str],
) -> Path | None:
    """Writes the files of this run into the folder, which is locked. Returns the folder into which those of an earlier
    run went, if there were any. Raises ConfigError."""
    kept = make_room(out_dir)
    write_config(checked.resolved, out_dir)
    identity = checked.identity().as_dict()  # a checkpoint of the hub has its commit now that it is there
    write_result(result, record, checked.digest, out_dir, tokenizer, identity, overrides)
    return kept


def measure(
    checked: ValidatedConfig,
    out_dir: Path,
    overrides: Sequence[str],
    kind: str = "run",
    announce: Callable[[str], None] = lambda text: None,
    place: str = "",
    shown: Callable[[dict[str, Any], Path | None], None] = lambda result, kept: None,
    begun: float | None = None,
    call: str = "",
) -> None:
    """Builds the parts, runs them in `out_dir`, which is locked, and writes the results. What stood there before stays
    until they are there. `kind` is what the logger is told, `place` stands before the progress, and `shown` gets what
    `results.json` holds, and where the run went that was there before. `begun`, by `time.perf_counter`, is when the
    program or the job began; `call` is the Python expression that asked for the run, if no command did. Raises
    ConfigError, VerdictError with strict=true, IncompleteError if all workers die, or KeyboardInterrupt after a
    signal."""
    written, phases = False, Phases(begun)
    with ExitStack() as stack:
        with phases("load"):
            decoding = stack.enter_context(decoding_of(checked, announce))
        with phases("logger"):
            run_log = stack.enter_context(logged(checked, out_dir, overrides, kind))
        try:
            with defer_signals():  # between the end of decoding and that of writing a signal waits
                with decoding_progress(place) as progress:
                    result, record, tokenizer = decoding(out_dir, progress, run_log.progress, phases)
                mark(result)
                if call:
                    result.provenance["call"] = call
                kept = save(checked, tokenizer, result, record, out_dir, overrides)
                written = True
        except KeyboardInterrupt:
            if written:
                raise KeyboardInterrupt(f"what was finished is in {out_dir}") from None
            raise
        shown(result.as_dict(), kept)
        run_log.finish(result, record)
    if result.status == "interrupted":
        raise KeyboardInterrupt(f"what was finished is in {out_dir}")
    refuse_verdict(checked.root.strict, result.as_dict(), out_dir)


def mark(result: RunResult) -> None:
    """Puts into the results what a job had of its machine, where several jobs may run at a time."""
    found = result.placement = placement()
    if found is None:
        return
    result.notes += notes_of(found)
    if found.shared and result.machine is not None:
        result.machine.steady = False
        result.machine.reasons += found.shared


def mark_pooled(result: dict[str, Any]) -> None:
    """The same for the results of several processes that one job has started, as results.json holds them."""
    found = placement()
    if found is None:
        return
    result |= {"placement": asdict(found), "notes": [*result["notes"], *notes_of(found)]}
    if found.shared and result["machine"] is not None:
        reasons = [*result["machine"]["reasons"], *found.shared]
        result["machine"] = result["machine"] | {"steady": False, "reasons": reasons}


def notes_of(found: Placement) -> list[str]:
    """What is to be noted of a job that had cores of its own."""
    told = f"other jobs ran on other cores of the machine ({found.beside}): they share its memory"
    return [told] if found.beside else []


Decoding = Callable[
    [Path, Told, Callable[[Group], None], Phases], tuple[RunResult, RunRecord, Any]
]  # and the tokenizer


@contextmanager
def decoding_of(checked: ValidatedConfig, announce: Callable[[str], None]) -> Iterator[Decoding]:
    """What decodes and measures a run, with its models loaded: this process, or workers, which end with the context.
    Raises ConfigError, or IncompleteError if all workers die."""
    if checked.root.workers > 1:
        from specbench.contrib.ray.run import on_workers

        with on_workers(checked, announce) as decoding:
            yield decoding
        return
    from specbench.config.build import build
    from specbench.run.run import run

    parts = build(checked, announce)
    yield lambda *asked: (*run(parts, *asked), parts.target.tokenizer)


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


@contextmanager
def logged(
    checked: ValidatedConfig, out_dir: Path, overrides: Sequence[str] = (), kind: str = "run"
) -> Iterator[LoggerGuard]:
    """The logger of a run, opened; if the context is left without `finish`, it is told so. Raises ConfigError if it
    cannot be opened."""
    choice = checked.choices["logger"]
    choices = {group: chosen.name for group, chosen in checked.choices.groups.items()}
    opening = Opening(checked.root.name, checked.resolved, choices, out_dir, kind, overrides)
    found = LoggerGuard(choice.name, choice.kind.from_settings(choice.settings), out_dir)
    try:
        found.logger.open(opening)
    except Exception as error:
        log.info("the logger could not be opened", exc_info=error)
        raise ConfigError(
            f"logger={choice.name} could not be opened ({first_line(error)}): nothing was decoded, use logger=none"
        ) from error
    status = "failed"
    try:
        yield found
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        if not found.done:
            found.abandon(status)
