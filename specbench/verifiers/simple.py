"""Base class of the verifiers that depend on the temperature and their own settings."""

from typing import Any

from specbench.decoding.sampling import Sampling
from specbench.decoding.verifier import Verifier


class SimpleVerifier(Verifier):
    """The same rule in every round, without lenience. `greedy` means temperature 0; settings are further arguments of
    the constructor."""

    trees = True

    def __init__(self, greedy: bool):
        self.greedy = greedy

    @classmethod
    def from_settings(cls, settings: Any, sampling: Sampling, lenience: float) -> "SimpleVerifier":
        return cls(sampling.greedy, **vars(settings))
