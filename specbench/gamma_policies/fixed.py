"""The paper's policy: the same gamma in every round."""

from dataclasses import dataclass

from specbench.context import Context
from specbench.decoding.state import Draft, State
from specbench.settings import setting


class FixedGamma:
    """Drafts `gamma` tokens a round."""

    @dataclass
    class Settings:
        gamma: int = setting(ge=0)

    def __init__(self, settings: Settings, context: Context | None):
        self.constant = self.largest = settings.gamma
        self.widths = (settings.gamma,)

    def next_gamma(self, state: State) -> list[int]:
        return [self.constant] * state.batch_size

    def observe(self, draft: Draft, kept: list[int]) -> None:
        pass
