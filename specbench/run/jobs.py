"""Jobs of a command: runs that are checked and not yet executed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench.config.validate import ValidatedConfig
from specbench.run_config import Role, with_role


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
    """A short name for each job: the values of its own overrides, with their keys where values alone would not do."""
    values = [" ".join(own.values()) for own in words]
    if len({*values}) == len(values) and "" not in values:
        return values
    return [" ".join(f"{key}={value}" for key, value in own.items()) or "without overrides" for own in words]
