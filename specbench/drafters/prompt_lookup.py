"""Copies from the context: what followed the last time these tokens stood there.

The paper's input-copying case (section 3.6), for summaries, edits and chats that repeat.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.drafters.row_by_row import PointMassDrafter
from specbench.settings import ConfigError, setting


class PromptLookupDrafter(PointMassDrafter):
    """Looks for the longest suffix, of at most max_match tokens, that occurred before."""

    @dataclass
    class Settings(PointMassDrafter.Settings):
        max_match: int = setting(ge=1)
        min_match: int = setting(ge=1)

        def check(self, prefix: str) -> None:
            if self.min_match > self.max_match:
                raise ConfigError(
                    f"{prefix}min_match={self.min_match} is not allowed: "
                    f"it must be at most {prefix}max_match={self.max_match}"
                )

    def __init__(self, max_match: int, min_match: int):
        self.max_match, self.min_match = max_match, min_match

    def guess(self, row: int, tokens: Sequence[int], gamma: int) -> list[int]:
        last, most = len(tokens) - 1, self.max_match
        longest, start = self.min_match - 1, None
        for end in reversed(range(last)):
            if tokens[end] != tokens[last]:
                continue
            size = 1  # of the suffix that ends here too
            while size < most and size <= end and tokens[end - size] == tokens[last - size]:
                size += 1
            if size > longest:
                longest, start = size, end + 1
            if size == most:
                break
        if start is None:
            return []
        # A copy that reaches the end goes on with what it has copied itself.
        period = len(tokens) - start
        return [tokens[start + i % period] for i in range(gamma)]
