"""TensorRT-LLM's rules: a draft length for each batch size, and no drafts any more once too little was accepted."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbench.decoding.gamma_policy import GammaPolicy, RowsSeen
from specbench.errors import ConfigError, shown
from specbench.settings import LARGEST_GAMMA, BaseSettings, setting


def by_batch(key: str, found: Mapping[Any, Any], lists: bool = False) -> dict[int, Any]:
    """Draft lengths by batch size: numbers, or rising `lists` of them. Raises ConfigError, naming the key."""
    what = "rising lists of draft lengths" if lists else "draft lengths"
    rule = f"it must give batch sizes of 1 or more {what} of 0 to {LARGEST_GAMMA}"
    made: dict[int, Any] = {}
    for size, own in found.items():
        lengths = own if lists and isinstance(own, list) and own else [own]
        whole = all(type(length) is int and 0 <= length <= LARGEST_GAMMA for length in lengths)
        if not str(size).isdecimal() or not int(size) or not whole or lengths != sorted({*lengths}):
            raise ConfigError(f"{key}={{{shown(size)}: {shown(own)}}} is not allowed: {rule}")
        made[int(size)] = lengths if lists else own
    if not made:
        raise ConfigError(f"{key} is empty: {rule}")
    return made


class TensorRTGamma(GammaPolicy):
    """`schedule` gives gamma up to each batch size (active rows), and 0 above the last. Once the last `window` requests
    that ended had a mean of fewer than `threshold` accepted guesses a round, nothing is drafted any more."""

    remembers = True

    @dataclass
    class Settings(BaseSettings):
        schedule: dict[str, Any] = setting()
        window: int = setting(ge=0, le=10**9)
        threshold: float = setting(ge=0, le=LARGEST_GAMMA)

        def check(self, prefix: str) -> None:
            by_batch(f"{prefix}schedule", self.schedule)

    def __init__(self, schedule: dict[Any, Any], window: int, threshold: float):
        self.schedule = dict(sorted(by_batch("gamma_policy.schedule", schedule).items()))
        self.threshold, self.off = threshold, False
        self.widths = tuple(sorted({length for length in self.schedule.values() if length}))
        self.largest = max(self.widths, default=0)
        self.rows: dict[int, list[int]] = {}  # by row, its request's number, accepted guesses and rounds
        self.ended: deque[float] = deque(maxlen=window)

    def next_gamma(self, state: RowsSeen) -> list[int]:
        for row, on in enumerate(state.active):
            owner, accepted, rounds = self.rows.get(row, [-1, 0, 0])
            if rounds and (not on or owner != state.serials.get(row)):
                self.ended.append(accepted / rounds)
            if not on or owner != state.serials.get(row):
                self.rows[row] = [state.serials.get(row, -1), 0, 0]
        full = len(self.ended) == (self.ended.maxlen or -1)
        self.off |= full and sum(self.ended) / len(self.ended) < self.threshold
        rows = sum(state.active)
        gamma = 0 if self.off else next((g for size, g in self.schedule.items() if rows <= size), 0)
        return [gamma] * state.batch_size

    def observe(self, drafted: list[int], kept: list[int]) -> None:
        for row, new in enumerate(kept):
            if new:
                self.rows[row][1] += new - 1
                self.rows[row][2] += 1
