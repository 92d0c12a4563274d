"""What Algorithm 1 needs of a target, a drafter, a verifier, a gamma policy and an executor. Their classes stand in
rooms that know this one: `models`, `drafters`, `verifiers`, `policies`, `executors`. B is the number of rows."""

from collections import abc
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from specbench.decoding.draft import Draft, Scores, Verdict
from specbench.decoding.noise import Noise
from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State


class Executor(Protocol):
    """How functions of tensors run; see `specbench.executors.base`."""

    fixed_shapes: bool
    whole_rounds: bool
    marks: abc.Sequence[tuple[Any, Any]]

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A faster version of a function of tensors."""


class Model(Protocol):
    """A language model whose cache has rows that requests enter and leave; see `specbench.models.cached_model`."""

    cached: list[int]  # by row, the number of leading tokens in the cache

    def may_admit(self, sequence: Sequence, columns: int) -> bool: ...
    def admit(self, row: int, sequence: Sequence, columns: int) -> None: ...
    def encode(self, row: int, sequence: Sequence) -> bool: ...
    def prefill(self, state: State, *, chunk: int) -> None: ...
    def read(self, state: State, row: int, begin: int, end: int) -> None: ...
    def prompt_read(self, row: int, sequence: Sequence) -> None: ...
    def release(self, row: int) -> None: ...


class Target(Protocol):
    """M_p, the model that speculative decoding speeds up; see `specbench.models.language_model`."""

    @property
    def executor(self) -> Executor: ...

    def score(self, state: State, draft: Draft, keep_hidden: bool = False) -> Scores:
        """Runs M_p once on the last committed token and every guess ("Run M_p in parallel" of Algorithm 1)."""

    def rollback(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, root: Tensor) -> None:
        """Keeps the accepted guesses in the cache and forgets the others. root [B] is the position of node 0."""


class GammaPolicy(Protocol):
    """Chooses gamma for every row and round; see `specbench.policies.base`."""

    widths: tuple[int, ...]
    constant: int | None
    whole: bool

    @property
    def stop(self) -> Any:
        """Itself if it decides after each guess whether to draft another, else None."""

    def next_gamma(self, state: State) -> list[int]: ...
    def observe(self, drafted: list[int], kept: list[int]) -> None: ...


class Drafter(Protocol):
    """Proposes guesses for every row; see `specbench.drafters.base`."""

    context: int
    widths: abc.Sequence[int]

    @property
    def needs_hidden(self) -> bool: ...
    def begin(self, state: State, stop: Any = None) -> None: ...
    def propose(self, state: State, gamma: list[int]) -> Draft: ...
    def whole_round(
        self, state: State, target: Any, verifier: Any, gamma: list[int]
    ) -> tuple[Draft, Scores, Verdict, Tensor] | None: ...
    def steps(self, gamma: list[int]) -> int: ...
    def rollback(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, root: Tensor) -> None: ...


class Verifier(Protocol):
    """Accepts or rejects guesses; see `specbench.verifiers.base`."""

    @property
    def looks_ahead(self) -> bool: ...
    def under(self, state: State) -> "Verifier": ...
    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict: ...
