"""The schema of a run: its scalars, its groups, and the keys that can be set.

Each group's YAML in `conf/` names its class with Hydra's `_target_`; the class has its schema as a nested `Settings`
dataclass. So a new component is one .py and one .yaml.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from specbench.cache.slots import SlotCache
from specbench.component import Component
from specbench.data.prompts import Data
from specbench.decoding.drafter import Drafter
from specbench.decoding.executor import Executor
from specbench.decoding.gamma_policy import GammaPolicy
from specbench.decoding.target import Target
from specbench.decoding.verifier import Verifier
from specbench.lenience_policies.lenience_policy import LeniencePolicy
from specbench.loggers.logger import Logger
from specbench.paths import conf_dir
from specbench.peers.peer import Peers
from specbench.settings import BaseSettings, setting
from specbench.workloads.workload import Workload

GROUPS: dict[str, type[Component]] = {  # group: the base class of what can be chosen
    "target": Target,
    "drafter": Drafter,
    "gamma_policy": GammaPolicy,
    "verifier": Verifier,
    "lenience_policy": LeniencePolicy,
    "cache": SlotCache,
    "executor": Executor,
    "data": Data,
    "workload": Workload,
    "baseline": Peers,
    "logger": Logger,
}
METRICS = "metrics"  # of the group `metric`, several may be chosen: metric=[a,b]
OTHERS = (METRICS, "metric", "experiment", "hydra")  # other keys of a configuration that are not scalars
# Keys that no number depends on: a finished run that differs only in these is not repeated.
NOT_HASHED = ("name", "force", "strict", "logger", "experiment")


@dataclass
class Root(BaseSettings):
    """The run's scalars."""

    name: str = setting()
    gamma: int = setting(ge=0)
    lenience: float = setting(gt=0, le=1)
    temperature: float = setting(ge=0)
    top_k: int = setting(ge=0)
    top_p: float = setting(gt=0, le=1)
    repetition_penalty: float = setting(gt=0)
    max_new_tokens: int = setting(ge=1)
    batch_size: int = setting(ge=1)
    prefill_chunk: int = setting(ge=1)
    stop: list[str] = setting()
    seed: int = setting(ge=0)
    verdict_tokens: int = setting(ge=0)
    strict: bool = setting()
    device: str = setting()
    dtype: str = setting(choices=("auto", "float32", "bfloat16", "float16"))
    force: bool = setting()


def known_keys(overrides: Sequence[str]) -> list[str]:
    """Every key that can be set, given the options chosen by these overrides: for "did you mean" in errors."""
    defaults = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))["defaults"]  # type: ignore[index, call-overload]
    chosen = {group: option for entry in defaults if isinstance(entry, dict) for group, option in entry.items()}
    chosen |= dict(o.split("=", 1) for o in overrides if "=" in o)
    keys = [field.name for field in dataclasses.fields(Root)]
    for group in GROUPS:
        file = conf_dir() / group / f"{chosen[group]}.yaml"
        own: Iterable[Any] = OmegaConf.load(file) if file.is_file() else ()
        keys += [f"{group}.{key}" for key in map(str, own) if key not in ("_target_", "defaults")]
    return [*keys, *GROUPS, "metric", "experiment"]
