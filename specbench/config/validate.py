"""Checks a composed configuration, and everything else that can be checked before models are loaded."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specbench.component import Selection, Selections, chosen_class
from specbench.config.compose import base_of
from specbench.config.paths import inside_outputs
from specbench.decoding.component import CodeIdentity
from specbench.errors import ConfigError, first_line, shown
from specbench.results.fingerprint import Identity, of_code, of_libraries, of_module
from specbench.run_config import GROUPS, METRICS, OTHERS, Role, RunConfig, with_role
from specbench.settings import validate

WITHOUT_TORCH = ("data", "workload", "logger")  # groups that are checked before torch is loaded


@dataclass(frozen=True)
class ValidatedConfig:
    """A configuration whose keys, types, bounds and combinations have been checked."""

    root: RunConfig
    choices: Selections
    metrics: Mapping[str, Selection]
    resolved: dict[str, Any]

    @property
    def digest(self) -> str:
        """A hash of all settings that the numbers depend on."""
        return hashlib.sha256(json.dumps(self._settings, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def _settings(self) -> dict[str, Any]:
        return {key: value for key, value in self.resolved.items() if key not in with_role(Role.LABEL)}

    @property
    def divisible(self) -> bool:
        """Whether a process can decode some groups of the run, and others before or after it the rest, as one decodes
        all: nothing that was chosen refuses several workers, since it learns from what was decoded before, say."""
        several = replace(self.choices, scalars={**self.choices.scalars, "workers": 2})
        every = (*self.choices.groups.values(), *self.metrics.values())
        alone = True
        return alone and not any(choice.kind.refuses(choice.settings, several) for choice in every)

    def nodes(self, gamma: int) -> int:
        """The most guesses of a draft of `gamma` levels."""
        drafter = self.choices["drafter"]
        return int(drafter.kind.nodes(drafter.settings, gamma))

    def traced(self) -> CodeIdentity:
        """What compiled code may depend on, besides shapes: settings, checkpoints, code and machine."""
        import torch

        from specbench.executors.machine import cpu_features

        found = self.identity()
        untraced = with_role(Role.UNTRACED)
        settings = {key: value for key, value in self._settings.items() if key not in untraced}
        sources = {key: value for key, value in found.sources.items() if key.partition(".")[0] not in untraced}
        machine = [found.code, found.device, cpu_features(), torch.get_num_threads()]
        every = [json.dumps(own, sort_keys=True, default=str) for own in ([settings, sources, *machine], machine)]
        return CodeIdentity(*(hashlib.sha256(own.encode()).hexdigest()[:16] for own in every))

    def identity(self, here: bool = True) -> Identity:
        """All that the numbers depend on, as it is now: the files that the settings name are looked at again. Without
        the device, if the run is not one of this machine."""
        from specbench.config.devices import pick_device, pick_dtype
        from specbench.executors.machine import device_name

        named = {group: choice for group, choice in self.choices.groups.items() if group not in with_role(Role.LABEL)}
        named |= {f"{METRICS}.{name}": choice for name, choice in self.metrics.items()}
        sources: dict[str, str] = {}
        code, machine = {"specbench": of_code(), **of_libraries()}, {}
        for key, choice in named.items():
            sources |= {f"{key}.{name}": version for name, version in choice.settings.sources().items()}
            module = choice.kind.__module__
            if not module.startswith("specbench."):
                code[module] = of_module(module)
        if here:
            device = pick_device(self.root.device)
            machine = {"device": device_name(device), "dtype": str(pick_dtype(self.root.dtype, device))}
        return Identity(self.digest, self._settings, sources, code, machine)


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
    metrics = choose_metrics(config)
    for key, choice in (*groups.items(), *(("metric", choice) for choice in metrics.values())):
        if reason := choice.kind.refuses(choice.settings, choices):
            raise ConfigError(f"{key}={choice.name} is not possible {reason}")
    if root.beams > 1 and groups["decoding"].name == "sampling":
        only = "it must be 1, or use decoding=beam"
        raise ConfigError(f"beams={root.beams} is not possible with decoding=sampling: {only}")
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    resolved: Any = OmegaConf.to_container(own, resolve=True)
    return ValidatedConfig(root, choices, metrics, resolved)


def check_early(config: DictConfig, names: Mapping[str, str] | None = None) -> tuple[RunConfig, dict[str, Selection]]:
    """The part of `check` that does not load torch: scalars, and choices of WITHOUT_TORCH. Raises ConfigError."""
    names = names or hydra_choices(config)
    scalars = OmegaConf.masked_copy(config, [str(key) for key in config if key not in (*GROUPS, *OTHERS)])
    scalars._set_parent(config)
    root = validate(RunConfig, scalars)
    inside_outputs(root.name)
    return root, {group: choose(config, group, names.get(group)) for group in WITHOUT_TORCH}


def choose_metrics(config: DictConfig) -> dict[str, Selection]:
    """The metrics that were chosen, by name. Raises ConfigError."""
    chosen = config.get(METRICS)
    if chosen is None:
        return {}
    if not isinstance(chosen, DictConfig):
        raise ConfigError(f"{METRICS}={shown(chosen)} is not allowed: choose metrics with metric=[NAME,NAME]")
    return {str(name): choose(config, METRICS, str(name)) for name in chosen}


def choose(config: DictConfig, group: str, name: str | None) -> Selection:
    """The class and the validated settings of a group, or of the metric `name`. Raises ConfigError."""
    key, how = (f"{METRICS}.{name}", f"metric=[{name}]") if group == METRICS else (group, f"{group}=NAME")
    base = base_of(group)
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
