"""Mirrors a finished run to Weights & Biases; offline by default, so no account is needed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.decoded import Record
from specbench.decoding.clock import DECODING
from specbench.loggers.logger import Logger
from specbench.report.page import write_report
from specbench.results import RunResult, flatten
from specbench.settings import BaseSettings, ConfigError, setting
from specbench.storage.read import load_runs
from specbench.visible import shown

TABLE_COLUMNS = ("id", "category", "prompt_tokens", "tokens", "rounds", "alpha", "block_efficiency",
                 "decode_seconds", "baseline_decode_seconds", "prompt", "output", "baseline_output")  # fmt: skip
MOST_ROUNDS = 5000  # in the history; of longer runs only every second, third, ... round


class WandbLogger(Logger):
    """Writes one W&B run per result: config, summary, a history of rounds, tables and figures."""

    @dataclass
    class Settings(BaseSettings):
        mode: str = setting(choices=("offline", "online", "disabled"))
        project: str = setting()
        entity: str | None = setting()
        tags: list[str] = setting()

        def check(self, prefix: str) -> None:
            """Raises ConfigError for names that W&B refuses, which it would do after the run."""
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
        self.settings = settings

    @classmethod
    def from_settings(cls, settings: Settings) -> "WandbLogger":
        return cls(settings)

    def log(self, result: RunResult, record: Record, out_dir: Path) -> None:
        """Reads prompts and figures from the files in `out_dir`, and stores an offline W&B run there."""
        import wandb

        s = self.settings
        stored = load_runs(out_dir)
        write_report(out_dir, stored)
        run = wandb.init(
            dir=str(out_dir),
            mode=s.mode,  # type: ignore[arg-type]
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
            for entry in history(record):
                run.log(entry)
            prompts = wandb.Table(columns=list(TABLE_COLUMNS))
            for prompt in stored[0].prompts:
                prompts.add_data(*(prompt.get(column) for column in TABLE_COLUMNS))
            sweep = wandb.Table(columns=["gamma", "speedup"])
            for predicted in result.gamma_sweep:
                sweep.add_data(predicted.gamma, predicted.speedup)
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


def history(record: Record) -> list[dict[str, Any]]:
    """The rounds in the order of decoding, as W&B's flat records; times in milliseconds."""
    every = -(-sum(len(result.speculative.rounds) for result in record.results) // MOST_ROUNDS) or 1
    rounds = (r for group in record.groups for r in group.speculative.rounds)
    return [
        {
            "round/number": number,
            "round/gamma": r.gamma,
            "round/accepted": r.accepted,
            "round/tokens": r.tokens,
            **({"round/beta": sum(r.beta) / len(r.beta)} if r.beta else {}),
            **{f"round/{lap}_ms": r.seconds[lap] * 1e3 for lap in DECODING},
        }
        for number, r in enumerate(rounds)
        if number % every == 0
    ]


def summary(result: RunResult) -> dict[str, object]:
    """The results as flat keys, `alpha` and `c` among them, without numbers that do not exist."""
    tree = result.as_dict()
    keys = {"alpha": result.alpha.mean, "alpha_stderr": result.alpha.stderr, "c": result.cost.c}
    keys |= {"v": result.cost.v, "o": result.cost.o, "block_efficiency": result.block_efficiency.mean}
    groups = ("speedup", "cost", "lossless", "throughput", "speedup_over", "bandwidth", "drift", "latency", "memory",
              "counts", "metrics", "alpha_counted", "alpha_on_target_text", "alpha_by_category")  # fmt: skip
    for group in groups:
        keys |= flatten({group: tree[group]})
    for name in ("operations_factor", "optimal_gamma", "regret", "draft_acceptance_rate", "recording", "status"):
        keys[name] = tree[name]
    return {key: value for key, value in keys.items() if value is not None and not isinstance(value, list)}
