"""Stop strings: texts that end a completion, however the tokenizer splits them."""

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Finds the token that completes one of the stop strings."""

    def __init__(self, strings: Sequence[str], tokenizer: Any):
        self.strings, self.tokenizer = list(strings), tokenizer
        # A token may hold a part of a character only, so a string of n bytes spans at most n tokens.
        self.reach = max(len(s.encode()) for s in strings)

    def find(self, generated: Sequence[int], new: Sequence[int]) -> int | None:
        """How many of the new tokens to keep, the completing one included; None if none completes a stop string."""
        before = list(generated[-self.reach :])
        for kept in range(1, len(new) + 1):
            text = self.tokenizer.decode([*before, *new[:kept]], skip_special_tokens=True)
            if any(s in text for s in self.strings):
                return kept
        return None
