"""Mirrors a finished run to Weights & Biases: offline by default, so no account is needed."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench.batch import Batch
from specbench.results import RunResult, flatten
from specbench.settings import setting

log = logging.getLogger(__name__)
TABLE_COLUMNS = ("id", "category", "prompt_tokens", "tokens", "rounds", "alpha", "block_efficiency",
                 "decode_seconds", "baseline_decode_seconds", "prompt", "output", "baseline_output")  # fmt: skip


class WandbLogger:
    """One W&B run per result: its config, summary keys and a table of prompts."""

    @dataclass
    class Settings:
        mode: str = setting(choices=("offline", "online", "disabled"))
        project: str = setting()
        entity: str | None = setting()
        tags: list[str] = setting()

    def __init__(self, settings: Settings):
        self.settings = settings

    def log(self, result: RunResult, batches: Sequence[Batch], out_dir: Path) -> None:
        """Reads the prompts from `prompts.jsonl` in `out_dir`, where an offline run is stored too."""
        import wandb

        s = self.settings
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
            run.summary.update(summary(result))
            table = wandb.Table(columns=list(TABLE_COLUMNS))
            for line in (out_dir / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                table.add_data(*(record.get(column) for column in TABLE_COLUMNS))
            run.log({"prompts": table})


def summary(result: RunResult) -> dict[str, object]:
    """Flat keys, `alpha` and `c` among them; numbers that do not exist are left out."""
    tree = result.as_dict()
    keys = {"alpha": result.alpha.mean, "alpha_stderr": result.alpha.stderr, "c": result.cost.c}
    keys |= {"v": result.cost.v, "o": result.cost.o, "block_efficiency": result.block_efficiency.mean}
    for group in (
        "speedup",
        "cost",
        "lossless",
        "throughput",
        "speedup_over",
        "bandwidth",
        "memory",
        "counts",
        "alpha_counted",
    ):
        keys |= flatten({group: tree[group]})
    for name in ("operations_factor", "optimal_gamma", "draft_acceptance_rate", "recording", "status"):
        keys[name] = tree[name]
    return {key: value for key, value in keys.items() if value is not None and not isinstance(value, list)}
