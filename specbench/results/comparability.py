"""Which settings say what work a run did, and in which ones runs differ."""

from collections.abc import Iterable, Mapping
from typing import Any

from specbench.results.schema import flatten

# Settings that say what is decoded: runs that differ in one of them do different work.
TASK = ("target", "data", "workload", "decoding", "beams", "temperature", "top_k", "top_p", "repetition_penalty",
        "max_new_tokens", "stop")  # fmt: skip
# Settings in which runs may differ whose numbers are pooled.
SAME_WORK = ("name", "force", "strict", "logger", "experiment", "seed", "order", "repeats", "repeats_vary", "workers",
             "verdict_tokens", "metrics", "baseline")  # fmt: skip


def differences(results: Iterable[Mapping[str, Any]], but: Iterable[str] = SAME_WORK) -> list[str]:
    """The settings in which results differ, by the first part of their keys."""
    configs = [flatten(result["config"]) for result in results]
    left_out = {*but}
    keys = dict.fromkeys(key for config in configs for key in config if key.partition("/")[0] not in left_out)
    found = [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]
    return list(dict.fromkeys(key.partition("/")[0] for key in found))
