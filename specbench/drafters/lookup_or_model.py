"""A lookup drafts where it promises more than the model, else the model drafts: a hybrid as in Arctic's SuffixDecoding
(2411.04975)."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.drafter import Drafter
from specbench.decoding.gamma_policy import GammaPolicy
from specbench.decoding.model import Scores
from specbench.decoding.state import State
from specbench.decoding.transfers import upload
from specbench.drafters.lookup_base import Guess, point_mass_chain
from specbench.drafters.model import ModelDrafter, VocabularySettings, load_own
from specbench.drafters.suffix import SuffixDrafter
from specbench.errors import ConfigError
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.policies.gamma.per_request_state import PerRow
from specbench.settings import LARGEST_GAMMA, setting

PRIOR = 4  # guesses that a request's own counts begin with
ALPHA, KEPT = 0.6, 0.5  # shares of the model's guesses and of a lookup's promises that come, before any was tested


@dataclass
class _Seen:
    """What a request's rounds have shown."""

    accepted: float = PRIOR * ALPHA  # guesses of the model
    tested: float = PRIOR
    hits: float = PRIOR * KEPT  # tokens that the lookup guessed, whether they were drafted or not
    promised: float = PRIOR  # how many they should have been
    found: Guess = field(default_factory=lambda: ([], [], []))  # the last lookup
    by_model: bool = False  # whether the model drafted in the last round

    def by_lookup_expected(self, probs: list[float]) -> float:
        """The expected number of accepted guesses of a lookup: its probabilities, each step times hits / promised."""
        total, path = 0.0, 1.0
        for prob, before in zip(probs, [1.0, *probs], strict=False):
            path *= min(1.0, self.hits / self.promised * prob / before)
            total += path
        return total

    def by_model_expected(self, gamma: int) -> float:
        """The expected number of accepted guesses of the model (Definition 3.1, all betas alike)."""
        return sum((self.accepted / self.tested) ** i for i in range(1, gamma + 1))

    def learn(self, drafted: int, new: list[int]) -> None:
        """Counts a round that drafted so many guesses and kept these tokens."""
        if self.by_model:
            self.accepted += min(drafted, len(new) - 1)
            self.tested += min(drafted, len(new))
        tokens, probs, *_ = self.found
        for token, guess, prob, before in zip(new, tokens, probs, [1.0, *probs], strict=False):
            self.promised += prob / before
            if token != guess:
                break
            self.hits += 1


class LookupOrModelDrafter(Drafter):
    """Each row drafts with the lookup if that promises more tokens per time than the model. That is where
    (1 + E) (1 + g cost) >= 1 + E': E and E' are the expected numbers of accepted guesses of the lookup of
    `drafter=suffix` and of the model, which would draft g guesses that each cost a `cost` of the target's call. All
    that E and E' depend on are this request's rounds so far. A drafter that reads the target's hidden states reads
    those of each round, which is counted as a step: then the right side is (1 + E') (1 + cost)."""

    reads_text = False
    with_states = False
    mixes_laws = True

    @dataclass
    class Settings(VocabularySettings, SuffixDrafter.Settings):
        model_gamma: int | None = setting(ge=1, le=LARGEST_GAMMA)
        cost: float = setting(ge=1e-6, le=1000, zero=True)

        def check(self, prefix: str) -> None:
            if self.nodes is not None:
                raise ConfigError(f"{prefix}nodes={self.nodes} is not possible: drafts are chains, with null")
            super().check(prefix)

    @classmethod
    def point_masses(cls, settings: Any) -> bool:
        return True  # of lookups

    @classmethod
    def refuses(cls, settings: Any, run: Any) -> str | None:
        return SuffixDrafter.refuses(settings, run)

    def __init__(self, lookup: SuffixDrafter, drafter: Any, cost: float):
        """`drafter` is a `ModelDrafter`, in a subclass another one that drafts chains; `gamma` is the most guesses that
        it drafts in a round."""
        self.lookup, self.drafter, self.cost, self.gamma = lookup, drafter, cost, drafter.gamma
        self.models, self.context = drafter.models, drafter.context
        self.operations_per_token = drafter.operations_per_token
        self.seen: PerRow[_Seen] = PerRow()

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "LookupOrModelDrafter":
        model = load_own(settings, context, target)
        if model.recurrence is not None:
            raise ConfigError(f"drafter.path={model.name} is not possible: its recurrent state needs drafter=model")
        gamma = min(context.gamma, settings.model_gamma or context.gamma)
        drafter = ModelDrafter(model, target.vocab_size, gamma)
        return cls(SuffixDrafter.from_settings(settings, context, target), drafter, settings.cost)

    def begin(self, state: State, stop: GammaPolicy | None = None) -> None:
        self.seen.clear()
        self.lookup.begin(state)
        self.drafter.widths = sorted({min(width, self.gamma) for width in self.widths})
        self.drafter.begin(state)

    def propose(self, state: State, gamma: list[int]) -> Draft:
        guesses: list[list[int]] = []
        rest: list[int] = []
        for row, most in enumerate(gamma):
            seen, wanted = self.seen.of(state, row, _Seen()), min(most, self.gamma)
            seen.found = self.lookup.guess(state, row) if most else ([], [], [])
            tokens, probs, *_ = seen.found
            promised = (1 + seen.by_lookup_expected(probs[:most])) * (1 + wanted * self.cost)
            expected = (1 + seen.by_model_expected(wanted)) * (1 + self.cost * self.needs_hidden)
            seen.by_model = not tokens or promised < expected
            rest.append(wanted if seen.by_model else 0)
            guesses.append([] if seen.by_model else tokens[:most])
        looked_up = point_mass_chain(guesses, state)
        if not any(rest) and not self.needs_hidden:
            return looked_up
        by_lookup = upload([[bool(tokens)] for tokens in guesses], state.tokens.device)
        return either(by_lookup, looked_up, self.drafter.propose(state, rest))

    def settle(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, base: Tensor) -> None:
        """Learns from the round. The model's cache may hold guesses that were not drafted: it keeps what is text."""
        cached = self.drafter.model.cached
        for row, seen in self.learn(state).items():
            length = state.lengths[row]
            cached[row] = min(cached[row], length - 1 if seen.by_model else length - state.kept[row])

    def learn(self, state: State) -> dict[int, _Seen]:
        """Counts the round of each row that kept tokens; returns what these rows have seen."""
        found = {row: self.seen.of(state, row, _Seen()) for row, kept in enumerate(state.kept) if kept}
        for row, seen in found.items():
            length = state.lengths[row]
            seen.learn(state.drafted[row], state.texts[row][length - state.kept[row] : length])
        return found


def either(by_lookup: Tensor, looked_up: Draft, drafted: Draft) -> Draft:
    """The lookup's chain where `by_lookup` [B, 1], the model's elsewhere; a row has guesses in one of them only."""
    width = max(looked_up.tokens.shape[1], drafted.tokens.shape[1])
    if not looked_up.tokens.shape[1]:
        return drafted
    if not drafted.tokens.shape[1]:
        return looked_up
    ours, theirs = looked_up.padded(width), drafted.padded(width)
    tokens, q = torch.where(by_lookup, ours.tokens, theirs.tokens), theirs.probs
    if q is not None:
        q = torch.where(by_lookup[..., None], torch.zeros_like(q).scatter_(2, tokens[..., None], 1.0), q)
    return Draft.chain(tokens, q, ours.count + theirs.count)
