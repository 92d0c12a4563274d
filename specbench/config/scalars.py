"""The settings of a run: its scalars, its groups, and what depends on each.

Each group's YAML in `conf/` names its class with Hydra's `_target_`; the class has its settings as a nested pydantic
model. A new component is one .py and one .yaml; a new scalar is one field here and one line in `conf/config.yaml`.
"""

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

# Groups of `conf/`, with the base class of their options: imported when needed, since most load torch.
GROUPS = {
    "target": "specbench.models.language_model.LanguageModel",
    "drafter": "specbench.drafters.base.Drafter",
    "gamma_policy": "specbench.policies.base.GammaPolicy",
    "verifier": "specbench.verifiers.base.Verifier",
    "decoding": "specbench.config.decoding.Decoding",
    "lenience_policy": "specbench.policies.lenience.LeniencePolicy",
    "cache": "specbench.cache.slots.SlotCache",
    "executor": "specbench.executors.base.Executor",
    "data": "specbench.data.prompts.Data",
    "workload": "specbench.policies.workload.Workload",
    "peers": "specbench.peers.base.Peers",
    "logger": "specbench.report.loggers.Logger",
}
# Settings that no number depends on: a finished run that differs in these alone is not repeated.
LABELS = ("name", "logger", "force", "strict", "experiment")
# Settings that plain decoding does not depend on: methods that differ in these alone share it.
DRAFTING = ("drafter", "gamma", "gamma_policy", "verifier", "lenience", "lenience_policy", "verdict_tokens", "peers")
# Settings that a loaded target depends on.
LOADED = ("target", "executor", "device", "dtype", "attention", "seed")
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
    skip: int = Field(ge=0, le=10**9)
    take: int = Field(ge=0, le=10**9)
    repeats: int = Field(ge=1, le=1000)
    verdict_tokens: int = Field(ge=0, le=10**9)
    strict: bool
    device: str = Field(pattern=r"^(auto|cpu|cuda(:(0|[1-9][0-9]?))?)$", description="auto, cpu, cuda or cuda:N")
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
