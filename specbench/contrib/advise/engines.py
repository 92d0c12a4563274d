"""The nearest in other engines: what to paste, and what they do differently."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

import yaml

from specbench.config.compose import compose
from specbench.models.checkpoint import source_of

UNKNOWN = "no setting for it is known here"
ENGINES: Mapping[str, Mapping[str, str]] = yaml.safe_load((Path(__file__).parent / "engines.yaml").read_text("utf-8"))


def configurations(target: str, words: Sequence[str]) -> dict[str, str]:
    """What to paste into each engine for a way of a constant gamma, by the engine's name. The class of its drafter
    decides, since several names of `drafter=` share one."""
    config = compose(words)
    kind, path = config.drafter["_target_"].rpartition(".")[2], config.drafter.get("path") or "DRAFTER"
    names = {"target": source_of(target), "path": source_of(path), "gamma": config.gamma, "more": config.gamma + 1}
    return {
        engine: Template(f"{known['begins']} {known[kind]}").substitute(names) if kind in known else UNKNOWN
        for engine, known in ENGINES.items()
    }
