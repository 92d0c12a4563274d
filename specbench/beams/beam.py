"""Beam search instead of sampling (A.4): `decoding=beam`."""

from collections import abc
from typing import Any, ClassVar

from pydantic import Field

from specbench.beams.decode import decode_beams
from specbench.beams.numbers import cost, judge, kept, stock_score
from specbench.beams.reader import MOST_UNUSED
from specbench.beams.search import BeamRules, FoundBeams
from specbench.component import Selections
from specbench.decoding.model import Model
from specbench.decoding.search import Decoding
from specbench.decoding.sequence import Sequence
from specbench.errors import ConfigError
from specbench.measure.record import Facts, Record, Text
from specbench.models.attention_mask import sliding_window
from specbench.models.language_model import LanguageModel
from specbench.models.load import PretrainedModel, load_config
from specbench.settings import MOST_BEAMS, BaseSettings

MOST_GUESSES = 256  # u
OFF = {"temperature": 0, "top_k": 0, "top_p": 1, "repetition_penalty": 1, "batch_size": 1, "stop": [], "lenience": 1}
NEEDED = {"verifier": "speculative", "lenience_policy": "fixed", "gamma_policy": "fixed", "workload": "all_at_once",
          "peers": "none"}  # fmt: skip


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
        self.generate_settings = (f"num_beams={rules.width}",)

    @classmethod
    def from_settings(cls, settings: Any) -> "BeamDecoding":
        widths = settings.beams, settings.drafter_width
        return cls(BeamRules(*widths, settings.length_penalty, settings.early_stopping))

    @classmethod
    def refuses(cls, settings: Any, run: Selections) -> str | None:
        for key, only in OFF.items():
            if (value := run.scalars[key]) != only:
                return f"with {key}={value}: it must be {only}, or use decoding=sampling"
        for group, name in NEEDED.items():
            if run[group].name != name:
                return f"with {group}={run[group].name}: use {group}={name}"
        drafter, executor = run["drafter"], run["executor"]
        if not vars(drafter.kind).get("searches", False):
            return f"with drafter={drafter.name}, which has no beams: use a drafter that is one model, drafter=model"
        if executor.kind.fixed_shapes or executor.kind.compiles:
            return f"with executor={executor.name}, whose calls have few shapes: use executor=auto or eager"
        return _sliding(run)

    @classmethod
    def target_tokens(cls, settings: Any, nodes: int, gamma: int) -> int:
        return int(settings.beams + settings.drafter_width * gamma)

    @classmethod
    def spare(cls, settings: Any, nodes: int, gamma: int, new_tokens: int) -> int:
        """Hypotheses may share nothing but the prompt."""
        alone: int = (settings.beams - 1) * new_tokens
        return alone + MOST_UNUSED + cls.target_tokens(settings, nodes, gamma)

    def refuse_target(self, target: Model) -> None:
        """Raises ConfigError if it reads no trees, or the prompt has fewer continuations than there are beams."""
        if self.rules.width > (most := target.vocab_size - len(target.stop_tokens)):
            raise ConfigError(
                f"beams={self.rules.width} is not possible: the target has {most} tokens that end no text"
            )
        if not target.trees:
            raise ConfigError(f"decoding=beam is not possible with target.path={target.name}, which cannot read trees")

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
        return kept(ours, plain, score, self.rules)

    def results(self, records: abc.Sequence[Record], facts: Facts, gamma: int, coarse: bool) -> dict[str, Any]:
        """The verdict, and `beam` for the details of the results."""
        return {"lossless": judge(records, coarse), "beam": cost(records, self.rules, gamma, facts.c_hat or 0.0)}


def _sliding(run: Selections) -> str | None:
    """Why beams are not possible with the target or the drafter, whose layers see a sliding window only, or None. The
    hypotheses are entries of one tree in the cache, so their columns say nothing of how far back they are in a text."""
    for role in ("target", "drafter"):
        for model in run[role].settings.models():
            if isinstance(model, PretrainedModel.Settings) and (window := _window(model, role)):
                return (
                    f"with {role}.path={model.path}, whose layers see the last {window:,} tokens only: use a model "
                    "without a sliding window, or decoding=sampling"
                )
    return None


def _window(model: PretrainedModel.Settings, role: str) -> int | None:
    """The sliding window of a checkpoint in tokens, if it is shorter than its context."""
    try:
        config = load_config(model, role).get_text_config()
        window = sliding_window(config)
    except ConfigError:
        return None  # said where the models are built
    return window if window and window < (getattr(config, "max_position_embeddings", None) or window + 1) else None
