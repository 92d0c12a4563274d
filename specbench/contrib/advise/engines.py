"""The nearest in other engines: what to paste, and what they do differently."""

from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

import yaml

from specbench.models.checkpoint import source_of

UNKNOWN = "no setting for it is known here"
ENGINES: Mapping[str, Mapping[str, str]] = yaml.safe_load((Path(__file__).parent / "engines.yaml").read_text("utf-8"))


def configurations(target: str, drafter: Mapping[str, Any], gamma: int) -> dict[str, str]:
    """What to paste into each engine for a path of a target, the settings of a drafter and a constant gamma, by the
    engine's name. The drafter's class decides, since several names of `drafter=` share one."""
    kind, path = drafter["_target_"].rpartition(".")[2], drafter.get("path") or "DRAFTER"
    names = {"target": source_of(target), "path": source_of(path), "gamma": gamma, "more": gamma + 1}
    return {
        engine: Template(f"{known['begins']} {known[kind]}").substitute(names) if kind in known else UNKNOWN
        for engine, known in ENGINES.items()
    }
