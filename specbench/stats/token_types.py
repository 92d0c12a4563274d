"""What kind of token a guess is, by its decoded text."""

from collections.abc import Callable
from typing import Any

CLASSES = ("word", "number", "punctuation", "whitespace", "special", "other")
UNKNOWN = "\ufffd"  # what bytes that are no character decode to


class Tokens:
    """A vocabulary: its size, and the class of each token."""

    def __init__(self, tokenizer: Any, size: int):
        self.size = size
        self._decode: Callable[..., str] = tokenizer.decode
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._known: dict[int, str] = {}

    def class_of(self, token: int) -> str:
        """One of CLASSES. A token is decoded alone, so one that is a part of a character is "other"."""
        if token not in self._known:
            text = "" if token in self._special else self._decode([token], skip_special_tokens=False)
            self._known[token] = "special" if token in self._special else class_of_text(text)
        return self._known[token]


def class_of_text(text: str) -> str:
    """The class of a text, without whitespace around it: "word" has letters, as identifiers and parts of words have,
    perhaps with digits, underscores or apostrophes; "number" has digits; "punctuation" neither; "other" is a mixture,
    or no text."""
    bare = text.strip()
    if not bare:
        return "whitespace" if text else "other"
    if UNKNOWN in bare:
        return "other"
    if any(map(str.isalpha, bare)) and all(c.isalnum() or c in "_'\u2019" for c in bare):
        return "word" if not bare[0].isdigit() else "other"
    if not any(map(str.isalnum, bare)):
        return "punctuation"
    return "number" if all(c.isnumeric() or c in ".,_" for c in bare) else "other"
