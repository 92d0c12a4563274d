"""SuffixDecoding (2411.04975): copies the likeliest continuation of the text's last tokens, by counts of the text so
far and, if asked for, of past outputs."""

from collections import abc
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from specbench.decoding.draft import Draft
from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.drafters.base import Drafter
from specbench.drafters.lookup_base import point_mass_chain
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.policies.base import GammaPolicy
from specbench.settings import BaseSettings

Guess = tuple[list[int], list[float]]  # tokens, and for each the probability of the path to it


class SuffixAutomaton:
    """Counts of all strings of up to `depth` tokens in a text, or in several. A state stands for the strings that ended
    at the same places; lists hold what is known of each state. State 0 is the empty string."""

    def __init__(self, depth: int):
        self.depth = depth
        self.next: list[dict[int, int]] = [{}]  # by the token that follows
        self.link = [-1]  # the state of the longest suffix that ended at other places too
        self.length = [0]  # of its longest string, tokens
        self.count = [0]  # occurrences
        self.best = [-1]  # the most frequent next token, of equally frequent ones the most recent; -1 if there is none
        self.restart()

    def restart(self) -> None:
        """Begins another text."""
        self.whole = self.end = self.size = 0  # the states of the whole text and of its last `size` <= depth tokens

    def extend(self, tokens: abc.Sequence[int]) -> None:
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
        known = after[above].get(token)
        if known is not None:  # the begin of a text that occurred in another one
            self.whole = self._reached(above, known, token)
            return
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

    def match(self, tokens: abc.Sequence[int]) -> tuple[int, int]:
        """The state of the longest suffix of some tokens that occurred, and its length, at most `depth`."""
        state = size = 0
        for token in tokens[-self.depth :]:
            while state > 0 and token not in self.next[state]:
                state = self.link[state]
                size = self.length[state]
            if token in self.next[state]:
                state, size = self.next[state][token], size + 1
        return state, size

    def guess(self, state: int, size: int, limits: abc.Sequence[int], min_prob: float) -> Guess:
        """The continuation with the largest score, the sum of its probabilities, after the last m of `size` tokens, for
        any m; of equal scores that of the longest m. After m tokens it has at most limits[m], numbers that rise and
        then fall."""
        found: Guess = [], []
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


@dataclass
class _Request:
    """What is known of the request that has a row."""

    request_id: int
    prompt: int  # tokens
    own: SuffixAutomaton
    text: list[int]  # the sequence's own list, which grows
    read: list[int]  # of it
    kept: bool  # whether its output is one of the past

    def goes_on(self, text: list[int]) -> bool:
        """Whether a text begins with what was read: inside `drafter=hierarchical` tokens may be rejected later."""
        return text is self.text or self.read == text[: len(self.read)]


class SuffixDrafter(Drafter):
    """Guesses the most frequent continuation of the text's last m tokens, for the m with the largest sum of
    probabilities; a guess has at most factor * m + offset tokens. q is a point mass on each. With `past`, the outputs
    of finished requests of the run are searched too: at least the last `past` of them, and at most twice as many."""

    class Settings(BaseSettings):
        depth: int = Field(ge=2, le=1000)
        factor: float = Field(ge=0, le=1000)
        offset: float = Field(ge=0, le=1000)
        min_prob: float = Field(ge=0, le=1)
        past: int = Field(ge=0, le=10**6)

    @classmethod
    def point_masses(cls, settings: Any) -> bool:
        return True

    def __init__(self, depth: int, factor: float, offset: float, min_prob: float, past: int, gamma: int):
        """`gamma` is the most levels of any round. The choice among continuations does not depend on the round's own
        gamma: after the same text the first guess is the same."""
        self.depth, self.min_prob, self.keep = depth, min_prob, past
        self.reads_text = not past  # past outputs: it depends on the requests before
        self.limits = [min(gamma, int(factor * m + offset), depth - m) for m in range(depth + 1)]
        self.requests: dict[int, _Request] = {}
        self.outputs: list[list[int]] = []
        self.past = SuffixAutomaton(depth)

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "SuffixDrafter":
        return cls(**vars(settings), gamma=context.gamma)

    def begin(self, state: State, stop: GammaPolicy | None = None) -> None:
        while self.requests:
            self._remember(self.requests.pop(min(self.requests)))

    def propose(self, state: State, gamma: list[int]) -> Draft:
        return point_mass_chain([self.guess(state, row)[0][:g] if g else [] for row, g in enumerate(gamma)], state)

    def guess(self, state: State, row: int) -> Guess:
        """The tokens that may follow a row's committed text, with their probabilities."""
        known, sequence = self.requests.get(row), state.at(row)
        text = sequence.tokens
        if known is None or known.request_id != sequence.request_id or not known.goes_on(text):
            known = self._open(row, sequence, kept=not state.warm_up)
        known.text, new = text, text[len(known.read) :]
        known.read += new
        known.own.extend(new)
        found = known.own.guess(known.own.end, known.own.size, self.limits, self.min_prob)
        if not self.outputs:
            return found
        at = self.past.match(known.read[-self.depth :])
        past = self.past.guess(*at, self.limits, self.min_prob)
        return past if sum(past[1]) > sum(found[1]) else found

    def _open(self, row: int, sequence: Sequence, kept: bool) -> _Request:
        """Forgets the row's last request, and reads what an encoder read for this one."""
        old = self.requests.get(row)
        if old is not None and old.request_id != sequence.request_id:
            self._remember(old)
        new = SuffixAutomaton(self.depth)
        new.extend(sequence.encoder_input or ())
        new.restart()
        self.requests[row] = _Request(sequence.request_id, sequence.prompt_length, new, [], [], kept)
        return self.requests[row]

    def _remember(self, request: _Request) -> None:
        """Adds a finished output to those of the past, if any are kept."""
        if not self.keep or not request.kept:
            return
        new = [request.text[request.prompt :]]
        if len(self.outputs) == 2 * self.keep:
            new, self.outputs, self.past = [*self.outputs[-self.keep :], *new], [], SuffixAutomaton(self.depth)
        for tokens in new:
            self.past.extend(tokens)
            self.past.restart()
        self.outputs += new
