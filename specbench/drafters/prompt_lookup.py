"""Prompt lookup: copies what followed an earlier occurrence of the text's last tokens.

The paper's copying from the context (section 3.6), for summaries, edits and chats that repeat.
"""

from collections.abc import Sequence
from contextlib import suppress

from pydantic import Field

from specbench.drafters.lookup_base import PointMassDrafter, refuse_falling
from specbench.settings import BaseSettings


class PromptLookupDrafter(PointMassDrafter):
    """Copies after the longest suffix of the text, of min_match to max_match tokens, that occurred before; of equally
    long ones the most recent."""

    class Settings(BaseSettings):
        max_match: int = Field(ge=1, le=1000)
        min_match: int = Field(ge=1, le=1000)

        def check(self, prefix: str) -> None:
            refuse_falling(self, prefix, "min_match", "max_match")

    def __init__(self, max_match: int, min_match: int):
        self.max_match, self.min_match = max_match, min_match

    def guess(self, row: int, tokens: Sequence[int], gamma: int) -> list[int]:
        last, most = len(tokens) - 1, self.max_match
        longest, start = self.min_match - 1, None
        back, at = tokens[last - 1 :: -1] if last else [], -1
        with suppress(ValueError):  # of `index`: there is no earlier one
            while longest < most:
                at = back.index(tokens[last], at + 1)
                end, size = last - 1 - at, 1  # of the suffix that ends here too
                while size < most and size <= end and tokens[end - size] == tokens[last - size]:
                    size += 1
                if size > longest:
                    longest, start = size, end + 1
        if start is None:
            return []
        # A copy that reaches the end of the text goes on with its own first tokens.
        period = len(tokens) - start
        return [tokens[start + i % period] for i in range(gamma)]
