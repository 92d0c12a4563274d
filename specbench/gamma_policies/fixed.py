"""The paper's policy: the same gamma in every round."""

from dataclasses import dataclass

from specbench.context import Context
from specbench.decoding.state import Draft, State, Verdict
from specbench.settings import setting


class FixedGamma:
    """Drafts `gamma` tokens a round."""

    @dataclass
    class Settings:
        gamma: int = setting(ge=0)

    def __init__(self, settings: Settings, context: Context):
        self.gamma = self.largest = settings.gamma

    def next_gamma(self, state: State) -> list[int]:
        return [self.gamma] * state.batch_size

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        pass
