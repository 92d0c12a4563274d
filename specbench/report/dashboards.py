"""A W&B report as code: the dashboard of a project that specbench logs to."""

from collections.abc import Sequence
from typing import Any

from specbench.errors import ConfigError, installing
from specbench.report.files import Run
from specbench.report.terminal import headline

PANELS = {  # title: keys of the summary, drawn by run
    "Speedup: measured, Theorem 3.8": ["speedup/measured", "speedup/theorem_3_8"],
    "alpha": ["alpha/mean", "alpha_on_target_text/mean"],
    "Cost of a round in target steps: c, v, o": ["cost/c", "cost/v", "cost/o"],
    "Tokens per target call": ["block_efficiency/mean"],
    "Tokens per second": ["throughput/speculative_tokens_per_second", "throughput/baseline_tokens_per_second"],
}


def save_dashboard(where: str, runs: Sequence[Run]) -> str:
    """Creates the dashboard in `where`, ENTITY/PROJECT, and returns its address. Needs an account. Raises
    ConfigError."""
    entity, _, project = where.partition("/")
    if not entity or not project:
        raise ConfigError(f"--wandb={where} is not allowed: it must be ENTITY/PROJECT")
    report = _workspaces().Report(entity=entity, project=project, title="specbench", blocks=blocks(where, runs))
    report.save()
    return str(report.url)


def blocks(where: str, runs: Sequence[Run]) -> list[Any]:
    """The dashboard's blocks, which need no account. Raises ConfigError without wandb-workspaces."""
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
