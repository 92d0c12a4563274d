"""Checks a composed configuration, and everything else that can be checked before models are loaded."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from specbench.component import Choice, Choices
from specbench.config.schema import GROUPS, METRICS, NOT_HASHED, OTHERS, Root
from specbench.devices import pick_device
from specbench.measure.lossless import GATE
from specbench.settings import ConfigError, validate


@dataclass(frozen=True)
class Checked:
    """A configuration whose keys, types, bounds and combinations have been checked."""

    root: Root
    choices: Choices
    metrics: Mapping[str, Choice]
    resolved: dict[str, Any]

    @property
    def digest(self) -> str:
        """A hash of all settings that the numbers depend on."""
        relevant = {key: value for key, value in self.resolved.items() if key not in NOT_HASHED}
        return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]


def check(config: DictConfig, names: Mapping[str, str] | None = None) -> Checked:
    """Validates a composed configuration. `names` are the options that were chosen, by group; by default those that
    Hydra stored in the configuration. Raises ConfigError."""
    names = names or hydra_choices(config)
    scalars = OmegaConf.masked_copy(config, [str(key) for key in config if key not in (*GROUPS, *OTHERS)])
    scalars._set_parent(config)
    root = validate(Root, scalars)
    device = pick_device(root.device)
    groups = {group: choose(config, group, names.get(group)) for group in GROUPS}
    policy = groups["lenience_policy"]
    lowest = policy.kind.lowest(policy.settings, root.lenience)
    choices = Choices(groups, root.temperature, lowest, str(device))
    for group, choice in groups.items():
        if reason := choice.kind.refuses(choice.settings, choices):
            raise ConfigError(f"{group}={choice.name} is not possible {reason}")
    metrics = {str(name): choose(config, f"{METRICS}.{name}", str(name)) for name in config.get(METRICS) or {}}
    if reserved := sorted(set(metrics) & set(GATE)):
        raise ConfigError(
            f"{METRICS}.{reserved[0]} is not allowed: a metric must have a name other than {', '.join(GATE)}"
        )
    resolved: Any = OmegaConf.to_container(
        OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]), resolve=True
    )
    return Checked(root, choices, metrics, resolved)


def choose(config: DictConfig, key: str, name: str | None) -> Choice:
    """The class and the validated settings at a key of the configuration. Raises ConfigError."""
    target = OmegaConf.select(config, f"{key}._target_")
    if target is None:
        raise ConfigError(f"{key} is not set: choose one with {key}=NAME")
    kind: Any = hydra.utils.get_class(target)
    settings = validate(kind.Settings, OmegaConf.select(config, key), f"{key}.")
    return Choice(name or kind.__name__, kind, settings)


def hydra_choices(config: DictConfig) -> dict[str, str]:
    """The option that was chosen in each group, as Hydra stores it in the configuration."""
    noted = OmegaConf.select(config, "hydra.runtime.choices") or {}
    return {str(group): str(option) for group, option in noted.items() if group in GROUPS}
