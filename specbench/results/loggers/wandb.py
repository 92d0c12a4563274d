"""Follows a run in Weights & Biases; offline by default, so no account is needed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specbench.errors import ConfigError, shown
from specbench.results.loggers.base import Logger, Opening
from specbench.results.loggers.wandb_records import Running, config_columns, history, summary
from specbench.results.table import Table
from specbench.settings import BaseSettings

if TYPE_CHECKING:
    from specbench.results.schema import RunResult
    from specbench.stats.records import Group, RunRecord

TABLE_COLUMNS = ("id", "category", "prompt_tokens", "tokens", "rounds", "alpha", "block_efficiency",
                 "decode_seconds", "baseline_decode_seconds", "prompt", "output", "baseline_output")  # fmt: skip
STEPS = {"round/*": "round/number", "progress/*": "progress/prompts"}  # keys of the history: what they are drawn over
MEDIA = ("figures/*", "media/*")
EXIT_CODES = {"complete": 0, "interrupted": 130, "failed": 1}


class WandbLogger(Logger):
    """One W&B run for each run, opened before it decodes: running numbers once a group of prompts and, at the end,
    rounds, summary, tables and figures. A sweep has one more W&B run, and so have the processes of `repeats`."""

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

    def __init__(self, settings: Settings):
        self.settings, self.running = settings, Running()
        self._run: Any = None

    @classmethod
    def from_settings(cls, settings: Settings) -> "WandbLogger":
        return cls(settings)

    def open(self, opening: Opening) -> None:
        """Opens the W&B run, which also records the machine's use from here on."""
        self._run = self._opened(opening, f"{opening.name}/{opening.out_dir.name}")
        for keys, step in STEPS.items():
            self._run.define_metric(step, summary="none")
            self._run.define_metric(keys, step_metric=step, summary="none")

    def _opened(self, opening: Opening, name: str) -> Any:
        """A W&B run beside others that may be open in this process. Ways of a comparison leave the machine's use to
        itself: each would watch it while the others decode."""
        import wandb

        opening.out_dir.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            **vars(self.settings),
            dir=str(opening.out_dir.resolve()),  # the process that writes was started in some other folder
            group=opening.name,
            job_type=opening.kind,
            name=name,
            config=config_columns(opening.config, opening.choices),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=opening.kind == "way"),
        )
        for keys in MEDIA:  # of an image or a table the summary would hold its size and its path
            run.define_metric(keys, summary="none")
        return run

    def progress(self, group: "Group") -> None:
        """One line of the history for a group of prompts."""
        self._run.log(self.running.add(group))

    def log(self, result: "RunResult", record: "RunRecord", out_dir: Path) -> None:
        """Adds what is in the files in `out_dir`, draws the page there, and closes the W&B run."""
        run, self._run = self._run, None
        code = EXIT_CODES["failed"]
        try:
            found = media(out_dir)
            for entry in history(record):
                run.log(entry)
            run.log(found)
            run.summary.update(summary(result.as_dict()))
            code = EXIT_CODES[result.status]
        finally:
            run.finish(exit_code=code)

    def abandon(self, status: str) -> None:
        """Closes the W&B run, with what was logged so far."""
        if self._run is not None:
            run, self._run = self._run, None
            run.summary.update({"status": status})
            run.finish(exit_code=EXIT_CODES[status])

    def log_sweep(self, name: str, rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
        """A W&B run of its own in the sweep's group, whose table has a row for each job."""
        with self._opened(Opening(name, {}, {}, folder, "sweep"), f"{name} (sweep)") as run:
            run.log({"media/jobs": rows_table(rows)})
            run.summary.update({"jobs": len(rows)})

    def log_repeats(self, opening: Opening, result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """A W&B run of its own beside those of the processes: the summary of all of them, their table and the page."""
        name = f"{opening.name}/{opening.out_dir.name} ({len(rows)} processes)"
        with self._opened(opening, name) as run:
            run.log({"media/processes": rows_table(rows), **media(opening.out_dir)})
            run.summary.update(summary(result) | {"processes": len(rows)})


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as a table of W&B, with a column for every key that some row has."""
    import wandb

    table = Table.of(rows)
    return wandb.Table(columns=list(table.headings), data=table.rows, allow_mixed_types=True)


def media(folder: Path) -> dict[str, Any]:
    """Draws the page of a run into its folder; the tables, the figures and the page for W&B."""
    import wandb

    from specbench.results.reader import load_run
    from specbench.results.report.page import write_report

    stored = load_run(folder)
    write_report(folder, [stored])
    found = {
        "media/prompts": rows_table([{name: prompt.get(name) for name in TABLE_COLUMNS} for prompt in stored.prompts])
    }
    if gammas := [{name: entry[name] for name in ("gamma", "speedup")} for entry in stored.result["gamma_sweep"]]:
        found["media/gamma_sweep"] = rows_table(gammas)
    found["media/report"] = wandb.Html(str(folder / "report.html"))
    return found | {f"figures/{path.stem}": wandb.Image(str(path)) for path in (folder / "figures").glob("*.png")}
