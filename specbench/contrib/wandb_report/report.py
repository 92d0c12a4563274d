"""A W&B report as code: the dashboard of a project that specbench logs to."""

from collections.abc import Sequence
from typing import Any

from specbench.errors import ConfigError, installing
from specbench.results.reader import StoredRun
from specbench.results.wording import account

PANELS = {  # title: keys of the summary, drawn by run
    "Speedup: measured, Theorem 3.8": ["speedup/measured", "speedup/theorem_3_8"],
    "alpha": ["alpha"],
    "Cost of a round in target steps: c, v, o": ["c", "v", "o"],
    "Tokens a round": ["block_efficiency"],
    "Tokens per second": ["throughput/speculative_tokens_per_second", "throughput/baseline_tokens_per_second"],
}


def save_report(where: str, runs: Sequence[StoredRun]) -> str:
    """Creates the report in `where`, ENTITY/PROJECT, and returns its address. Needs an account. Raises ConfigError."""
    entity, _, project = where.partition("/")
    if not entity or not project:
        raise ConfigError(f"--wandb-report={where} is not allowed: it must be ENTITY/PROJECT")
    blocks = report_blocks(project, entity, runs)
    report = _workspaces().Report(entity=entity, project=project, title="specbench", blocks=blocks)
    report.save()
    return str(report.url)


def report_blocks(project: str, entity: str, runs: Sequence[StoredRun]) -> list[Any]:
    """The report's blocks, which need no account. Raises ConfigError without wandb-workspaces."""
    wr = _workspaces()
    panels = [wr.BarPlot(title=title, metrics=metrics, orientation="h") for title, metrics in PANELS.items()]
    panels += [
        wr.ScatterPlot(title="Speedup by gamma", x="c::gamma", y="s::speedup/measured"),
        wr.LinePlot(title="Tokens kept, round by round", x="round/number", y=["round/tokens"], smoothing_factor=0.9),
    ]
    told = [f"{run.label}: {account(run.result)}" for run in runs if run.result["speedup"]["accounting"]]
    return [
        wr.H1("Speculative decoding: measured and predicted"),
        wr.P("alpha: mean of sum_x min(p, q) over tested positions; speedup: of decoding alone, paired by prompt."),
        wr.PanelGrid(runsets=[wr.Runset(entity=entity, project=project)], panels=panels),
        wr.H2("Why it is not Theorem 3.8's"),
        wr.UnorderedList(told or ["nothing was drafted"]),
    ]


def _workspaces() -> Any:
    try:
        import wandb_workspaces.reports.v2 as wr
    except ImportError as error:
        raise ConfigError(f"--wandb-report needs wandb-workspaces: {installing('wandb-report')}") from error
    return wr
