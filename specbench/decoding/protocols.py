"""What Algorithm 1 needs of a drafter, a verifier and a gamma policy. Their base classes stand in the rooms `drafters`,
`verifiers` and `policies`, which know this one. B rows, N nodes, D levels, V vocabulary."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.model import Scores
from specbench.decoding.noise import Noise
from specbench.decoding.state import State


class GammaPolicy(Protocol):
    """Chooses gamma for every row and round; see `specbench.policies.base`."""

    largest: int
    widths: tuple[int, ...]
    constant: int | None

    @property
    def stop(self) -> Any:
        """Itself if it decides after each guess whether to draft another, else None."""

    def next_gamma(self, state: State) -> list[int]: ...

    def observe(self, drafted: list[int], kept: list[int]) -> None: ...


class Drafter(Protocol):
    """Proposes guesses for every row; see `specbench.drafters.base`."""

    context: int
    widths: Sequence[int]

    @property
    def needs_hidden(self) -> bool: ...

    def begin(self, state: State, stop: Any = None) -> None: ...

    def propose(self, state: State, gamma: list[int]) -> Draft: ...

    def steps(self, gamma: list[int]) -> int: ...

    def rollback(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, root: Tensor) -> None: ...


class Verifier(Protocol):
    """Accepts or rejects guesses; see `specbench.verifiers.base`."""

    @property
    def looks_ahead(self) -> bool: ...

    def under(self, state: State) -> "Verifier": ...

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict: ...
