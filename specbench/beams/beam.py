"""Beam search instead of sampling (A.4): `decoding=beam`."""

from collections import abc
from typing import Any, ClassVar

from pydantic import Field

from specbench.beams.decode import decode_beams
from specbench.beams.numbers import cost, judge, kept, stock_score
from specbench.beams.reader import MOST_UNUSED
from specbench.beams.search import BeamRules, FoundBeams
from specbench.config.decoding import Decoding
from specbench.decoding.sequence import Sequence
from specbench.errors import ConfigError
from specbench.measure.record import Facts, Record, Text
from specbench.models.attention_mask import sliding_window
from specbench.models.language_model import LanguageModel
from specbench.settings import MOST_BEAMS, BaseSettings

MOST_GUESSES = 256  # u


class BeamDecoding(Decoding):
    """The best of `beams` hypotheses, found by a speculative beam search that accepts a level of guesses if it holds
    every continuation of the target's own search. The result is that of plain beam search."""

    class Settings(BaseSettings):
        beams: int = Field(ge=1, le=MOST_BEAMS)
        drafter_beams: int | None = Field(ge=1, le=MOST_GUESSES)
        length_penalty: float = Field(ge=-10, le=10)
        early_stopping: bool

        def check(self, prefix: str) -> None:
            if self.drafter_width < self.beams:
                raise ConfigError(
                    f"{prefix}drafter_beams={self.drafter_width} is not allowed: it must be at least beams={self.beams}"
                )

        @property
        def drafter_width(self) -> int:
            """u: twice w unless given."""
            return 2 * self.beams if self.drafter_beams is None else self.drafter_beams

    samples: ClassVar[bool] = False

    def __init__(self, rules: BeamRules):
        self.rules = rules
        applied = {"num_beams": rules.width, "length_penalty": rules.length_penalty}
        applied["early_stopping"] = rules.early_stopping
        self.generate_settings = tuple(f"{key}={value}" for key, value in applied.items())

    @classmethod
    def from_settings(cls, settings: Any) -> "BeamDecoding":
        widths = settings.beams, settings.drafter_width
        return cls(BeamRules(*widths, settings.length_penalty, settings.early_stopping))

    @classmethod
    def target_tokens(cls, settings: Any, nodes: int, gamma: int) -> int:
        return int(settings.beams + settings.drafter_width * gamma)

    @classmethod
    def spare(cls, settings: Any, nodes: int, gamma: int, new_tokens: int) -> int:
        """Hypotheses may share nothing but the prompt."""
        alone: int = (settings.beams - 1) * new_tokens
        return alone + MOST_UNUSED + cls.target_tokens(settings, nodes, gamma)

    def refuse_models(self, models: abc.Sequence[Any]) -> None:
        """Raises ConfigError if one of the models, the target's first, cannot search. Hypotheses are entries of one
        tree in the cache, so their columns say nothing of how far back they are in a text, as sliding windows need."""
        target = models[0]
        if self.rules.width > (most := target.vocab_size - len(target.stop_tokens)):
            raise ConfigError(
                f"beams={self.rules.width} is not possible: the target has {most} tokens that end no text"
            )
        for model in models:
            window = sliding_window(model.config)
            if not model.trees or (window and window < model.context):
                raise ConfigError(
                    f"decoding=beam is not possible with {model.name}, which cannot read trees or sees a sliding "
                    "window only: use another model, or decoding=sampling"
                )

    def decode(
        self, parts: Any, jobs: abc.Sequence[Sequence], columns: int, speculative: bool
    ) -> tuple[list[Text], list[FoundBeams], int]:
        """The best text of each job, all beams, and bytes of the caches. `parts` are the run's."""
        own = parts.drafter.models[0] if speculative else None
        texts, found = decode_beams(parts.target, own, self.rules, jobs, columns, parts.policy.largest)
        return texts, found, sum(model.cache_bytes() for model in (parts.target, *parts.drafter.models))

    def read(self, target: LanguageModel, request: Any, ours: FoundBeams, plain: FoundBeams) -> dict[str, Any]:
        """What the record of a request keeps; the best hypothesis is scored again by the stock module."""
        new = ours.hypotheses[0].tokens
        score = stock_score(target, request.tokens, new, self.rules, request.encoder_input)
        return kept(ours, plain, score)

    def results(self, records: abc.Sequence[Record], facts: Facts, gamma: int, coarse: bool) -> dict[str, Any]:
        """The verdict, and `beam` for the details of the results."""
        return {"lossless": judge(records, coarse), "beam": cost(records, self.rules, gamma, facts.c_hat or 0.0)}
