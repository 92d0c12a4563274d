"""Runs that several processes decode, and what must be as in a run of one process."""

import json
import pickle
from pathlib import Path

import pyarrow.parquet as parquet
from small_runs import composed, small

from specbench.config.build import build
from specbench.config.validate import check
from specbench.results.reader import load_run
from specbench.run.execute import save
from specbench.run.jobs import RunJob
from specbench.run.run import run

# What follows from times. Of the rest every digit is compared.
OF_TIMES = {
    *(
        "cost",
        "speedup",
        "throughput",
        "throughput_ci95",
        "throughput_by_rows",
        "speedup_over",
        "bandwidth",
        "recording",
    ),
    *(
        "latency",
        "memory",
        "machine",
        "seconds",
        "optimal_gamma",
        "gamma_sweep",
        "gamma_pick",
        "cost_check",
        "regret",
        "no_replay",
    ),
    *("provenance", "identity", "config_digest", "config", "overrides", "workers"),
}
OF_CATEGORIES = ("prompts", "tokens", "rounds", "block_efficiency", "alpha")


def prompts(folder: Path, count=7, turns=1) -> Path:
    """A file of short prompts of different lengths, each with so many turns."""
    path = folder / f"prompts-{turns}.jsonl"
    words = ["def", "add(a,", "b):\n", "   ", "return", "a", "+", "b\n\nfor", "value", "in", "range(3):\n"]
    texts = [" ".join(words[: 3 + i]) for i in range(count)]
    lines = [
        {"question_id": i, "category": "ab"[i % 2], "turns": [text] * (1 if i == 2 else turns)}
        for i, text in enumerate(texts)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def checked_for(good, path, *overrides):
    given = ("executor=eager", "drafter=model", f"drafter.path={good}", f"target.path={good}", "logger=none", "gamma=2")
    return check(composed(*small("max_new_tokens=6", "data=questions", f"data.path={path}", "data.limit=null", *given,
                                 *overrides)))  # fmt: skip


def one_process(checked, folder):
    """The run in this process."""
    parts = build(checked)
    result, record = run(parts, folder)
    save(RunJob([], folder, checked), parts.target.tokenizer, result, record)
    return load_run(folder)


# How notes begin that depend on times, and the one by which a continued run differs.
NOTES_OF_TIMES = ("the best gamma by replay", "the run was continued")


def continued(found):
    """The note of a stored run that was continued."""
    [note] = [note for note in found.result["notes"] if note.startswith("the run was continued in a new process: ")]
    return note


def facts(found):
    """Everything of a stored run that does not follow from times."""
    result = {name: value for name, value in found.result.items() if name not in OF_TIMES}
    result["notes"] = [note for note in result["notes"] if not note.startswith(NOTES_OF_TIMES)]
    result["executor"] = {name: result["executor"].get(name) for name in ("products", "chosen")}
    result["lossless"] = {**result["lossless"], "reread": {**result["lossless"]["reread"], "seconds": 0}}
    result["by_category"] = {
        name: {key: numbers[key] for key in OF_CATEGORIES} for name, numbers in result["by_category"].items()
    }
    lines = [{k: v for k, v in line.items() if "seconds" not in k} for line in found.prompts]
    tables = {}
    for name in ("rounds", "positions", "sums"):
        table = parquet.read_table(found.folder / f"{name}.parquet").to_pydict()
        chosen = [key for key in table if "seconds" not in key and "log_speedup" not in key and "bytes" not in key]
        tables[name] = {key: pickle.dumps(table[key]) for key in chosen}
    return json.dumps(result), lines, tables


CASES = {
    "sampled": ("verdict_tokens=60",),
    "greedy": ("temperature=0", "verdict_tokens=40"),
    "rows and turns": ("turns", "batch_size=2", "verdict_tokens=200"),
    "all is read": (),
    "all is read, greedy": ("temperature=0",),
    "rows": ("batch_size=2",),
    "turns": ("turns",),
    "heuristic gamma": ("gamma_policy=heuristic", "lenience=0.5"),
    "beams": ("decoding=beam", "temperature=0", "verdict_tokens=60"),
}
