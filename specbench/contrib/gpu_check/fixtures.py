"""What the checks work with: runs composed as on the command line, and texts in the models' caches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specbench.config.build import build
from specbench.config.compose import compose
from specbench.config.validate import check
from specbench.decoding.noise import prompt_key
from specbench.decoding.state import Job, State
from specbench.executors.cudagraph import CudaGraphExecutor
from specbench.run.components import Components

# Llama 3.2 1B drafts for 3B: real shapes, random weights, guesses accepted at a given rate.
PAIR = ("target=llama3b", "drafter=llama1b", "target.weights=random", "drafter.weights=random", "gamma=5",
        "verifier=synthetic", "verifier.alpha=0.8")  # fmt: skip
TARGET = ("target=llama3b", "target.weights=random", "drafter=ngram")  # the 3B shape alone
GRAPHS = "executor=cudagraph"
# The executor of graphs with the shapes of graphs, but without any.
WITHOUT_GRAPHS = (GRAPHS, "executor._target_=specbench.contrib.gpu_check.fixtures.Uncaptured", "executor.compile=false")


class Uncaptured(CudaGraphExecutor):
    """Runs the functions that would be captured, on the same shapes, and reads every round at once: what graphs, and
    rounds that are launched ahead, must agree with."""

    def captured(self, function: Any, models: Any) -> Any:
        return function

    def runs_ahead(self, decoder: str, obstacle: str | None) -> bool:
        return False


class Lab:
    """A device to check, a folder for what the checks write, and whether graphs are of compiled programs where a check
    does not say."""

    def __init__(self, device: torch.device, folder: Path, compiled: bool = False):
        self.device, self.folder, self.compiled = device, folder, compiled

    def parts(self, *overrides: str) -> Components:
        """The parts of a run with these overrides on this device, built as a run's are. Raises ConfigError."""
        with torch.inference_mode(False):
            return build(check(compose(self.overrides(overrides))), lambda text: None)

    def overrides(self, overrides: Sequence[str]) -> list[str]:
        """These overrides, and what all runs of the checks share."""
        kind = [f"executor.compile={str(self.compiled).lower()}"] if GRAPHS in overrides else []
        return [f"device={self.device}", "logger=none", *kind, *overrides]


def jobs_of(parts: Components, count: int, length: int, new: int) -> list[Job]:
    """Jobs with `count` prompts of `length` tokens, which end after `new` more."""
    vocab = min(parts.target.vocab_size, 256)
    return [
        Job([(7 * row + 3 * place) % vocab for place in range(length)], length + new, prompt_key(parts.seed, f"{row}"))
        for row in range(count)
    ]


def text_in_cache(parts: Components, length: int, rows: int = 1) -> State:
    """A state of texts of `length` tokens, all but the last of which the target has read, as before a round."""
    target = parts.target
    state = State.start(jobs_of(parts, rows, length, new=parts.spare), [], parts.spare, target.device)
    target.allocate(rows, state.tokens.shape[1])
    target.prefill(state)
    return state
