"""The schema of a run: its scalars, its groups, and the keys that can be set.

Each group's YAML in `conf/` names its class with Hydra's `_target_`; the class has its schema as a nested `Settings`
dataclass. So a new component is one .py and one .yaml.
"""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from omegaconf import OmegaConf

from specbench.config.paths import conf_dir, inside_outputs
from specbench.decoding.component import Component
from specbench.errors import ConfigError, shown
from specbench.settings import (
    LARGEST_GAMMA,
    LARGEST_SEED,
    LENIENCE,
    MOST_BEAMS,
    REPETITION_PENALTY,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    BaseSettings,
    setting,
)

# By group, the base class of what can be chosen. It is imported when it is needed: most of them load torch, and a
# mistyped key is told before that.
GROUPS = {
    "target": "specbench.decoding.model.Target",
    "drafter": "specbench.decoding.drafter.Drafter",
    "gamma_policy": "specbench.decoding.gamma_policy.GammaPolicy",
    "verifier": "specbench.decoding.verifier.Verifier",
    "decoding": "specbench.decoding.search.Decoding",
    "lenience_policy": "specbench.policies.lenience.base.LeniencePolicy",
    "cache": "specbench.cache.slots.SlotCache",
    "executor": "specbench.decoding.executor.Executor",
    "data": "specbench.data.prompts.Data",
    "workload": "specbench.policies.workload.base.Workload",
    "baseline": "specbench.peers.base.Peers",
    "logger": "specbench.results.loggers.base.Logger",
}
WITHOUT_TORCH = ("data", "workload", "logger")  # groups that are checked before torch is loaded
METRICS = "metrics"  # of the group `metric`, several may be chosen: metric=[a,b]
OTHERS = (METRICS, "metric", "experiment", "hydra")  # other keys of a configuration that are not scalars
MOST_STOPS, LONGEST_STOP = 64, 1000  # strings, and characters of one: all are searched after every round
# Keys that no number depends on: a finished run that differs only in these is not repeated.
NOT_HASHED = ("name", "force", "strict", "logger", "experiment")
# Keys that compiled code does not depend on, besides those and besides the shapes of its calls.
NOT_TRACED = (
    "data",
    "workload",
    "baseline",
    "executor",
    "seed",
    "gamma",
    "max_new_tokens",
    "batch_size",
    "prefill_chunk",
    "stop",
    "verdict_tokens",
    "order",
    "repeats",
    "repeats_vary",
    "workers",
)


def base_of(group: str) -> type[Component]:
    """The base class of what can be chosen in a group."""
    module, _, name = GROUPS[group].rpartition(".")
    found: type[Component] = getattr(import_module(module), name)
    return found


@dataclass
class RunConfig(BaseSettings):
    """The run's scalars."""

    name: str = setting()
    gamma: int = setting(ge=0, le=LARGEST_GAMMA)
    beams: int = setting(ge=1, le=MOST_BEAMS)
    lenience: float = setting(**LENIENCE)
    temperature: float = setting(**TEMPERATURE)
    top_k: int = setting(**TOP_K)
    top_p: float = setting(**TOP_P)
    repetition_penalty: float = setting(**REPETITION_PENALTY)
    max_new_tokens: int = setting(ge=1, le=10**7)
    batch_size: int = setting(ge=1, le=10**6)
    prefill_chunk: int = setting(ge=1, le=10**7)
    stop: list[str] = setting()
    seed: int = setting(ge=0, le=LARGEST_SEED)
    order: int = setting(ge=0, le=LARGEST_SEED)
    repeats: int = setting(ge=1, le=1000)
    repeats_vary: str = setting(choices=("none", "order", "seed", "both"))
    workers: int = setting(ge=1, le=1000)
    verdict_tokens: int = setting(ge=0, le=10**9)
    strict: bool = setting()
    device: str = setting()
    dtype: str = setting(choices=("auto", "float32", "bfloat16", "float16"))
    attention: str = setting(choices=("auto", "sdpa", "triton"))
    force: bool = setting()

    def check(self, prefix: str) -> None:
        inside_outputs(self.name)
        if len(self.stop) > MOST_STOPS or any(not 0 < len(text) <= LONGEST_STOP for text in self.stop_strings):
            raise ConfigError(
                f"stop={shown(self.stop)} is not allowed: it must be at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} "
                "characters"
            )
        for key, value in self.of_process(self.repeats - 1).items():
            if isinstance(value, int) and value > LARGEST_SEED:
                raise ConfigError(
                    f"{key}={getattr(self, key)} with repeats={self.repeats} is not possible: the last process would "
                    f"have {value}, and {LARGEST_SEED} is the largest"
                )

    def of_process(self, number: int) -> dict[str, int | str]:
        """What the scalars of process `number` of `repeats` are, counted from 0, where they are not the run's own."""
        changed: dict[str, int | str] = {"repeats": 1, "repeats_vary": "none"}
        if self.repeats_vary in ("seed", "both"):
            changed["seed"] = self.seed + number
        if self.repeats_vary in ("order", "both"):
            changed["order"] = self.order + number
        return changed

    @property
    def stop_strings(self) -> list[str]:
        """`stop`, with its \\n and \\t read as line breaks and tabs, which a shell cannot easily say."""
        return [text.replace("\\n", "\n").replace("\\t", "\t") for text in self.stop]


def known_keys(overrides: Sequence[str]) -> list[str]:
    """Every key that can be set, given the options chosen by these overrides: for "did you mean" in errors."""
    defaults = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))["defaults"]  # type: ignore[index, call-overload]
    chosen = {group: option for entry in defaults if isinstance(entry, dict) for group, option in entry.items()}
    chosen |= dict(o.split("=", 1) for o in overrides if "=" in o)
    keys = [field.name for field in dataclasses.fields(RunConfig)]
    for group in GROUPS:
        file = conf_dir() / group / f"{chosen[group]}.yaml"
        own: Iterable[Any] = OmegaConf.load(file) if os.path.isfile(file) else ()
        keys += [f"{group}.{key}" for key in map(str, own) if key not in ("_target_", "defaults")]
    return [*keys, *GROUPS, "metric", "experiment"]
