"""Copies from the context: what followed the last time these tokens stood there.

The paper's input-copying case (section 3.6), for summaries, edits and chats that repeat.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.context import Context
from specbench.drafters.rows import PointMassDrafter
from specbench.settings import ConfigError, setting


class PromptLookupDrafter(PointMassDrafter):
    """Looks for the longest suffix, of at most max_match tokens, that occurred before."""

    @dataclass
    class Settings:
        max_match: int = setting(ge=1)
        min_match: int = setting(ge=1)

        def check(self, prefix: str) -> None:
            if self.min_match > self.max_match:
                raise ConfigError(
                    f"{prefix}min_match={self.min_match} is not allowed: "
                    f"it must be at most {prefix}max_match={self.max_match}"
                )

    def __init__(self, settings: Settings, context: Context):
        self.settings = settings

    def guess(self, row: int, tokens: Sequence[int], gamma: int) -> list[int]:
        text = np.asarray(tokens)
        for size in range(min(self.settings.max_match, len(text) - 1), self.settings.min_match - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
            matches = np.flatnonzero((windows == text[-size:]).all(1))
            if len(matches):
                start = matches[-1] + size
                # A copy that reaches the end goes on with what it has copied itself.
                period = len(text) - start
                return [int(text[start + i % period]) for i in range(gamma)]
        return []
