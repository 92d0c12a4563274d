"""Jobs: runs that are checked and not yet executed, and whether a folder holds a job's run already, or is in use."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
from omegaconf import DictConfig, OmegaConf

from specbench.config.compose import DRAFTING, LABELS
from specbench.errors import ConfigError, VerdictError
from specbench.measure.record import Record, read
from specbench.report import files
from specbench.report.files import Run

if TYPE_CHECKING:  # it loads torch, and a mistyped key is answered before that
    from specbench.config.check import Checked

LOCK = ".lock"  # in the folder of a job that is worked on
# Settings that say how work is done, and not which: methods that differ in others are not compared.
HOW = (*DRAFTING, "cache", "executor", "attention", "dtype", "prefill_chunk")


@dataclass(frozen=True)
class Job:
    """A run to be executed: its folder, its checked configuration, and the overrides that asked for it."""

    folder: Path
    checked: "Checked"
    overrides: Sequence[str] = ()
    kind: str = "run"  # for the logger: run, job (of a sweep), method (of a comparison)


def job_of(
    config: DictConfig, folder: Path, words: Sequence[str], kind: str = "run", names: Mapping[str, str] | None = None
) -> Job:
    """The checked job of a composed configuration; `names` are the options that were chosen, if they are not in it.
    Raises ConfigError: for a hub that cannot be reached before torch is loaded, so that the answer comes at once."""
    from specbench.models.hub import refuse_unreachable

    for role in ("target", "drafter"):
        path, weights = (OmegaConf.select(config, f"{role}.{name}") for name in ("path", "weights"))
        if isinstance(path, str) and weights != "random":
            refuse_unreachable(role, path)
    from specbench.config.check import check

    return Job(folder, check(config, names), list(words), kind)


def alike(jobs: Sequence[Job], but: Sequence[str]) -> list[list[Job]]:
    """Jobs that differ in these settings and labels alone, together, in order."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        kept = settings(job.checked.resolved, but)
        groups.setdefault(json.dumps(kept, sort_keys=True), []).append(job)
    return list(groups.values())


def settings(config: Mapping[str, Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of a configuration that numbers depend on, as JSON has them."""
    kept = {key: value for key, value in config.items() if key not in (*LABELS, *without)}
    found: dict[str, Any] = json.loads(json.dumps(kept))
    return found


def finished(folder: Path, config: Mapping[str, Any]) -> Run | None:
    """The run in a folder if it is complete and has these settings, else None."""
    try:
        run = files.read_run(folder)
    except ConfigError:
        return None
    same = settings(run.results["config"]) == settings(config)
    return run if same and run.results["status"] == "complete" else None


def finished_job(job: Job) -> Run | None:
    """The run of a job that is complete, if its data have the same prompts as then, else None."""
    if (run := finished(job.folder, job.checked.resolved)) is None:
        return None
    from specbench.config.build import chosen_prompts
    from specbench.data.prompts import content_hash, load

    with suppress(ConfigError):  # of data that cannot be read now
        prompts = chosen_prompts(load(job.checked.choices["data"].build()), job.checked.root)
        return run if run.results["details"]["facts"]["data"] == content_hash(prompts) else None
    return run


def decoded_before(folder: Path, config: Mapping[str, Any], data: str) -> list[Record]:
    """The records of an interrupted run in a folder, if its config.yaml has these settings and ends with `data`."""
    path = folder / files.CONFIG
    if not path.is_file() or finished(folder, config) is not None:  # which is done again
        return []
    try:
        before: Any = OmegaConf.to_container(OmegaConf.load(path))
        if settings(before) != settings(config) or not path.read_text().endswith(data):
            return []
    except Exception:  # a damaged file, for which the parsers have many errors, is as one with other settings
        return []
    return [record for record in read(folder / files.RECORDS) if not record.failed]


def not_shown_lossless(job: Job, run: Run) -> bool:
    """Whether a run with strict=true should have the target's distribution, and is not shown to have it."""
    lossless = run.results["lossless"]
    return job.checked.root.strict and lossless["expected"] and lossless["passed"] is not True


def refuse_verdict(job: Job, run: Run) -> None:
    """Raises VerdictError if strict=true, unless the distribution is shown to be the target's, or another by choice."""
    lossless = run.results["lossless"]
    if not_shown_lossless(job, run):
        word = "failed" if lossless["passed"] is False else "unknown"
        raise VerdictError(f"strict=true: lossless is {word} ({lossless['reason']}), see {run.folder}")


def remove_unused(folder: Path) -> None:
    """Removes the folder of a refused run without a decoded prompt, and the empty folders above it inside outputs/."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    if sizes.keys() - {"run.log", "config.yaml", "prompts.jsonl"} or sizes.get("prompts.jsonl"):
        return
    for name in sizes:
        (folder / name).unlink()
    for place in (folder, *folder.parents):
        if "outputs" not in place.absolute().parts or place.absolute() == Path.cwd() or any(place.iterdir()):
            break
        place.rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes a folder and locks it. Raises ConfigError if another process works in it, or it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / LOCK)
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise ConfigError(f"{folder} is in use by another process: choose another folder with name=NAME") from error
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used ({error.strerror}): choose another with hydra.run.dir=D") from error
    try:
        yield
    finally:
        lock.release()
        (folder / LOCK).unlink(missing_ok=True)
