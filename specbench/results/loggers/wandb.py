"""Follows a run in Weights & Biases; offline by default, so no account is needed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.errors import ConfigError, shown
from specbench.results.loggers.base import Logger, Opening
from specbench.results.loggers.wandb_records import Running, columns, history, summary
from specbench.results.table import Table
from specbench.settings import BaseSettings, setting

if TYPE_CHECKING:
    from specbench.results.reader import StoredRun
    from specbench.results.schema import RunResult
    from specbench.stats.records import Group, RunRecord

TABLE_COLUMNS = ("id", "category", "prompt_tokens", "tokens", "rounds", "alpha", "block_efficiency",
                 "decode_seconds", "baseline_decode_seconds", "prompt", "output", "baseline_output")  # fmt: skip
STEPS = {"round/*": "round/number", "progress/*": "progress/prompts"}  # keys of the history: what they are drawn over
MEDIA = ("figures/*", "media/*")
EXIT_CODES = {"complete": 0, "interrupted": 130, "failed": 1}


class WandbLogger(Logger):
    """One W&B run for each run, opened before it decodes: running numbers once a group of prompts and, at the end,
    rounds, summary, tables and figures. A sweep has one more W&B run, with its table, and so have the processes of
    `repeats`, with their pooled results."""

    @dataclass
    class Settings(BaseSettings):
        mode: str = setting(choices=("offline", "online", "disabled"))
        project: str = setting()
        entity: str | None = setting()
        tags: list[str] = setting()

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
        found = columns(opening.config, opening.choices)
        name = f"{opening.name}/{opening.out_dir.name}"
        self._run = self._init(opening.out_dir, name, opening.name, opening.kind, found)
        for keys, step in STEPS.items():
            self._run.define_metric(step, summary="none")
            self._run.define_metric(keys, step_metric=step, summary="none")

    def _init(self, folder: Path, name: str, group: str, job_type: str, config: Mapping[str, Any]) -> Any:
        """A W&B run beside others that may be open in this process. Ways of a comparison leave the machine's use to
        itself: each would watch it while the others decode."""
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        s = self.settings
        run = wandb.init(
            dir=str(folder.resolve()),  # the process that writes was started in some other folder
            mode=s.mode,  # type: ignore[arg-type]
            project=s.project,
            entity=s.entity,
            tags=s.tags,
            group=group,
            job_type=job_type,
            name=name,
            config=dict(config),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=job_type == "way"),
        )
        for keys in MEDIA:  # of an image or a table the summary would hold its size and its path
            run.define_metric(keys, summary="none")
        return run

    def progress(self, group: "Group") -> None:
        """One line of the history for a group of prompts."""
        self._run.log(self.running.add(group))

    def log(self, result: "RunResult", record: "RunRecord", out_dir: Path) -> None:
        """Adds what is in the files in `out_dir`, draws the page there, and closes the W&B run."""
        from specbench.results.reader import load_runs
        from specbench.results.report.page import write_report

        run, self._run = self._run, None
        code = EXIT_CODES["failed"]
        try:
            stored = load_runs(out_dir)
            write_report(out_dir, stored)
            for entry in history(record):
                run.log(entry)
            run.log(media(stored[0], out_dir))
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
        with self._init(folder, f"{name} (sweep)", name, "sweep", {}) as run:
            run.log({"media/jobs": rows_table(rows)})
            run.summary.update({"jobs": len(rows)})

    def log_repeats(self, opening: Opening, result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """A W&B run of its own beside those of the processes: the summary of all of them, their table and the page."""
        from specbench.results.reader import load_run
        from specbench.results.report.page import write_report

        folder, name = opening.out_dir, f"{opening.name}/{opening.out_dir.name}"
        found = columns(opening.config, opening.choices)
        with self._init(folder, f"{name} ({len(rows)} processes)", opening.name, "repeats", found) as run:
            stored = load_run(folder)
            write_report(folder, [stored])
            run.log({"media/processes": rows_table(rows), **media(stored, folder)})
            run.summary.update(summary(result) | {"processes": len(rows)})


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as a table of W&B, with a column for every key that some row has."""
    import wandb

    table = Table.of(rows)
    return wandb.Table(columns=list(table.headings), data=table.rows, allow_mixed_types=True)


def media(stored: "StoredRun", out_dir: Path) -> dict[str, Any]:
    """The tables, the figures and the page of a run."""
    import wandb

    prompts = wandb.Table(columns=list(TABLE_COLUMNS))
    for prompt in stored.prompts:
        prompts.add_data(*(prompt.get(column) for column in TABLE_COLUMNS))
    sweep = wandb.Table(columns=["gamma", "speedup"])
    for predicted in stored.result["gamma_sweep"]:
        sweep.add_data(predicted["gamma"], predicted["speedup"])
    figures = {f"figures/{path.stem}": wandb.Image(str(path)) for path in (out_dir / "figures").glob("*.png")}
    report = wandb.Html(str(out_dir / "report.html"))
    return {"media/prompts": prompts, "media/gamma_sweep": sweep, "media/report": report, **figures}
