"""The schedule of transformers' assisted generation."""

from dataclasses import dataclass

from specbench.context import Context
from specbench.decoding.state import Draft, State
from specbench.gamma_policies.rows import PerRow
from specbench.settings import setting


class HeuristicGamma:
    """Two more after a round in which every guess was kept, one fewer after any other, between 1
    and `largest`; each row has its own, from `gamma` on."""

    @dataclass
    class Settings:
        gamma: int = setting(ge=1)
        largest: int = setting(ge=1)

    constant = None

    def __init__(self, settings: Settings, context: Context | None):
        self.first, self.largest = min(settings.gamma, settings.largest), settings.largest
        self.widths = tuple(range(1, settings.largest + 1))
        self.rows: PerRow[int] = PerRow()

    def next_gamma(self, state: State) -> list[int]:
        return [self.rows.of(state, row, self.first) for row in range(state.batch_size)]

    def observe(self, draft: Draft, kept: list[int]) -> None:
        for row, (drafted, new) in enumerate(zip(draft.count.tolist(), kept, strict=True)):
            if new:
                wanted = self.rows[row][1]
                wanted = wanted + 2 if new == drafted + 1 else wanted - 1
                self.rows.change(row, min(max(wanted, 1), self.largest))
