"""The nearest in other engines: what to paste, and what they do differently."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

import yaml

ENGINES: Mapping[str, Mapping[str, str]] = yaml.safe_load((Path(__file__).parent / "engines.yaml").read_text("utf-8"))


def configurations(target: str, words: Sequence[str]) -> dict[str, str]:
    """What to paste into each engine for a way of a constant gamma, by the engine's name."""
    own = dict(word.split("=", 1) for word in words)
    gamma, drafter = own.get("gamma", "4"), own.get("drafter", "").replace("stdlib", "model")
    names = {"target": target, "path": own.get("drafter.path", "DRAFTER"), "gamma": gamma, "more": int(gamma) + 1}
    found = {}
    for engine, known in ENGINES.items():
        told = known.get(drafter)
        found[engine] = (
            Template(f"{known['begins']} {told}").substitute(names) if told else f"{engine} has no such drafter"
        )
    return found
