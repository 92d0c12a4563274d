"""The settings of a run: its scalars, its groups, and what depends on each.

Each group's YAML in `conf/` names its class with Hydra's `_target_`; the class has its schema as a nested `Settings`
dataclass. A new component is one .py and one .yaml; a new scalar is one field here and one line in `conf/config.yaml`.
"""

from dataclasses import dataclass
from enum import Flag, auto
from typing import Literal

from pydantic import Field

from specbench.errors import ConfigError, shown
from specbench.settings import (
    LARGEST_GAMMA,
    LARGEST_SEED,
    MOST_BEAMS,
    BaseSettings,
    Lenience,
    Temperature,
    TopK,
    TopP,
)


class Role(Flag):
    """What depends on a setting. One without roles: all numbers and plain decoding depend on it, a
    loaded target does not, and runs that differ in it are not pooled."""

    NONE = 0
    LABEL = auto()  # no number depends on it: a finished run that differs in these alone is not repeated
    TASK = auto()  # it says what is decoded: runs that differ in it do different work
    LOADED = auto()  # a loaded target depends on it
    DRAFTING = auto()  # plain decoding does not depend on it: jobs that differ in these alone share it
    POOLED = auto()  # runs may differ in it whose numbers are pooled
    AMOUNT = auto()  # it says how much is measured: no axis of a figure


@dataclass(frozen=True)
class SettingGroup:
    """A group of `conf/`: the dotted name of the base class of its options, which is imported when it is needed (most
    load torch, and a mistyped key is told before that), and what depends on the choice."""

    base: str
    roles: Role = Role.NONE


GROUPS = {
    "target": SettingGroup("specbench.decoding.model.Target", Role.TASK | Role.LOADED),
    "drafter": SettingGroup("specbench.drafters.base.Drafter", Role.DRAFTING),
    "gamma_policy": SettingGroup("specbench.policies.base.GammaPolicy", Role.DRAFTING),
    "verifier": SettingGroup("specbench.verifiers.base.Verifier", Role.DRAFTING),
    "decoding": SettingGroup("specbench.decoding.search.Decoding", Role.TASK),
    "lenience_policy": SettingGroup("specbench.policies.lenience.LeniencePolicy", Role.DRAFTING),
    "cache": SettingGroup("specbench.cache.slots.SlotCache"),
    "executor": SettingGroup("specbench.executors.base.Executor", Role.LOADED),
    "data": SettingGroup("specbench.data.prompts.Data", Role.TASK),
    "workload": SettingGroup("specbench.policies.workload.Workload", Role.TASK),
    "peers": SettingGroup("specbench.peers.base.Peers", Role.DRAFTING | Role.POOLED),
    "logger": SettingGroup("specbench.report.loggers.Logger", Role.LABEL),
}
OTHERS = {"experiment": Role.LABEL, "hydra": Role.NONE}
MOST_STOPS, LONGEST_STOP = 64, 1000  # strings, and characters of one: all are searched after every round


class RunConfig(BaseSettings):
    """The run's scalars."""

    name: str
    gamma: int = Field(ge=0, le=LARGEST_GAMMA)
    beams: int = Field(ge=1, le=MOST_BEAMS)
    lenience: Lenience
    temperature: Temperature
    top_k: TopK
    top_p: TopP
    repetition_penalty: float = Field(ge=1e-2, le=1e2)
    max_new_tokens: int = Field(ge=1, le=10**7)
    batch_size: int = Field(ge=1, le=10**6)
    prefill_chunk: int = Field(ge=1, le=10**7)
    stop: list[str]
    seed: int = Field(ge=0, le=LARGEST_SEED)
    order: int = Field(ge=0, le=LARGEST_SEED)
    skip: int = Field(default=0, ge=0, le=10**9)
    take: int = Field(default=0, ge=0, le=10**9)
    repeats: int = Field(ge=1, le=1000)
    verdict_tokens: int = Field(ge=0, le=10**9)
    strict: bool
    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    attention: Literal["auto", "sdpa", "triton"]
    force: bool

    def check(self, prefix: str) -> None:
        if len(self.stop) > MOST_STOPS or any(not 0 < len(text) <= LONGEST_STOP for text in self.stop_strings):
            raise ConfigError(
                f"stop={shown(self.stop)} is not allowed: it must be at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} "
                "characters"
            )

    @property
    def stop_strings(self) -> list[str]:
        """`stop`, with its \\n and \\t read as line breaks and tabs, which a shell cannot easily say."""
        return [text.replace("\\n", "\n").replace("\\t", "\t") for text in self.stop]


SCALARS = {  # what depends on each
    "name": Role.LABEL,
    "gamma": Role.DRAFTING,
    "beams": Role.TASK,
    "lenience": Role.DRAFTING,
    "temperature": Role.TASK,
    "top_k": Role.TASK,
    "top_p": Role.TASK,
    "repetition_penalty": Role.TASK,
    "max_new_tokens": Role.TASK,
    "stop": Role.TASK,
    "seed": Role.LOADED | Role.POOLED,
    "order": Role.POOLED,
    "skip": Role.AMOUNT,
    "take": Role.AMOUNT,
    "repeats": Role.POOLED | Role.AMOUNT,
    "repeats_vary": Role.POOLED | Role.AMOUNT,
    "verdict_tokens": Role.DRAFTING | Role.POOLED | Role.AMOUNT,
    "strict": Role.LABEL,
    "device": Role.LOADED,
    "dtype": Role.LOADED,
    "attention": Role.LOADED,
    "force": Role.LABEL,
}


def with_role(role: Role) -> tuple[str, ...]:
    """The keys of a configuration that have this role, or one of several."""
    found = {group: of_group.roles for group, of_group in GROUPS.items()} | OTHERS
    found |= SCALARS
    return tuple(key for key, roles in found.items() if roles & role)
