"""The trace of a finished run, from its files."""

from pathlib import Path
from typing import Any

import numpy as np

from specbench.errors import ConfigError
from specbench.results.reader import load_run
from specbench.stats.estimates import HalfCosts, RoundCost
from specbench.stats.replay import Text, Trace, traced


def load_trace(folder: Path) -> Trace:
    """The trace of a run's files. Raises ConfigError if one cannot be used, or holds no betas along the text."""
    run = load_run(folder)
    if reason := run.result["no_replay"]:
        raise ConfigError(f"{folder} cannot be replayed: {reason}")
    columns = {name: np.array(values, object) for name, values in run.positions.items()}
    decoded = [record for record in run.prompts if "error" not in record]
    tokens_of = {record["id"]: record["tokens"] for record in decoded}
    texts = [_text(record, columns) for record in decoded if (columns["prompt"] == record["id"]).any()]
    for text, tokens in ((text, tokens_of[text.prompt]) for text in texts):
        if not len(text) == tokens <= text.limit or text.baseline_tokens < 1:
            raise ConfigError(
                f"{folder / 'positions.parquet'} cannot be used: it has {len(text)} tokens of {text.prompt}, and "
                f"prompts.jsonl says {tokens}, of at most {text.limit}, and {text.baseline_tokens} of plain decoding"
            )
    if not texts:
        raise ConfigError(f"{folder} cannot be replayed: there are no betas along its text")
    cost = run.result["cost"]
    costs = [RoundCost(**entry) for entry in cost["by_gamma"]]
    halves = [_half(half, folder) for half in cost["halves"]]
    if (
        sorted(id for half in halves for ids in half.clusters for id in ids) != sorted(t.prompt for t in texts)
        and halves
    ):
        raise ConfigError(
            f"{folder / 'results.json'} cannot be used: cost.halves are not of the texts in positions.parquet"
        )
    trace = traced(texts, costs, run.result["speedup"]["measured"], halves)
    trace.greedy = run.result["config"]["temperature"] == 0
    return trace


def _half(found: dict[str, Any], folder: Path) -> HalfCosts:
    """An entry of `cost.halves`. Raises ConfigError."""
    by_gamma = [RoundCost(**entry) for entry in found["by_gamma"]]
    gammas, count = [cost.gamma for cost in by_gamma], len(by_gamma)
    if not gammas or gammas != sorted({*gammas}) or [len(row) for row in found["covariance"]] != [count] * count:
        raise ConfigError(f"{folder / 'results.json'} cannot be used: cost.halves is not that of a run")
    return HalfCosts(found["clusters"], by_gamma, found["covariance"], found.get("prompts", []))


def _text(record: dict[str, Any], columns: dict[str, Any]) -> Text:
    """The text of one line of prompts.jsonl, with its rows of positions.parquet."""
    here = columns["prompt"] == record["id"]
    names = ("outcome", "beta", "acceptance", "relative_entropy", "confidence")
    found = {name: columns[name][here].astype(float) for name in names}
    return Text(
        prompt=record["id"],
        prompt_tokens=record["prompt_tokens"],
        limit=record["limit"],
        baseline_seconds=record["baseline_decode_seconds"],
        baseline_tokens=record["baseline_tokens"],
        root_entropy=np.sqrt(found.pop("relative_entropy")),
        **found,
    )
