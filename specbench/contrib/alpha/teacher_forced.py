"""alpha by teacher forcing: one forward of the target and one of the drafter over a finished text (Corollary 3.6).

Both are transformers' own modules with eager attention: no cache, no executor and no loop of ours takes part. T tokens
of a text with its prompt, n of them scored, V vocabulary.
"""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.sampling import Sampling
from specbench.models.language_model import LanguageModel
from specbench.models.reference_forward import eager_attention
from specbench.run.reference_scores import LONGEST
from specbench.stats.bootstrap import ratio_error
from specbench.stats.position_stats import CHUNK
from specbench.stats.reference_distribution import penalised, stock_scores

CLEAR = 3.0  # standard errors by which a control must differ from alpha


@dataclass(frozen=True)
class ScoredText:
    """The tokens of a text, of which those from `begin` on are scored."""

    id: str
    tokens: Sequence[int]
    begin: int


@dataclass
class BetaSums:
    """Sums of beta by text, and the number of their positions."""

    beta: list[float] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def add(self, betas: Tensor) -> None:
        """Adds the betas [n] of a text."""
        self.beta.append(float(betas.sum()))
        self.positions.append(len(betas))

    @property
    def mean(self) -> float:
        """The mean over all positions."""
        return sum(self.beta) / max(1, sum(self.positions))

    @property
    def stderr(self) -> float | None:
        """Its standard error, with texts as clusters; None for a single text."""
        return ratio_error(np.array(self.beta), np.array(self.positions)) if len(self.beta) > 1 else None

    def differs_from(self, other: "BetaSums") -> bool:
        """Whether two means over the same texts, two or more, differ by more than `CLEAR` standard errors of their
        difference."""
        difference = np.array(self.beta) - np.array(other.beta)
        mean = difference.sum() / sum(self.positions)
        return bool(abs(mean) > CLEAR * ratio_error(difference, np.array(self.positions)))


@dataclass
class TeacherForced:
    """What a pass over texts has found. `shifted` compares q with p of the next position, and `unmasked` lets the
    drafter see the text that it guesses, if it has no recurrent state, which no mask opens: a measurement that gives
    alpha in either case is broken."""

    alpha: BetaSums = field(default_factory=BetaSums)
    shifted: BetaSums = field(default_factory=BetaSums)
    unmasked: BetaSums = field(default_factory=BetaSums)
    seconds: float = 0.0

    @property
    def sound(self) -> bool | None:
        """Whether both controls differ from alpha; None if there is one text, which has no error."""
        if len(self.alpha.positions) < 2:
            return None
        controls = [self.shifted, *([self.unmasked] if self.unmasked.positions else [])]
        return all(control.differs_from(self.alpha) for control in controls)


def read_alpha(target: LanguageModel, drafter: LanguageModel, texts: Iterable[ScoredText]) -> TeacherForced:
    """beta = sum of min(p, q) (Theorem 3.5) at each position of the texts from `begin` on, and the two controls."""
    found, clock = TeacherForced(), time.perf_counter()
    with torch.inference_mode():
        for each in texts:
            text = torch.tensor([list(each.tokens[:LONGEST])], device=target.device)
            if text.shape[1] - each.begin < 2:  # the shifted control needs a next position
                continue
            p, q = (stock_scores(model, text, each.begin) for model in (target, drafter))
            pairs = [(found.alpha, p, q), (found.shifted, p.roll(-1, 0), q)]
            if drafter.recurrence is None:
                pairs.append((found.unmasked, p, _without_mask(drafter, text, each.begin)))
            for sums, one, other in pairs:
                sums.add(_betas(one, other, target.sampling, drafter.sampling))
    found.seconds = time.perf_counter() - clock
    return found


def _without_mask(model: LanguageModel, text: Tensor, begin: int) -> Tensor:
    """`stock_scores` [n, V] of a drafter that sees the whole text."""
    own, module = model.vocabulary.read(text), model.stock_module()
    length = text.shape[1] - 1
    with eager_attention(module):
        nothing = torch.zeros(1, 1, length, length, dtype=module.dtype, device=text.device)
        seeing = module(input_ids=own[:, :-1], attention_mask=nothing, use_cache=False).logits[0, begin - length - 1 :]
    return penalised(model.vocabulary.fit(seeing.float()), text, begin, model.sampling)


def _betas(p: Tensor, q: Tensor, of_target: Sampling, of_drafter: Sampling) -> Tensor:
    """beta [n] from logits p [n, V] and q [n, V] after the repetition penalty."""
    ways = [dataclasses.replace(own, repetition_penalty=1.0) for own in (of_target, of_drafter)]
    chunks = zip(p.split(CHUNK), q.split(CHUNK), strict=True)
    laws = ([way.probabilities(own).double() for way, own in zip(ways, pair, strict=True)] for pair in chunks)
    return torch.cat([torch.minimum(*pair).sum(-1) for pair in laws])
