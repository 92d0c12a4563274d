"""Beam search instead of sampling (A.4): `decoding=beam`."""

from collections import abc
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from pydantic import Field

from specbench.beams.decode import FoundBeams, decode_beams
from specbench.beams.search import MOST_UNUSED, BeamRules
from specbench.config.compose import Decoding
from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import EncoderInput, Sequence
from specbench.errors import ConfigError
from specbench.measure.record import Facts, Record, Text
from specbench.measure.verdict import tolerance
from specbench.models.attention_mask import sliding_window
from specbench.models.language_model import LanguageModel
from specbench.models.reference_forward import stock_logits
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
        """For a record: both searches, the best score by the stock module, and how far rounding may move it."""
        new = ours.hypotheses[0].tokens
        score, slack = stock_score(target, request.tokens, new, self.rules, request.encoder_input)
        return {"speculative": asdict(ours), "baseline": asdict(plain), "score": score, "tolerance": slack}

    def results(self, records: abc.Sequence[Record], facts: Facts, gamma: int, coarse: bool) -> dict[str, Any]:
        """The verdict, and `beam` for the details of the results. `coarse`: the target computes in 16 bits."""
        return {"lossless": judge(records, coarse), "beam": cost(records, self.rules, gamma, facts.c_hat or 0.0)}


def stock_score(
    model: LanguageModel, prompt: abc.Sequence[int], new: abc.Sequence[int], rules: BeamRules, read: EncoderInput | None
) -> tuple[float, float]:
    """The score of new tokens behind a prompt, and an encoder's input if there is one, by one plain forward of the
    stock module, and how far rounding may move it. Raises RuntimeError if the device has no room for it."""
    text = torch.tensor([[*prompt, *new]], device=model.device)
    logits = stock_logits(model, text, len(prompt), read, suppressing=False).float()
    log_p = logits.double().log_softmax(-1).gather(1, text[0, len(prompt) :, None])
    share = (model.forced_tokens + len(new)) ** -rules.length_penalty
    return float(log_p.sum()) * share, float(tolerance(logits, model.dtype, Sampling()).sum()) * share


def same_beams(search: dict[str, Any]) -> bool:
    """Whether both searches found the same hypotheses in the same order."""
    ours, plain = ([tokens for tokens, _ in search[kind]["hypotheses"]] for kind in ("speculative", "baseline"))
    return ours == plain


def is_tie(search: dict[str, Any]) -> bool:
    """Whether rounding explains that the beams differ: as many, and rank by rank with the same scores."""
    ours, plain = ([score for _, score in search[kind]["hypotheses"]] for kind in ("speculative", "baseline"))
    differences = (abs(a - b) for a, b in zip(ours, plain, strict=False))
    return len(ours) == len(plain) and max(differences, default=0.0) <= search["tolerance"]


def judge(records: abc.Sequence[Record], coarse: bool) -> dict[str, Any]:
    """The verdict: all hypotheses are plain beam search's, or differ by what rounding explains, and each best score is
    the stock module's. In 16 bits (`coarse`) roundings are too large to tell a tie from an error."""
    searches = [record.search for record in records if record.search is not None]
    best = [(search["speculative"]["hypotheses"][0][1], search["score"], search["tolerance"]) for search in searches]
    wrong = sum(not abs(score - stock) <= slack for score, stock, slack in best)
    others = [search for search in searches if not same_beams(search)]
    bugs = 0 if coarse else sum(not is_tie(search) for search in others)
    tested = sum(sum(record.speculative.rounds.tested) for record in records if record.speculative is not None)
    passed: bool | None = True
    reason = ""
    if wrong or bugs:
        passed = False
        reason = f"{wrong} best scores are not the stock module's" if wrong else f"{bugs} requests have other beams"
    elif not tested:
        passed, reason = None, "no level was tested, only plain steps were made"
    elif coarse and others:
        passed = None
        reason = f"{len(others)} requests have other beams, in 16 bits, by rounding or by an error"
    return {"expected": True, "passed": passed, "reason": reason, "detectable": None}


def cost(records: abc.Sequence[Record], rules: BeamRules, gamma: int, c_hat: float) -> dict[str, Any]:
    """Widths, counts and cost of a run by beam search, for details["beam"]."""
    searches = [record.search for record in records if record.search is not None]
    names = ("levels", "calls", "target_tokens", "drafter_tokens")
    levels, calls, read, drafted = (sum(search["speculative"][name] for search in searches) for name in names)
    plain = sum(search["baseline"]["target_tokens"] for search in searches)
    return {
        "beams": rules.width,
        "drafter_beams": rules.drafter_width,
        "length_penalty": rules.length_penalty,
        "levels": levels,
        "calls": calls,
        "target_runs": read,
        "plain_target_runs": plain,
        "drafter_runs": drafted,
        "most_target_runs_a_call": rules.width + rules.drafter_width * gamma,
        "operations_factor": (read + c_hat * drafted) / max(1, plain),
        "equal": sum(map(same_beams, searches)),
        "requests": len(searches),
    }
