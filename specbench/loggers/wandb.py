"""Mirrors a finished run to Weights & Biases: offline by default, so no account is needed."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.batch import Batch
from specbench.results import RunResult, flatten
from specbench.settings import setting

log = logging.getLogger(__name__)
TABLE_COLUMNS = ("id", "category", "prompt_tokens", "tokens", "rounds", "alpha", "block_efficiency",
                 "decode_seconds", "baseline_decode_seconds", "prompt", "output", "baseline_output")  # fmt: skip
MOST_ROUNDS = 5000  # in the history; of longer runs every second one, or third, ...


class WandbLogger:
    """One W&B run per result: its config, summary keys, a history of rounds, tables and figures."""

    @dataclass
    class Settings:
        mode: str = setting(choices=("offline", "online", "disabled"))
        project: str = setting()
        entity: str | None = setting()
        tags: list[str] = setting()

    def __init__(self, settings: Settings):
        self.settings = settings

    def log(self, result: RunResult, batches: Sequence[Batch], out_dir: Path) -> None:
        """Reads prompts and figures from the run's files in `out_dir`, where an offline run is stored too."""
        import wandb

        from specbench.report.load import load_runs
        from specbench.report.page import write_report

        s = self.settings
        write_report(out_dir, load_runs(out_dir))
        run = wandb.init(
            dir=str(out_dir),
            mode=s.mode,
            project=s.project,
            entity=s.entity,
            tags=s.tags,
            group=result.name,
            name=f"{result.name}/{out_dir.name}",
            config=result.config,
            reinit="finish_previous",
            settings=wandb.Settings(silent=True, console="off"),
        )
        with run:
            run.define_metric("round/*", step_metric="round/number")
            for record in history(batches):
                run.log(record)
            prompts = wandb.Table(columns=list(TABLE_COLUMNS))
            for line in (out_dir / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                prompts.add_data(*(record.get(column) for column in TABLE_COLUMNS))
            sweep = wandb.Table(columns=["gamma", "speedup"])
            for entry in result.gamma_sweep:
                sweep.add_data(entry.gamma, entry.speedup)
            figures = {f"figures/{path.stem}": wandb.Image(str(path)) for path in (out_dir / "figures").glob("*.png")}
            run.log(
                {
                    "prompts": prompts,
                    "gamma_sweep": sweep,
                    "report": wandb.Html(str(out_dir / "report.html")),
                    **figures,
                }
            )
            run.summary.update(summary(result))


def history(batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Rounds in the order in which they were decoded, as W&B's flat records."""
    rounds = [r for batch in batches if batch.error is None for r in batch.speculative.rounds]
    every = -(-len(rounds) // MOST_ROUNDS) or 1
    return [
        {
            "round/number": number,
            "round/gamma": r.gamma,
            "round/accepted": r.accepted,
            "round/tokens": r.tokens,
            **({"round/beta": sum(r.beta) / len(r.beta)} if r.beta else {}),
            **{f"round/{lap}_ms": r.seconds[lap] * 1e3 for lap in ("draft", "verify", "accept", "host")},
        }
        for number, r in enumerate(rounds)
        if number % every == 0
    ]


def summary(result: RunResult) -> dict[str, object]:
    """Flat keys, `alpha` and `c` among them; numbers that do not exist are left out."""
    tree = result.as_dict()
    keys = {"alpha": result.alpha.mean, "alpha_stderr": result.alpha.stderr, "c": result.cost.c}
    keys |= {"v": result.cost.v, "o": result.cost.o, "block_efficiency": result.block_efficiency.mean}
    groups = ("speedup", "cost", "lossless", "throughput", "speedup_over", "bandwidth", "drift", "latency", "memory",
              "counts", "alpha_counted", "alpha_on_target_text", "alpha_by_category")  # fmt: skip
    for group in groups:
        keys |= flatten({group: tree[group]})
    for name in ("operations_factor", "optimal_gamma", "regret", "draft_acceptance_rate", "recording", "status"):
        keys[name] = tree[name]
    return {key: value for key, value in keys.items() if value is not None and not isinstance(value, list)}
