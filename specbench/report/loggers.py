"""Follows a run in Weights & Biases under the names of results.json; offline by default, so no account is needed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specbench.decoding.component import Component
from specbench.errors import ConfigError, shown
from specbench.measure.record import Record
from specbench.report.files import PAGE, Run
from specbench.report.tables import flat
from specbench.settings import BaseSettings

LEFT_OUT = ("config", "provenance", "details", "notes", "by_category", "acceptance", "schema_version")
EXIT_CODES = {"complete": 0, "interrupted": 130, "failed": 1}
PROMPT_COLUMNS = (
    "id",
    "category",
    "prompt_tokens",
    "tokens",
    "rounds",
    "seconds",
    "baseline_seconds",
    "prompt",
    "text",
)
MOST_ROUNDS = 5000  # in the history; of longer runs only every second, third, ... round


@dataclass(frozen=True)
class Opening:
    """What is known of a run before it decodes."""

    name: str
    folder: Path
    config: Mapping[str, Any]  # every setting, resolved
    choices: Mapping[str, str]  # the option that was chosen in each group
    kind: str = "run"  # or "job" of a sweep, "method" of a comparison, "repeats"


class Logger(Component):
    """Follows a run and never holds the only copy of anything. An error in `open` stops the run before it decodes; one
    in any other method loses no results."""

    @classmethod
    def from_settings(cls, settings: Any) -> "Logger":
        """Builds the logger; the settings are the constructor's arguments."""
        return cls(**vars(settings))

    def open(self, opening: Opening) -> None:
        """Called before decoding begins."""

    def progress(self, record: Record) -> None:
        """Called with the record of each request, when its line is written."""

    def finish(self, run: Run) -> None:
        """Called when all files are written."""

    def abandon(self, status: str) -> None:
        """Called instead of `finish` if the run ends without results: "interrupted" or "failed"."""


class NoLogger(Logger):
    """The logger `none`, for runs that leave only their files."""


class WandbLogger(Logger):
    """One W&B run for each run: running numbers for each request and, at the end, rounds, the summary, tables and the
    page."""

    class Settings(BaseSettings):
        mode: Literal["offline", "online", "disabled"]
        project: str
        entity: str | None
        tags: list[str]

        def check(self, prefix: str) -> None:
            """Raises ConfigError for names that W&B refuses, which it would do after the models are loaded."""
            if len(self.project) > 128 or set(self.project) & set("/\\#?%:"):
                raise ConfigError(
                    f"{prefix}project={shown(self.project)} is not allowed: it must have at most 128 characters, and "
                    "none of / \\ # ? % :"
                )
            if len(set(self.tags)) < len(self.tags) or any(len(tag) > 64 for tag in self.tags):
                raise ConfigError(
                    f"{prefix}tags={shown(self.tags)} is not allowed: they must differ, and have at most 64 characters"
                )

    def __init__(self, mode: str, project: str, entity: str | None, tags: list[str]):
        self.settings: dict[str, Any] = {"mode": mode, "project": project, "entity": entity, "tags": tags}
        self.sums: dict[str, float] = {}
        self._run: Any = None

    def open(self, opening: Opening) -> None:
        import wandb

        opening.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            **self.settings,
            dir=str(opening.folder.resolve()),
            group=opening.name,
            job_type=opening.kind,
            name=f"{opening.name}/{opening.folder.name}",
            config=config_columns(opening.config, opening.choices),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=opening.kind == "method"),
        )
        for keys, step in {"round/*": "round/number", "progress/*": "progress/prompts"}.items():
            self._run.define_metric(step, summary="none")
            self._run.define_metric(keys, step_metric=step, summary="none")

    def progress(self, record: Record) -> None:
        if record.speculative is None or record.baseline is None:
            return
        rounds = record.speculative.rounds
        own = {
            "prompts": 1,
            "rounds": len(rounds),
            "tokens": len(record.speculative.ids),
            "plain_tokens": len(record.baseline.ids),
            "beta": sum(map(sum, rounds.betas)),
            "tested": sum(rounds.tested),
            "seconds": record.speculative.seconds,
            "plain_seconds": record.baseline.seconds,
        }
        for name, value in own.items():
            self.sums[name] = self.sums.get(name, 0) + value
        self._run.log({f"progress/{name}": value for name, value in running(self.sums).items()})

    def finish(self, run: Run) -> None:
        import wandb

        opened, self._run = self._run, None
        code = EXIT_CODES["failed"]
        try:
            for entry in history(run.records):
                opened.log(entry)
            rows = prompt_rows(run.records)
            media: dict[str, Any] = {
                "tables/prompts": wandb.Table(columns=[*PROMPT_COLUMNS], data=rows, allow_mixed_types=True)
            }
            categories = [flat(category) for category in run.results["by_category"]]
            if categories:
                heads = list(dict.fromkeys(name for row in categories for name in row))
                data = [[row.get(head) for head in heads] for row in categories]
                media["tables/by_category"] = wandb.Table(columns=[*heads], data=data, allow_mixed_types=True)
            media["page"] = wandb.Html(str(run.folder / PAGE))
            opened.log(media)
            opened.summary.update(summary(run.results))
            code = EXIT_CODES[run.results["status"]]
        finally:
            opened.finish(exit_code=code)

    def abandon(self, status: str) -> None:
        if self._run is not None:
            opened, self._run = self._run, None
            opened.summary.update({"status": status})
            opened.finish(exit_code=EXIT_CODES[status])


def running(sums: Mapping[str, float]) -> dict[str, float]:
    """The numbers of all requests so far."""
    found = {name: sums[name] for name in ("prompts", "rounds", "tokens")}
    if sums["rounds"]:
        found["block_efficiency"] = sums["tokens"] / sums["rounds"]
    if sums["tested"]:
        found["alpha"] = sums["beta"] / sums["tested"]
    if sums["seconds"] and sums["tokens"] and sums["plain_tokens"]:
        plain = sums["plain_seconds"] / sums["plain_tokens"]
        found["speedup"] = plain / (sums["seconds"] / sums["tokens"])
    return found


def config_columns(config: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, Any]:
    """The configuration as columns: the option of each group by its name (`drafter: ngram`), its settings with a dot
    (`drafter.min_match: 2`), scalars as they are."""
    found: dict[str, Any] = dict(choices)
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": entry for name, entry in value.items() if name != "_target_"}
        else:
            found[key] = value
    return found


def history(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The rounds in the order of decoding, as W&B's flat records; times in milliseconds."""
    found: list[dict[str, Any]] = []
    for record in records:
        if record.speculative is None:
            continue
        rounds = record.speculative.rounds
        for i in range(len(rounds)):
            entry: dict[str, float] = {
                "gamma": rounds.gamma[i],
                "accepted": rounds.accepted[i],
                "tokens": rounds.tokens[i],
            }
            entry |= {f"{phase}_ms": 1e3 * getattr(rounds, phase)[i] for phase in ("draft", "verify", "accept", "host")}
            if rounds.betas[i]:
                entry["beta"] = sum(rounds.betas[i]) / len(rounds.betas[i])
            found.append({"round/number": len(found)} | {f"round/{name}": value for name, value in entry.items()})
    every = max(1, -(-len(found) // MOST_ROUNDS))
    return found[::every]


def prompt_rows(records: Sequence[Record]) -> list[list[Any]]:
    """The rows of the table of prompts."""
    return [
        [record.id, record.category, record.prompt_tokens, len(ours.ids), len(ours.rounds), ours.seconds,
         plain.seconds, record.prompt, ours.text]
        for record in records
        if (ours := record.speculative) is not None and (plain := record.baseline) is not None
    ]  # fmt: skip


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """What results.json holds as flat keys, as "speedup/measured", without numbers that do not exist."""
    found = flat({name: value for name, value in results.items() if name not in LEFT_OUT})
    for factor in results["speedup"]["accounting"]:
        found[f"speedup/accounting/{factor['factor']}"] = factor["value"]
    for category in results["by_category"]:
        found |= flat({f"by_category/{category['category']}": category})
    return found
