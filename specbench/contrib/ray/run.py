"""One run on several workers: what `specbench.run.run.run` does in one process."""

import datetime
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from specbench.config.devices import named_device
from specbench.config.validate import ValidatedConfig
from specbench.contrib.ray.coordinator import Team
from specbench.contrib.ray.merge import Piece
from specbench.contrib.ray.pool import RayPool
from specbench.results.console import ProgressFn
from specbench.results.schema import RunResult
from specbench.results.writer import PromptsFile, failure_records, prompt_records
from specbench.run.execute import Decode, Decoded, Followed
from specbench.run.phase_timer import Phases
from specbench.stats.records import Group, RunRecord

log = logging.getLogger(__name__)


@contextmanager
def on_workers(checked: ValidatedConfig, announce: Callable[[str], None]) -> Iterator[Decode]:
    """Starts the workers; yields what decodes and measures the run, when the first one has loaded the models. They end
    with the context. Raises ConfigError, or IncompleteError if all of them die."""
    root, device = checked.root, named_device(checked.root.device).type
    with closing(RayPool(root.workers, device, root.device == "auto")) as pool:
        team = Team(checked, pool, root.workers, announce)
        team.load()

        def decode(followed: Sequence[Followed], progress: ProgressFn, phases: Phases) -> list[Decoded]:
            [(folder, on_group)] = followed
            return [(*run_on_workers(team, folder, progress, on_group, phases), team.tokenizer)]

        yield decode


def run_on_workers(
    team: Team, out_dir: Path, progress: ProgressFn, on_group: Callable[[Group], None], phases: Phases
) -> tuple[RunResult, RunRecord]:
    """Decodes all prompts and measures, with the workers of a team that has loaded. Files, signals and what is raised
    are as for `specbench.run.run.run`; a group that a signal interrupts is finished by the first worker alone."""
    known, status, begun = team.load(), "complete", time.perf_counter()
    facts = {"argv": sys.argv, "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    saved, done = PromptsFile(out_dir), 0

    def took(piece: Piece) -> None:
        nonlocal done
        _save(saved, piece, team.tokenizer)
        if piece.group is not None:
            on_group(piece.group)
        done += len(piece.group.results if piece.group else piece.failure.requests if piece.failure else ())
        progress(done, known.requests, "decoding")

    try:
        progress(0, known.requests, "warming up")
        try:
            with phases("decoding"):
                team.decode(took)
        except KeyboardInterrupt:
            if not any(piece.group for piece in team.merger.pieces.values()):
                raise
            log.warning("interrupted after %d of %d requests: measuring what is there", done, known.requests)
            status = "interrupted"
        try:
            with phases("statistics"):
                result, record = team.measure(status, {**facts, "seconds": time.perf_counter() - begun})
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"what was finished stands in {saved.path}, and is not measured") from None
        result.seconds = dict(phases.seconds)
        saved.close()
        saved = PromptsFile(out_dir)  # once more, in the order of the groups
        for piece in team.merger.in_order():
            _save(saved, piece, team.tokenizer)
        return result, record
    finally:
        saved.close()


def _save(saved: PromptsFile, piece: Piece, tokenizer: Any) -> None:
    """Appends the lines of prompts.jsonl for a piece."""
    if piece.failure is not None:
        saved.append(failure_records(piece.failure))
    if piece.group is not None:
        saved.append(prompt_records(piece.group, tokenizer))
