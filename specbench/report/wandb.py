"""Follows a run in Weights & Biases under the names of results.json, offline by default, so that no account is needed,
and makes the dashboard of a project that specbench logs to."""

import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from specbench.errors import ConfigError, installing
from specbench.measure.record import Record
from specbench.report.files import PAGE, Logger, Opening, Run
from specbench.settings import BaseSettings

EXIT_CODES = {"complete": 0, "interrupted": 130, "failed": 1}
PANELS = {  # of the dashboard: title, and keys of the summary, drawn by run
    "Speedup: measured, Theorem 3.8": ["speedup/measured", "speedup/theorem_3_8"],
    "alpha": ["alpha/mean", "alpha_on_target_text/mean"],
    "Cost of a round in target steps: c, v, o": ["cost/c", "cost/v", "cost/o"],
    "Tokens per target call": ["block_efficiency/mean"],
    "Tokens per second": ["throughput/speculative_tokens_per_second", "throughput/baseline_tokens_per_second"],
}
MOST_ROUNDS = 5000  # in the history; of longer runs only every second, third, ... round


class WandbLogger(Logger):
    """One W&B run for each run: running numbers for each request; at the end rounds, the summary, tables, the page."""

    class Settings(BaseSettings):
        mode: Literal["offline", "online", "disabled"]
        project: str = Field(
            pattern=r"^[^/\\#?%:]{1,128}$", description="at most 128 characters, and none of / \\ # ? % :"
        )
        entity: str | None

    def __init__(self, mode: str, project: str, entity: str | None):
        self.settings: dict[str, Any] = {"mode": mode, "project": project, "entity": entity}
        self.sums: dict[str, float] = {}  # of all requests so far, by the names of `measure.sums.sums_of`
        self._run: Any = None

    def open(self, opening: Opening) -> None:
        import wandb

        # WANDB_RUN_ID is of a whole command: each of its jobs and methods has another.
        own_id = os.environ.get("WANDB_RUN_ID") if opening.kind in ("run", "repeats") else uuid.uuid4().hex[:8]
        opening.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            **self.settings,
            dir=str(opening.folder.resolve()),
            id=own_id,
            resume="allow" if own_id and "WANDB_RESUME" not in os.environ else None,
            group=os.environ.get("WANDB_RUN_GROUP", opening.name),
            job_type=opening.kind,
            name=None if "WANDB_NAME" in os.environ else f"{opening.name}/{opening.folder.name}",
            config=config_columns(opening.config, opening.choices),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=opening.kind == "method"),
        )
        for keys, step in {"round/*": "round/number", "progress/*": "progress/prompts"}.items():
            self._run.define_metric(step, summary="none")
            self._run.define_metric(keys, step_metric=step, summary="none")

    def progress(self, record: Record) -> None:
        from specbench.measure.sums import finished, sums_of

        if not finished([record]):
            return
        for name, value in sums_of(record).items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self._run.log({f"progress/{name}": value for name, value in running(self.sums).items()})

    def finish(self, run: Run) -> None:
        import pandas as pd
        import wandb

        from specbench.report.tables import flat

        opened, self._run = self._run, None
        code = EXIT_CODES["failed"]
        try:
            for entry in history(run.records):
                opened.log(entry)
            media: dict[str, Any] = {"page": wandb.Html(str(run.folder / PAGE))}
            categories = [flat(category) for category in run.results["by_category"]]
            for name, rows in (("prompts", prompt_rows(run.records)), ("by_category", categories)):
                if rows:
                    media[f"tables/{name}"] = wandb.Table(dataframe=pd.DataFrame(rows), allow_mixed_types=True)
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
    """The numbers of all requests so far, by their sums."""
    from specbench.measure import formulas

    found = {"prompts": sums["requests"], "rounds": sums["rounds"], "tokens": sums["tokens"]}
    found |= formulas.block_efficiency(sums)
    if sums["tested"]:
        found["alpha"] = sums["beta"] / sums["tested"]
    if sums["seconds"]:
        found["speedup"] = formulas.speedups(sums)["measured"]
    return found


def config_columns(config: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, Any]:
    """The configuration as columns: options by group (`drafter: ngram`), settings (`drafter.min_match: 2`), scalars."""
    found: dict[str, Any] = dict(choices)
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": entry for name, entry in value.items() if name != "_target_"}
        else:
            found[key] = value
    return found


def history(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The rounds in the order of decoding, as W&B's flat records; times in milliseconds."""
    import pandas as pd

    from specbench.measure.sums import rounds_frame

    frame = rounds_frame(records)
    if frame.empty:
        return []
    frame = frame[frame["method"] == "speculative"].reset_index(drop=True)
    rows = frame[["gamma", "accepted", "tokens"]].assign(
        number=frame.index,
        beta=frame["betas"].map(lambda betas: sum(betas) / len(betas) if betas else None),
        **{f"{name}_ms": 1e3 * frame[name] for name in ("draft", "verify", "accept", "host")},
    )
    every = max(1, -(-len(rows) // MOST_ROUNDS))
    found = rows[::every].add_prefix("round/").to_dict("records")
    return [{name: value for name, value in row.items() if pd.notna(value)} for row in found]


def prompt_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The rows of the table of prompts."""
    names = ("id", "category", "prompt")
    return [
        {name: vars(record)[name] for name in names} | {"text": ours.text, "tokens": len(ours.ids)}
        for record in records
        if (ours := record.speculative) is not None
    ]


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """What results.json holds as flat keys, as "speedup/measured", without numbers that do not exist."""
    from specbench.report.tables import flat, numbers  # loads pandas, which no refusal waits for

    found = flat(numbers(results))
    for factor in results["speedup"]["accounting"]:
        found[f"speedup/accounting/{factor['factor']}"] = factor["value"]
    for category in results["by_category"]:
        found |= flat({f"by_category/{category['category']}": category})
    return found


def save_dashboard(where: str, runs: Sequence[Run]) -> str:
    """Creates the dashboard in ENTITY/PROJECT, with an account, and returns its address. Raises ConfigError."""
    entity, _, project = where.partition("/")
    if not entity or not project:
        raise ConfigError(f"--wandb={where} is not allowed: it must be ENTITY/PROJECT")
    report = _workspaces().Report(entity=entity, project=project, title="specbench", blocks=blocks(where, runs))
    report.save()
    return str(report.url)


def blocks(where: str, runs: Sequence[Run]) -> list[Any]:
    """The dashboard's blocks, which need no account. Raises ConfigError without wandb-workspaces."""
    from specbench.report.terminal import headline

    wr = _workspaces()
    entity, _, project = where.partition("/")
    panels = [wr.BarPlot(title=title, metrics=metrics, orientation="h") for title, metrics in PANELS.items()]
    panels += [
        wr.ScatterPlot(title="alpha over gamma", x="c::gamma", y="s::alpha/mean"),
        wr.ScatterPlot(title="Speedup over gamma", x="c::gamma", y="s::speedup/measured"),
        wr.ScatterPlot(title="Measured over predicted", x="s::speedup/theorem_3_8", y="s::speedup/measured"),
        wr.WeavePanelSummaryTable(table_name="tables/by_category"),
        wr.LinePlot(title="Tokens kept, round by round", x="round/number", y=["round/tokens"], smoothing_factor=0.9),
    ]
    return [
        wr.H1("Speculative decoding: measured and predicted"),
        wr.P("alpha: mean of sum_x min(p, q) over tested positions; speedup: of decoding alone, paired by prompt."),
        wr.PanelGrid(runsets=[wr.Runset(entity=entity, project=project)], panels=panels),
        wr.UnorderedList([f"{run.label}: {headline(run.results)}" for run in runs] or ["no finished run"]),
    ]


def _workspaces() -> Any:
    try:
        import wandb_workspaces.reports.v2 as wr
    except ImportError as error:
        raise ConfigError(f"--wandb needs wandb-workspaces: {installing('wandb-report')}") from error
    return wr
