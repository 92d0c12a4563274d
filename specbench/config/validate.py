"""Checks a composed configuration, and everything else that can be checked before models are loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specbench.component import Selection, Selections, chosen_class
from specbench.config.compose import base_of
from specbench.config.paths import inside_outputs
from specbench.errors import ConfigError, first_line
from specbench.run_config import GROUPS, OTHERS, Role, RunConfig, with_role
from specbench.settings import validate

WITHOUT_TORCH = ("data", "workload", "logger")  # groups that are checked before torch is loaded


@dataclass(frozen=True)
class ValidatedConfig:
    """A configuration whose keys, types, bounds and combinations have been checked."""

    root: RunConfig
    choices: Selections
    resolved: dict[str, Any]

    @property
    def _settings(self) -> dict[str, Any]:
        return {key: value for key, value in self.resolved.items() if key not in with_role(Role.LABEL)}

    def nodes(self, gamma: int) -> int:
        """The most guesses of a draft of `gamma` levels."""
        drafter = self.choices["drafter"]
        return int(drafter.kind.nodes(drafter.settings, gamma))


def check(config: DictConfig, names: Mapping[str, str] | None = None, here: bool = True) -> ValidatedConfig:
    """Validates a composed configuration, as far as possible before torch is loaded. `names` are the options that were
    chosen, by group; by default those that Hydra stored in the configuration. If the run is not one of this machine
    (`here`), nobody asks whether its device is there. Raises ConfigError."""
    names = names or hydra_choices(config)
    root, early = check_early(config, names)

    from specbench.config.devices import named_device, pick_device

    device = pick_device(root.device) if here else named_device(root.device)
    groups = {group: early.get(group) or choose(config, group, names.get(group)) for group in GROUPS}
    policy = groups["lenience_policy"]
    lowest = policy.kind.lowest(policy.settings, root.lenience)
    choices = Selections(groups, root.temperature, lowest, str(device), vars(root))
    for key, choice in groups.items():
        if reason := choice.kind.refuses(choice.settings, choices):
            raise ConfigError(f"{key}={choice.name} is not possible {reason}")
    if root.beams > 1 and groups["decoding"].name == "sampling":
        only = "it must be 1, or use decoding=beam"
        raise ConfigError(f"beams={root.beams} is not possible with decoding=sampling: {only}")
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    resolved: Any = OmegaConf.to_container(own, resolve=True)
    return ValidatedConfig(root, choices, resolved)


def check_early(config: DictConfig, names: Mapping[str, str] | None = None) -> tuple[RunConfig, dict[str, Selection]]:
    """The part of `check` that does not load torch: scalars, and choices of WITHOUT_TORCH. Raises ConfigError."""
    names = names or hydra_choices(config)
    scalars = OmegaConf.masked_copy(config, [str(key) for key in config if key not in (*GROUPS, *OTHERS)])
    scalars._set_parent(config)
    root = validate(RunConfig, scalars)
    inside_outputs(root.name)
    return root, {group: choose(config, group, names.get(group)) for group in WITHOUT_TORCH}


def choose(config: DictConfig, group: str, name: str | None) -> Selection:
    """The class and the validated settings of a group. Raises ConfigError."""
    key, how, base = group, f"{group}=NAME", base_of(group)
    try:
        node = OmegaConf.select(config, key)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key} is not set: {first_line(error)}, choose one with {how}") from error
    kind, settings = chosen_class(node, key, base, how)
    if kind is base:
        raise ConfigError(f"{key}._target_={base.__module__}.{base.__name__} is not allowed: choose one with {how}")
    return Selection(name or kind.__name__, kind, settings)


def hydra_choices(config: DictConfig) -> dict[str, str]:
    """The option that was chosen in each group, as Hydra stores it in the configuration."""
    noted = OmegaConf.select(config, "hydra.runtime.choices") or {}
    return {str(group): str(option) for group, option in noted.items() if group in GROUPS}
