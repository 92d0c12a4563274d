"""Whether a folder holds a finished run, and of what; how a folder is cleared for the next one."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from specbench.errors import ConfigError
from specbench.results.atomic_files import ASIDE, EARLIER, GROUPS, synchronise, writing
from specbench.results.fingerprint import Identity
from specbench.results.reader import read_result

RESULTS = "results.json"
FILES = ("config.yaml", "prompts.jsonl", "rounds.parquet", "positions.parquet", "sums.parquet")  # results.json has them
OTHERS = ("report.html", "replay.json", "plan.json", "repeats.csv")  # of the run before, if a folder is used again
MORE = ("figures", "replay-*.json", "plan-*.json")  # likewise


@dataclass(frozen=True)
class PriorRun:
    """What an earlier run has left in a folder: its results if they can be used, else `corrupt` says why not. `differs`
    is what it was made of that is different now."""

    result: dict[str, Any] | None = None
    corrupt: str = ""
    differs: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether the results are those of the run that is wanted."""
        return self.result is not None and self.result["status"] == "complete" and not self.differs

    @property
    def again(self) -> str:
        """Why the run is done again, in words; "" if there is nothing to say."""
        if self.result is None or self.finished:
            return self.corrupt
        if self.differs:
            shown = ", ".join(self.differs[:3]) + (f" and {len(self.differs) - 3} more" if self.differs[3:] else "")
            return f"what differs is {shown}"
        return f"it was {self.result['status']}"


def examine(folder: Path, wanted: Identity) -> PriorRun:
    """What an earlier run has left, compared with the run that is wanted. Reads all files of it."""
    for path in (folder / name for name in (RESULTS, *FILES, *OTHERS)):
        if path.exists() and not path.is_file():
            return PriorRun(corrupt=f"{path.name} is not a file")
    if not (folder / RESULTS).exists():
        return PriorRun()
    try:
        result = read_result(folder)
    except ConfigError as error:
        return PriorRun(corrupt=str(error))
    identity = result.get("identity")
    if not isinstance(identity, dict) or not isinstance(identity.get("files"), dict):
        return PriorRun(result, differs=["the identity, which it has not"])
    for name in FILES:
        if identity["files"].get(name) != contents(folder / name):
            return PriorRun(corrupt=f"{name} is not the file that {RESULTS} was written with")
    return PriorRun(result, differs=wanted.differs_from(identity, result["config"]))


def contents(path: Path) -> dict[str, Any] | None:
    """Size in bytes and hash of a file; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    except OSError:
        return None


def make_room(folder: Path) -> Path | None:
    """Moves the results of an earlier run, with all its files, into a new sub-folder, and returns that; removes files
    of one that has no results. Raises ConfigError."""
    if (folder / RESULTS).exists():
        return move_aside(folder, EARLIER)
    with writing(folder):
        for name in (*FILES, *OTHERS):
            (folder / name).unlink(missing_ok=True)
    return None


def drop_groups(folder: Path) -> None:
    """Removes the decoded groups of the run whose results are there, if its process ended before it could. Those of a
    later run, which has no results yet, stay. Raises ConfigError."""
    groups = folder / GROUPS
    with writing(groups):
        if groups.exists() and groups.stat().st_mtime_ns <= (folder / RESULTS).stat().st_mtime_ns:
            groups.unlink()


def move_aside(folder: Path, name: str = ASIDE) -> Path:
    """Moves the files of an earlier run into a new sub-folder, and returns it. results.json comes last: if the process
    ends before, it is there without the others, so what is left is moved aside and not removed. Raises ConfigError."""
    aside = next(path for number in count(1) if not (path := folder / f"{name}{number}").exists())
    with writing(aside):
        aside.mkdir()
        more = [path for pattern in MORE for path in sorted(folder.glob(pattern))]
        for path in (*(folder / name for name in (*FILES, *OTHERS)), *more, folder / RESULTS):
            if path.name == RESULTS:
                synchronise(folder)
            if _is_there(path):
                path.rename(aside / path.name)
        synchronise(folder)
    return aside


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def keep_other(path: Path, text: str) -> Path | None:
    """Renames a file that has another text than the one which is to be written, `replay.json` to `replay-1.json`, and
    returns the new name. Raises ConfigError."""
    return next(iter(keep_others({path: text})), None)


def keep_others(texts: Mapping[Path, str], also: Sequence[Path] = ()) -> list[Path]:
    """Renames files that belong together if one of them has another text than the one which is to be written: all of
    them get the same number, which none of them had before, and so do `also`, files or folders that were made with
    them. Returns the new names. Raises ConfigError."""
    found = [path for path in texts if path.is_file()]
    with writing(found[0] if found else Path()):
        if all(path.read_text(encoding="utf-8", errors="replace") == texts[path] for path in found):
            return []
        every = [*texts, *also]
        numbered = ({path: path.with_stem(f"{path.stem}-{number}") for path in every} for number in count(1))
        others = next(names for names in numbered if not any(name.exists() for name in names.values()))
        return [path.rename(others[path]) for path in (*found, *filter(_is_there, also))]
