"""What Hydra does not accept of overrides, as one sentence with what could have been meant."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from specbench.config.compose import GROUPS, RunConfig, conf_dir
from specbench.errors import first_line, shown, unknown


def explain(error: BaseException, overrides: Sequence[str] = (), keys: Iterable[str] | None = None) -> str:
    """A mistake that Hydra or OmegaConf found in these overrides. `keys` can be set, by default those of a run."""
    text = str(error)
    if found := re.search(r"ConfigError raised while resolving interpolation: (.*)", text):  # by one of our resolvers
        return found[1]
    if found := re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct", text):
        key = found[1] or found[2]
        group, _, name = key.rpartition(".")
        own = dict(override.partition("=")[::2] for override in overrides).get(group)
        what = (f"setting of {group}={own}" if own else f"setting of the chosen {group}") if group else "setting"
        every = [*(known_keys(overrides) if keys is None else keys)]
        elsewhere = [known for known in every if known == name or known.endswith(f".{key}")]
        return str(unknown(key, (known for known in every if known.rpartition(".")[0] == group), what, elsewhere))
    if found := re.search(r"Could not find '([^']+)/([^'/]+)'\s+Available options in '[^']+':\n((?:\t.*\n?)*)", text):
        group, option, options = found[1], found[2], found[3].split()
        return str(unknown(f"{group}={option}", (f"{group}={name}" for name in options), "choice"))
    if found := re.search(r"Ambiguous value for argument '(.*?)'\n", text):
        return (
            f"{shown(found[1])} has several values: python -m specbench -m makes a run of each, python -m "
            "specbench.compare also compares them"
        )
    if override := getattr(error, "override", None):
        key, _, value = str(override).partition("=")
        hint = f"; a value with = in it needs quotes: '{key}=\"{value}\"'" if "=" in value else ""
        return f"{shown(override)} is not an override that Hydra can read: {first_line(error)}{hint}"
    where = getattr(error, "full_key", None) or "hydra."
    if where.startswith("hydra.") and overrides:  # a folder's name holds all overrides
        where = shown(", ".join(override for override in overrides if not override.startswith("-")))
    return f"{where} is not possible: {first_line(error)} (see python -m specbench --help)"


def known_keys(overrides: Sequence[str]) -> list[str]:
    """Every key that can be set, given the options chosen by these overrides: for "did you mean" in errors."""
    config: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))
    chosen: dict[str, str] = {}
    for entry in config["defaults"]:
        chosen |= entry if isinstance(entry, dict) else {}
    chosen |= dict(override.split("=", 1) for override in overrides if "=" in override)
    keys = [*RunConfig.model_fields, *GROUPS, "experiment"]
    for group in GROUPS:
        file = conf_dir() / group / f"{chosen[group]}.yaml"
        keys += [f"{group}.{key}" for key in option_file(file) if key not in ("_target_", "defaults")]
    return keys


def option_file(file: Path) -> dict[str, Any]:
    """What an option's file says, with the files of its group that it begins with; empty if there is none."""
    own: Any = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else {}
    names = [name for name in own.get("defaults", ()) if isinstance(name, str) and name != "_self_"]
    before = [option_file(file.with_name(f"{name}.yaml")) for name in names]
    return {key: value for each in (*before, own) for key, value in each.items()}
