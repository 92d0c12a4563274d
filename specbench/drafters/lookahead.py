"""Lookahead decoding (2402.02057): the target also moves Jacobi trajectories on, whose n-grams are later guesses.

B rows, L = ngram - 1 levels and W columns of a window."""

from dataclasses import dataclass, field
from typing import Any

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.drafter import Drafter
from specbench.decoding.gamma_policy import GammaPolicy
from specbench.decoding.model import Scores
from specbench.decoding.state import State
from specbench.decoding.token_tree import MISSING, ROOT
from specbench.decoding.transfers import constant, counts, upload
from specbench.errors import ConfigError
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.settings import BaseSettings, setting


@dataclass
class _Request:
    """The window [L][W], whose token (l, j) may stand l + j + 1 behind the text, and the pool: by token the L tokens
    that followed it in n-grams, those of the last one at the end."""

    serial: int
    window: list[list[int]]
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)

    def add(self, first: int, *others: int, most: int) -> None:
        """Puts an n-gram into the pool, which keeps `most` of each first token."""
        own = self.pool.setdefault(first, {})
        own.pop(others, None)
        own[others] = None
        if len(own) > most:
            del own[next(iter(own))]


class LookaheadDrafter(Drafter):
    """A draft is a tree: up to `guesses` n-grams of the pool that begin with the last token, and then the window, a
    chain of its tokens (0, j) with a chain (1, j), (2, j), .. below each. The likeliest token after (L - 1, j) is one
    of the next window. Guesses are point masses. A draft is `gamma` deep: W = gamma + 1 - L."""

    trees = True
    reads_text = False

    @dataclass
    class Settings(BaseSettings):
        ngram: int = setting(ge=2, le=100)
        guesses: int = setting(ge=1, le=1000)
        prompt: bool = setting()

    @classmethod
    def point_masses(cls, settings: Any) -> bool:
        return True

    @classmethod
    def nodes(cls, settings: Any, gamma: int) -> int:
        return int((settings.ngram - 1) * (settings.guesses + max(0, gamma + 2 - settings.ngram)))

    def __init__(self, ngram: int, guesses: int, prompt: bool, gamma: int):
        """With `prompt` the pool begins with the n-grams of the prompt."""
        self.length, self.width, self.guesses, self.prompt = ngram - 1, gamma + 2 - ngram, guesses, prompt
        # Nodes by depth, 0 and 1 for pool and window, and the number of the n-gram or the level.
        pool = [(depth, 0, number) for depth in range(ngram - 1) for number in range(guesses)]
        window = [(level + j, 1, level) for level in range(ngram - 1) for j in range(self.width)]
        self.nodes_in_order = sorted(pool + window)
        place = {node: i for i, node in enumerate(self.nodes_in_order)}
        self.parent = [place.get((d - 1, kind, max(0, n - kind)), ROOT) for d, kind, n in self.nodes_in_order]
        self.levels = tuple(sum(node[0] == depth for node in place) for depth in range(gamma))
        self.last = tuple(place[ngram - 2 + j, 1, ngram - 2] + 1 for j in range(self.width))  # their entries

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "LookaheadDrafter":
        if context.gamma < settings.ngram - 1:
            raise ConfigError(
                f"gamma={context.gamma} is not possible with drafter.ngram={settings.ngram}: it is the depth of a "
                f"draft, which holds n-grams, so it must be at least {settings.ngram - 1}"
            )
        return cls(settings.ngram, settings.guesses, settings.prompt, context.gamma)

    def begin(self, state: State, stop: GammaPolicy | None = None) -> None:
        self.requests: dict[int, _Request] = {}

    def propose(self, state: State, gamma: list[int]) -> Draft:
        self.gamma, device = gamma, state.tokens.device
        if not any(gamma):
            return Draft.empty(state.batch_size, device)
        tokens, parents = [], []
        for row, on in enumerate(gamma):
            own = self._request(state, row) if on else _Request(0, [[0] * self.width] * self.length)
            found = [*reversed(own.pool.get(state.texts[row][state.lengths[row] - 1], {}))] if on else []
            there = [on > 0 and (kind > 0 or n < len(found)) for _, kind, n in self.nodes_in_order]
            nodes = zip(self.nodes_in_order, self.parent, there, strict=True)
            parents.append([above if known else MISSING for _, above, known in nodes])
            tokens.append([(own.window[n][d - n] if kind else found[n][d]) if known else 0
                           for (d, kind, n), known in zip(self.nodes_in_order, there, strict=True)])  # fmt: skip
        count = counts(tuple(sum(depth < g for depth, _, _ in self.nodes_in_order) for g in gamma), device)
        return Draft(upload(tokens, device), self.levels, upload(parents, device), None, count, repeats=True)

    def settle(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, base: Any) -> None:
        """Moves the window one step on, and to where the text ends now."""
        if not draft.depth:
            return
        best = scores.p[:, constant(upload)(self.last, scores.p.device)].argmax(-1).tolist()  # [B][W]
        for row, (kept, g) in enumerate(zip(state.kept, self.gamma, strict=True)):
            if kept and g:
                own, read = self.requests[row], max(0, g + 1 - self.length)
                for ngram in list(zip(*own.window, best[row], strict=True))[:read]:
                    own.add(*ngram, most=self.guesses)
                levels = [*own.window[1:], best[row][:read] + own.window[-1][read:]]
                own.window = [(level[kept - 1 :] + level[-1:] * (kept - 1))[: self.width] for level in levels]

    def _request(self, state: State, row: int) -> _Request:
        """What is known of the row's request. Its window begins with the first tokens of the prompt."""
        own, text = self.requests.get(row), state.texts[row][: state.lengths[row]]
        if own is None or own.serial != state.serials[row]:
            window = [[text[(level + j) % len(text)] for j in range(self.width)] for level in range(self.length)]
            own = self.requests[row] = _Request(state.serials[row], window)
            for end in range(self.length + 1, len(text) + 1 if self.prompt else 0):
                own.add(*text[end - self.length - 1 : end], most=self.guesses)
        return own
