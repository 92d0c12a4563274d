"""Jobs: runs that are checked and not yet executed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.config.scalars import DRAFTING, LABELS

if TYPE_CHECKING:  # it loads torch, and a mistyped key is told before that
    from specbench.config.check import Checked

# Settings that say how work is done, and not which: methods that differ in others are not compared.
HOW = (*DRAFTING, "cache", "executor", "attention", "dtype", "prefill_chunk")


@dataclass(frozen=True)
class Job:
    """A run to be executed: its folder, its checked configuration, and the overrides that asked for it."""

    folder: Path
    checked: "Checked"
    overrides: Sequence[str] = ()
    kind: str = "run"  # for the logger: run, job (of a sweep), method (of a comparison)


def alike(jobs: Sequence[Job], but: Sequence[str]) -> list[list[Job]]:
    """Jobs that differ in these settings and labels alone, together, in order."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        settings = sorted(job.checked.resolved.items())
        kept = {key: value for key, value in settings if key not in (*LABELS, *but)}
        groups.setdefault(repr(kept), []).append(job)
    return list(groups.values())
