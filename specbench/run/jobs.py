"""Jobs of a command: runs that are checked and not yet executed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench.config.validate import ValidatedConfig
from specbench.run_config import GROUPS, Role, with_role


@dataclass(frozen=True)
class RunJob:
    """A run to be executed: what was asked for, its folder and its configuration."""

    overrides: Sequence[str]
    folder: Path
    checked: ValidatedConfig


def jobs_that_share_decoding(jobs: Sequence[RunJob]) -> list[list[RunJob]]:
    """Jobs that differ only in settings which plain decoding does not depend on, together."""
    keys = dict.fromkeys(key for job in jobs for key in job.checked.resolved)
    return _grouped(jobs, [*keys.keys() - {*with_role(Role.LABEL | Role.DRAFTING)}])


def jobs_of_one_task(jobs: Sequence[RunJob]) -> list[list[RunJob]]:
    """Jobs that decode the same prompts in the same way, whichever engine does it, together."""
    return _grouped(jobs, with_role(Role.TASK))


def _grouped(jobs: Sequence[RunJob], keys: Sequence[str]) -> list[list[RunJob]]:
    """Jobs with the same settings of these keys, in order."""
    groups: dict[str, list[RunJob]] = {}
    for job in jobs:
        groups.setdefault(repr([job.checked.resolved.get(key) for key in keys]), []).append(job)
    return list(groups.values())


def labels_of(words: Sequence[Mapping[str, str]]) -> list[str]:
    """A short name for each job: its own overrides in words, or the option alone where all of them choose one of the
    same group."""
    options = [value for own in words if own.keys() <= {*GROUPS} for value in own.values()]
    if len({*options}) == len(words) == len(options) and len({key for own in words for key in own}) == 1:
        return options
    return [", ".join(f"{key} {value}" for key, value in own.items()) or "without overrides" for own in words]
