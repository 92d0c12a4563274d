"""Continuations of the text's last tokens, without a model or training: prompt lookup (section 3.6), and by counts of
the text so far n-grams (section 3.6) and SuffixDecoding (2411.04975)."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pydantic import Field

from specbench.decoding.state import State
from specbench.drafters.lookup_base import PointMassDrafter, refuse_falling
from specbench.models.language_model import LanguageModel
from specbench.models.load import Context
from specbench.policies.base import GammaPolicy
from specbench.settings import BaseSettings

Guess = tuple[list[int], list[float]]  # tokens, and for each the probability of the path to it


class PromptLookupDrafter(PointMassDrafter):
    """Copies after the longest suffix, of min_match to max_match tokens, that occurred before, where it last did."""

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


class SuffixAutomaton:
    """Counts of all strings of up to `depth` tokens in a text. A state stands for the strings that ended at the same
    places; lists hold what is known of each state. State 0 is the empty string."""

    def __init__(self, depth: int):
        self.depth = depth
        self.next: list[dict[int, int]] = [{}]  # by the token that follows
        self.link = [-1]  # the state of the longest suffix that ended at other places too
        self.length = [0]  # of its longest string, tokens
        self.count = [0]  # occurrences
        self.best = [-1]  # the most frequent next token, of equally frequent ones the most recent; -1 if there is none
        self.whole = self.end = self.size = 0  # the states of the whole text and of its last `size` <= depth tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens behind the text."""
        after, link, length, count, best = self.next, self.link, self.length, self.count, self.best
        end, size, depth = self.end, self.size, self.depth
        for token in tokens:
            self._append(token)
            before, end = end, after[end][token]
            size = min(size + 1, depth)
            while length[link[end]] >= size:
                end = link[end]
            state = end
            while state > 0:
                count[state] += 1
                state = link[state]
            while before > 0:
                most_frequent = best[before]
                if most_frequent != token:
                    own = after[before]
                    if most_frequent < 0 or count[own[token]] >= count[own[most_frequent]]:
                        best[before] = token
                before = link[before]
        self.end, self.size = end, size

    def _append(self, token: int) -> None:
        """Adds the strings that end with a new token (Blumer et al. 1985)."""
        after, link, above = self.next, self.link, self.whole
        known: int | None = None
        self.whole = state = len(link)
        after.append({})
        link.append(0)
        self.length.append(self.length[above] + 1)
        self.count.append(0)
        self.best.append(-1)
        while known is None:
            after[above][token] = state
            above = link[above]
            if above < 0:
                return
            known = after[above].get(token)
        link[state] = self._reached(above, known, token)

    def _reached(self, above: int, known: int, token: int) -> int:
        """The state of the longest string of `above` and a token, which lies in `known`; if it is not the longest of
        that state, a new state has it and all that are shorter."""
        size = self.length[above] + 1
        if self.length[known] == size:
            return known
        state = len(self.link)
        self.next.append(dict(self.next[known]))
        self.length.append(size)
        for values in (self.link, self.count, self.best):
            values.append(values[known])
        self.link[known] = state
        while above >= 0 and self.next[above].get(token) == known:
            self.next[above][token] = state
            above = self.link[above]
        return state

    def guess(self, limits: Sequence[int], min_prob: float) -> Guess:
        """The continuation with the largest score, the sum of its probabilities, after the text's last m tokens, for
        any m; of equal scores that of the longest m. It has at most limits[m] tokens, which rise and then fall."""
        found: Guess = [], []
        state, size = self.end, self.size
        score, length, link = 0.0, self.length, self.link
        while state > 0:
            above = link[state]
            size = min(size, length[state])
            limit = limits[size]
            while size > length[above] + 1 and limits[size - 1] > limit:  # a shorter m has room for more
                size -= 1
                limit = limits[size]
            if limit > score:  # no probability is above 1
                own = self._walk(state, limit, min_prob)
                if (total := sum(own[1])) > score:
                    found, score = own, total
            state = above
        return found

    def _walk(self, state: int, limit: int, min_prob: float) -> Guess:
        """At most `limit` tokens, each the most frequent one, while their probability, the product of count(with the
        token) / count(before it), is at least `min_prob`."""
        count, best, after = self.count, self.best, self.next
        tokens: list[int] = []
        probs: list[float] = []
        prob, token = 1.0, best[state]
        while token >= 0 and len(tokens) < limit:
            before, state = count[state], after[state][token]
            prob *= count[state] / before
            if prob < min_prob:
                break
            tokens.append(token)
            probs.append(prob)
            token = best[state]
        return tokens, probs

    def chain(self, limit: int, shortest: int) -> list[int]:
        """At most `limit` tokens, each the most frequent after the longest known end, of `shortest` tokens or more."""
        state, size = self.end, self.size
        tokens: list[int] = []
        while len(tokens) < limit:
            size = min(size, self.depth - 1)
            while state and self.length[self.link[state]] >= size:
                state = self.link[state]
            while state and self.best[state] < 0:
                state = self.link[state]
                size = self.length[state]
            if size < shortest:
                break
            token = self.best[state]
            tokens.append(token)
            state, size = self.next[state][token], size + 1
        return tokens


class CountingDrafter(PointMassDrafter):
    """Guesses by what was counted in each row's text."""

    def __init__(self, depth: int):
        self.depth = depth

    def begin(self, state: State, stop: GammaPolicy | None = None) -> None:
        # By row the counts, the text, which may grow, and what was read of it.
        self.known: dict[int, tuple[SuffixAutomaton, Sequence[int], list[int]]] = {}

    def counted(self, row: int, tokens: Sequence[int]) -> SuffixAutomaton:
        """The counts of a row's text. A text that does not begin with what was read is counted from its start: another
        request's, or one whose tokens were rejected inside `drafter=hierarchical`."""
        counts, text, read = self.known.get(row, (None, (), []))
        if counts is None or not (tokens is text or read == tokens[: len(read)]):
            counts, read = SuffixAutomaton(self.depth), []
        new = tokens[len(read) :]
        counts.extend(new)
        read.extend(new)
        self.known[row] = counts, tokens, read
        return counts


class NgramDrafter(CountingDrafter):
    """Guesses the most frequent continuation of the longest known context, chained on its own guesses (section 3.6); of
    equally frequent ones the most recent. An n-gram of order k is a context of k - 1 tokens and the token after it."""

    class Settings(BaseSettings):
        min_order: int = Field(ge=2, le=100)
        max_order: int = Field(ge=2, le=100)

        def check(self, prefix: str) -> None:
            refuse_falling(self, prefix, "min_order", "max_order")

    def __init__(self, min_order: int, max_order: int):
        super().__init__(depth=max_order)
        self.min_order = min_order

    def guess(self, row: int, tokens: Sequence[int], gamma: int) -> list[int]:
        return self.counted(row, tokens).chain(gamma, self.min_order - 1)


class SuffixDrafter(CountingDrafter):
    """Guesses the most frequent continuation of the text's last m tokens, for the m with the largest sum of
    probabilities; a guess has at most factor * m + offset tokens. q is a point mass on each."""

    class Settings(BaseSettings):
        depth: int = Field(ge=2, le=1000)
        factor: float = Field(ge=0, le=1000)
        offset: float = Field(ge=0, le=1000)
        min_prob: float = Field(ge=0, le=1)

    def __init__(self, depth: int, factor: float, offset: float, min_prob: float, gamma: int):
        """`gamma` is the most levels of any round: the first guess after a text does not depend on the round's own."""
        super().__init__(depth)
        self.min_prob = min_prob
        self.limits = [min(gamma, int(factor * m + offset), depth - m) for m in range(depth + 1)]

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "SuffixDrafter":
        return cls(**vars(settings), gamma=context.gamma)

    def guess(self, row: int, tokens: Sequence[int], gamma: int) -> list[int]:
        return self.counted(row, tokens).guess(self.limits, self.min_prob)[0][:gamma]
