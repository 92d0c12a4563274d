"""Stop strings: a text ends with the first token whose whole decoded text holds one of them."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

SLACK = 16  # characters at the beginning of a window that may differ from those of the whole text
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token of sentencepiece that is a byte


class StopStrings:
    """Finds the token that completes a stop string in a text, which is what the tokenizer makes of all its tokens.

    What a token adds to a text depends on its neighbours: several may be one character, and a decoder may strip or join
    spaces. So the last tokens are decoded, enough of them that the new part of the text is at their end, and if a stop
    string is found, all tokens are, which decides. Special tokens are no part of a text; stop strings that name one are
    searched in the text with special tokens."""

    def __init__(self, strings: Iterable[str], tokenizer: Any):
        self.strings, self.tokenizer = list(strings), tokenizer
        known = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.specials = known | set(tokenizer.all_special_ids)
        names = [name for name in tokenizer.convert_ids_to_tokens(sorted(self.specials)) if name]
        self.naming = [s for s in self.strings if any(name in s for name in names)]
        self.needed = max(map(len, self.strings)) + SLACK
        self.pieces: dict[int, bool] = {}  # by token, whether its characters may depend on those beside it

    def find(self, generated: Sequence[int], new: Sequence[int]) -> int | None:
        """How many of the new tokens to keep, the completing one included; None if none completes a stop string."""
        begin = self._window(generated)
        for kept in range(1, len(new) + 1):
            if self.are_in([*generated[begin:], *new[:kept]]) and self.are_in([*generated, *new[:kept]]):
                return kept
        return None

    def end_of(self, tokens: Sequence[int]) -> int | None:
        """The length in tokens at which a text ends; None if it holds no stop string."""
        return next((n + 1 for n, token in enumerate(tokens) if self.find(tokens[:n], [token])), None)

    def are_in(self, tokens: Sequence[int]) -> bool:
        """Whether the text of these tokens holds a stop string."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        if any(s in text for s in self.strings):
            return True
        return bool(self.naming) and any(s in self.tokenizer.decode(tokens) for s in self.naming)

    def _window(self, tokens: Sequence[int]) -> int:
        """Where to begin to decode, so that `needed` characters before the new tokens are decoded, none in parts."""
        end = len(tokens)
        while end and self._is_piece(tokens[end - 1]):  # new tokens may change what they say
            end -= 1
        begin, step = end, 8
        while begin:
            begin, step = max(0, begin - step), 2 * step
            while begin and self._is_piece(tokens[begin - 1]) and self._is_piece(tokens[begin]):
                begin -= 1
            if len(self.tokenizer.decode(tokens[begin:end], skip_special_tokens=True)) >= self.needed:
                break
        return begin

    def _is_piece(self, token: int) -> bool:
        """Whether a token is part of a character, or one that is left out, between such parts too."""
        if token not in self.pieces:
            name = str(self.tokenizer.convert_ids_to_tokens(token))
            part = BYTE.fullmatch(name) or "\ufffd" in self.tokenizer.decode([token])
            self.pieces[token] = token in self.specials or bool(part)
        return self.pieces[token]
