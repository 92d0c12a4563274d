"""SGLang's adaptive speculation: the next longer or shorter of some draft lengths, by the mean number of accepted
guesses."""

from dataclasses import dataclass
from typing import Any

from specbench.contrib.servers.tensorrt_gamma import by_batch
from specbench.decoding.gamma_policy import GammaPolicy, RowsSeen
from specbench.settings import LARGEST_GAMMA, BaseSettings, setting


@dataclass
class Ladder:
    """The candidate draft lengths of a range of batch sizes, and where it stands."""

    steps: list[int]
    place: int
    ema: float  # of accepted guesses, mean over the rows of a round
    rounds: int = 0
    at_zero: int = 0  # updates


class SGLangGamma(GammaPolicy):
    """Every `interval` rounds after the first `warm_up`, gamma falls to the candidate below while the moving average of
    accepted guesses is at most that - .5 + `down`, then rises to the one above while it is more than gamma - .5 + `up`.
    `steps` has the candidates from each batch size on, each range with an average of its own; batch size is active
    rows. After `probe` updates at 0, where nothing is accepted, the next candidate is tried."""

    remembers = True

    @dataclass
    class Settings(BaseSettings):
        steps: dict[str, Any] = setting()
        share: float = setting(gt=0, le=1)
        interval: int = setting(ge=1, le=10**9)
        warm_up: int = setting(ge=0, le=10**9)
        down: float = setting(ge=-LARGEST_GAMMA, le=LARGEST_GAMMA)
        up: float = setting(ge=-LARGEST_GAMMA, le=LARGEST_GAMMA)
        probe: int = setting(ge=1, le=10**9)

        def check(self, prefix: str) -> None:
            by_batch(f"{prefix}steps", self.steps, lists=True)

    def __init__(
        self, steps: dict[Any, Any], share: float, interval: int, warm_up: int, down: float, up: float, probe: int
    ):
        found = by_batch("gamma_policy.steps", steps, lists=True)
        self.share, self.interval, self.warm_up, self.down, self.up, self.probe = (
            share, interval, warm_up, down, up, probe,
        )  # fmt: skip
        middle = {size: len(lengths) // 2 for size, lengths in found.items()}
        self.ladders = {s: Ladder(own, middle[s], float(max(0, own[middle[s]] - 1))) for s, own in found.items()}
        self.widths = tuple(sorted({length for own in found.values() for length in own if length}))
        self.largest = max(self.widths, default=0)

    def next_gamma(self, state: RowsSeen) -> list[int]:
        rows = max(1, sum(state.active))
        self.now_at = self.ladders[max((size for size in self.ladders if size <= rows), default=min(self.ladders))]
        return [self.now_at.steps[self.now_at.place]] * state.batch_size

    def observe(self, drafted: list[int], kept: list[int]) -> None:
        own = self.now_at
        accepted = [new - 1 for new in kept if new]
        if not accepted:
            return
        own.ema += self.share * (sum(accepted) / len(accepted) - own.ema)
        own.rounds += 1
        if own.rounds <= self.warm_up or (own.rounds - self.warm_up) % self.interval:
            return
        while own.place and own.ema <= own.steps[own.place - 1] - 0.5 + self.down:
            own.place -= 1
        while own.place + 1 < len(own.steps) and own.ema > own.steps[own.place] - 0.5 + self.up:
            own.place += 1
        own.at_zero = own.at_zero + 1 if own.steps[own.place] == 0 else 0
        if own.at_zero > self.probe and own.place + 1 < len(own.steps):
            own.place, own.at_zero = own.place + 1, 0
