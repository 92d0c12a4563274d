"""The settings of a run: its scalars, its groups, and what depends on each.

Each group's YAML in `conf/` names its class with Hydra's `_target_`; the class has its schema as a nested `Settings`
dataclass. A new component is one .py and one .yaml; a new scalar is one field here and one line in `conf/config.yaml`.
"""

from dataclasses import dataclass, fields
from enum import Flag, auto

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


class Role(Flag):
    """What depends on a setting. One without roles: all numbers, compiled code and plain decoding depend on it, a
    loaded target does not, and runs that differ in it are not pooled."""

    NONE = 0
    LABEL = auto()  # no number depends on it: a finished run that differs in these alone is not repeated
    TASK = auto()  # it says what is decoded: runs that differ in it do different work
    LOADED = auto()  # a loaded target depends on it
    DRAFTING = auto()  # plain decoding does not depend on it: jobs that differ in these alone share it
    UNTRACED = auto()  # compiled code does not depend on it, besides the shapes of its calls
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
    "executor": SettingGroup("specbench.decoding.executor.Executor", Role.LOADED | Role.UNTRACED),
    "data": SettingGroup("specbench.data.prompts.Data", Role.TASK | Role.UNTRACED),
    "workload": SettingGroup("specbench.policies.workload.Workload", Role.TASK | Role.UNTRACED),
    "baseline": SettingGroup("specbench.peers.base.Peers", Role.DRAFTING | Role.UNTRACED | Role.POOLED),
    "logger": SettingGroup("specbench.results.loggers.base.Logger", Role.LABEL),
}
METRICS = "metrics"  # of the group `metric`, several may be chosen: metric=[a,b]
METRIC = "specbench.stats.metrics.base.Metric"  # their base class
OTHERS = {METRICS: Role.DRAFTING | Role.POOLED, "metric": Role.NONE, "experiment": Role.LABEL, "hydra": Role.NONE}
MOST_STOPS, LONGEST_STOP = 64, 1000  # strings, and characters of one: all are searched after every round


@dataclass
class RunConfig(BaseSettings):
    """The run's scalars."""

    name: str = setting(roles=Role.LABEL)
    gamma: int = setting(ge=0, le=LARGEST_GAMMA, roles=Role.DRAFTING | Role.UNTRACED)
    beams: int = setting(ge=1, le=MOST_BEAMS, roles=Role.TASK)
    lenience: float = setting(**LENIENCE, roles=Role.DRAFTING)
    temperature: float = setting(**TEMPERATURE, roles=Role.TASK)
    top_k: int = setting(**TOP_K, roles=Role.TASK)
    top_p: float = setting(**TOP_P, roles=Role.TASK)
    repetition_penalty: float = setting(**REPETITION_PENALTY, roles=Role.TASK)
    max_new_tokens: int = setting(ge=1, le=10**7, roles=Role.TASK | Role.UNTRACED)
    batch_size: int = setting(ge=1, le=10**6, roles=Role.UNTRACED)
    prefill_chunk: int = setting(ge=1, le=10**7, roles=Role.UNTRACED)
    stop: list[str] = setting(roles=Role.TASK | Role.UNTRACED)
    seed: int = setting(ge=0, le=LARGEST_SEED, roles=Role.LOADED | Role.UNTRACED | Role.POOLED)
    order: int = setting(ge=0, le=LARGEST_SEED, roles=Role.UNTRACED | Role.POOLED)
    skip: int = setting(ge=0, le=10**9, default=0, roles=Role.UNTRACED | Role.AMOUNT)
    take: int = setting(ge=0, le=10**9, default=0, roles=Role.UNTRACED | Role.AMOUNT)
    repeats: int = setting(ge=1, le=1000, roles=Role.UNTRACED | Role.POOLED | Role.AMOUNT)
    repeats_vary: str = setting(
        choices=("none", "order", "seed", "both"), roles=Role.UNTRACED | Role.POOLED | Role.AMOUNT
    )
    verdict_tokens: int = setting(ge=0, le=10**9, roles=Role.DRAFTING | Role.UNTRACED | Role.POOLED | Role.AMOUNT)
    strict: bool = setting(roles=Role.LABEL)
    device: str = setting(roles=Role.LOADED)
    dtype: str = setting(choices=("auto", "float32", "bfloat16", "float16"), roles=Role.LOADED)
    attention: str = setting(choices=("auto", "sdpa", "triton"), roles=Role.LOADED)
    force: bool = setting(roles=Role.LABEL)

    def check(self, prefix: str) -> None:
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


def with_role(role: Role) -> tuple[str, ...]:
    """The keys of a configuration that have this role, or one of several."""
    found = {group: of_group.roles for group, of_group in GROUPS.items()} | OTHERS
    found |= {field.name: field.metadata["roles"] or Role.NONE for field in fields(RunConfig)}
    return tuple(key for key, roles in found.items() if roles & role)
