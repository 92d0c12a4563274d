"""The list of a sweep's jobs, in the sweep's folder: what each job is, and which of them are over."""

import json
import os
import socket
import uuid
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specbench.data.sources import UNKNOWN
from specbench.errors import ConfigError, first_line
from specbench.results.atomic_files import write_json, writing
from specbench.results.fingerprint import Identity
from specbench.run.sweep_summary import PLACE, PlannedJob, SweepJobs

SERIAL = "basic"  # the launcher whose jobs run one after the other, in the command's own process
LIST, OVER = "jobs.json", "over"  # in the folder of a command


class NotedIdentity(Identity):
    """An identity that was noted before the run began, maybe on another machine: which device it is, if none is noted,
    and which commit of a hub id, were not known then."""

    def differs_from(self, stored: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
        known = stored.get("sources") or {}
        sources = {key: known.get(key, was) if was.startswith(UNKNOWN) else was for key, was in self.sources.items()}
        device = self.device or stored.get("device") or {}
        return Identity(self.digest, self.settings, sources, self.code, device).differs_from(stored, config)


@dataclass(frozen=True)
class JobList(SweepJobs):
    """The jobs of one command, as they are listed in the sweep's folder."""

    launcher: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # of this start of the command
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def write(self) -> None:
        """Writes the list, in the place of that of an earlier start. Raises ConfigError."""
        with writing(self.place):
            (self.place / OVER).mkdir(parents=True, exist_ok=True)
        own: dict[str, Any] = {"id": self.id, "started": self.started, "command": self.command, "name": self.name}
        own |= {"launcher": self.launcher, "logger": dict(self.logger)}
        write_json(self.place / LIST, own | {"jobs": [self._entry(job) for job in self.jobs]})

    def _entry(self, job: PlannedJob) -> dict[str, Any]:
        """A job as JSON. Its folder is relative, so that a sweep's folder can be moved or copied."""
        identity = {**job.identity.as_dict(), "settings": dict(job.identity.settings)}
        folder = os.path.relpath(job.folder, self.folder)
        return {"number": job.number, "overrides": job.overrides, "folder": folder, "strict": job.strict,
                "identity": identity}  # fmt: skip

    def number_of(self, folder: Path) -> int | None:
        """The number of the job with this folder; None if there is none."""
        wanted = os.path.realpath(folder)
        return next((job.number for job in self.jobs if os.path.realpath(job.folder) == wanted), None)

    def end(self, number: int, failed: str = "") -> None:
        """Notes that a job is over; `failed` says why it has no result. Raises ConfigError."""
        noted: dict[str, Any] = {"id": self.id, "failed": failed, "host": socket.gethostname(), "process": os.getpid()}
        noted["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
        with writing(self.place):
            (self.place / OVER).mkdir(parents=True, exist_ok=True)
        write_json(self.place / OVER / f"{number}.json", noted)

    def over(self) -> dict[int, str]:
        """The jobs that are over since this start, and why they have no result, "" if they have one."""
        return {number: str(noted.get("failed", "")) for number, noted in _noted(self.place, self.id).items()}

    def not_ended(self) -> Set[int]:
        return {job.number for job in self.jobs} - {*self.over()} if self.launcher != SERIAL else frozenset()

    def all_over(self) -> bool:
        """Whether every job is over."""
        return {job.number for job in self.jobs} <= {*self.over()}


def read_list(place: Path) -> JobList:
    """The list in `SWEEP/.sweep/COMMAND`. Raises ConfigError if it is not there or cannot be used."""
    path, folder = place / LIST, place.parent.parent
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        jobs = [_job(entry, folder) for entry in found["jobs"]]
        start = found["launcher"], found["id"], found["started"]
        return JobList(folder, place.name, found["name"], found["logger"], jobs, *start)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be used ({first_line(error)}): repeat the sweep's command") from error


def lists_in(folder: Path) -> list[JobList]:
    """The lists of every command of a sweep's folder, the one that was started last at the end. Raises ConfigError if
    there is none."""
    places = [path.parent for path in folder.glob(f"{PLACE}/*/{LIST}")]
    if not places:
        raise ConfigError(f"{folder} is not the folder of a sweep: {PLACE}/ is not there, or has no {LIST}")
    return sorted(map(read_list, places), key=lambda found: found.started)


def _job(entry: Mapping[str, Any], folder: Path) -> PlannedJob:
    noted = entry["identity"]
    identity = NotedIdentity(noted["config"], noted["settings"], noted["sources"], noted["code"], noted["device"])
    where = Path(os.path.normpath(folder / entry["folder"]))
    return PlannedJob(entry["number"], list(entry["overrides"]), where, identity, entry["strict"])


def _noted(place: Path, start: str) -> dict[int, dict[str, Any]]:
    """What jobs have noted at their end, by number, if they knew of this start."""
    found = {}
    for path in (place / OVER).glob("*.json"):
        try:
            noted = json.loads(path.read_text(encoding="utf-8"))
            if noted["id"] == start:
                found[int(path.stem)] = noted
        except (OSError, ValueError, KeyError, TypeError):  # of another start, or cut by hand
            continue
    return found
