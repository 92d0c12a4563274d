"""Which settings say what work a run did, and in which ones runs differ."""

from collections.abc import Iterable, Mapping
from typing import Any

from specbench.results.schema import flatten
from specbench.run_config import Role, with_role

TASK = with_role(Role.TASK)
SAME_WORK = with_role(Role.LABEL | Role.POOLED)  # settings in which runs may differ whose numbers are pooled


def differences(results: Iterable[Mapping[str, Any]], but: Iterable[str] = SAME_WORK) -> list[str]:
    """The settings in which results differ, by the first part of their keys."""
    configs = [flatten(result["config"]) for result in results]
    left_out = {*but}
    keys = dict.fromkeys(key for config in configs for key in config if key.partition("/")[0] not in left_out)
    found = [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]
    return list(dict.fromkeys(key.partition("/")[0] for key in found))
