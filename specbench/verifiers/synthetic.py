"""Accepts as often as it is told, no matter what the models compute: for timing an engine without trained weights."""

from functools import cache
from typing import Any

import torch
import yaml
from pydantic import Field, TypeAdapter
from torch import Tensor

from specbench.data.files import read_text
from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.transfers import constant, upload
from specbench.decoding.verify import at_row, leading, verdict_of
from specbench.errors import ConfigError
from specbench.settings import LARGEST_GAMMA, BaseSettings
from specbench.verifiers.base import Verifier


class SyntheticVerifier(Verifier):
    """Accepts each guess with a probability that depends on its place in the draft alone, then adds a token drawn from
    p. Never lossless. The probabilities are `alpha`, or those of a mean length, in tokens per target call, with the
    least variance: `length`, or the one of `golden` for the number of guesses."""

    judged = False
    lossless = False

    class Settings(BaseSettings):
        alpha: float | None = Field(default=None, ge=0, le=1)
        length: float | None = Field(default=None, ge=1, le=LARGEST_GAMMA + 1)
        golden: str | None = None
        mode: str | None = None

        def check(self, prefix: str) -> None:
            given = [f"{prefix}{k}={v}" for k in ("alpha", "length", "golden") if (v := getattr(self, k)) is not None]
            if len(given) > 1:
                raise ConfigError(f"{given[0]} is not possible with {given[1]}: give null for one of them")
            if self.mode is not None and self.golden is None:
                raise ConfigError(
                    f"{prefix}mode={self.mode} is not possible with {prefix}golden=null: give a file or null"
                )
            self.lengths()

        def lengths(self) -> tuple[float, ...] | None:
            """Tokens per target call after 0, 1, .. guesses, None for `alpha`. Raises ConfigError."""
            if self.golden is not None:
                return golden_lengths(self.golden, self.mode)
            return tuple(min(self.length, k + 1) for k in range(LARGEST_GAMMA + 1)) if self.length else None

    def __init__(self, greedy: bool, alpha: float, lengths: tuple[float, ...] | None = None, asked: str = ""):
        """`lengths` are those after 0, 1, .. guesses; None for `alpha`."""
        super().__init__(greedy)
        self.alpha, self.lengths = alpha, lengths
        asked = asked or f"at rate {alpha:g}"
        self.rule = f"{asked}, as asked"
        self.note = f"acceptance was drawn {asked}: times are real, text and alpha are not"
        self.note += ", and Theorem 3.8 does not hold" if lengths else ""

    @classmethod
    def from_settings(cls, settings: Any, sampling: Sampling, lenience: float) -> "SyntheticVerifier":
        length, golden, alpha = settings.length, settings.golden, 0.8 if settings.alpha is None else settings.alpha
        asked = f"for {length:g} tokens per target call" if length else f"for the lengths of {golden}" if golden else ""
        return cls(sampling.greedy, alpha, settings.lengths(), asked)

    @classmethod
    def refuse_gamma(cls, settings: Any, largest: int) -> None:
        lengths = settings.lengths()
        if lengths and largest >= len(lengths):
            known = f"verifier.golden={settings.golden}, which has lengths of at most {len(lengths) - 1} guesses"
            raise ConfigError(f"gamma={largest} is not possible with {known}")
        if settings.length and 0 < largest < settings.length - 1:
            raise ConfigError(
                f"verifier.length={settings.length:g} is not possible with gamma={largest}, which gives at most "
                f"{largest + 1} tokens per target call"
            )

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        n = leading(noise.r < self._rates(draft), draft.count)
        p_next = at_row(p, n)
        t = p_next.argmax(-1) if self.greedy else draw(p_next, noise.bits.gather(1, n[:, None]).squeeze(1))
        return verdict_of(draft.tokens, n, t)

    def _rates(self, draft: Draft) -> Tensor:
        """The probability [B, N] that a guess is accepted after those before it, by the row's number of guesses."""
        places = draft.tokens.shape[1]
        if self.lengths is None:
            return torch.full_like(draft.tokens, self.alpha, dtype=torch.float64)
        table = tuple(least_variance(length, places) for length in self.lengths[: places + 1])
        return constant(upload)(table, draft.tokens.device, torch.float64)[draft.count]

    def acceptance_rule(self, drafter: type[Any], settings: Any) -> str:
        return self.rule

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        return self._rates(draft)


@cache  # a table of them is made in each round
def least_variance(length: float, places: int) -> tuple[float, ...]:
    """Independent rates of the places of a draft whose mean is `length` tokens per target call: 1 for what the length
    holds whole, its fraction at the next place, and 0. Each call then gives one of the two integers around it."""
    return tuple(min(max(length - 1 - place, 0.0), 1.0) for place in range(places))


def golden_lengths(path: str, mode: str | None) -> tuple[float, ...]:
    """Tokens per target call after 0, 1, .. guesses, from a file of InferenceX's golden_al_distribution: {model: {mode:
    {guesses: length}}}. Raises ConfigError."""
    text = read_text(path, "verifier.golden")
    try:
        [modes] = TypeAdapter(dict[str, dict[str, dict[int, float]]]).validate_python(yaml.safe_load(text)).values()
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"verifier.golden={path} does not have one model's lengths by mode and guesses") from error
    if mode is None and len(modes) == 1:
        mode = next(iter(modes))
    if mode not in modes:
        raise ConfigError(
            f"verifier.mode={mode or 'null'} is not allowed with {path}: it must be one of {', '.join(modes)}"
        )
    found = {0: 1.0} | modes[mode]
    if sorted(found) != [*range(len(found))] or not all(1 <= found[k] <= k + 1 for k in found):
        raise ConfigError(f"verifier.golden={path} must have lengths from 1 to k + 1 after k guesses, k = 1, 2, ..")
    return tuple(found[k] for k in range(len(found)))
