"""The sums of the losslessness test over the draws of one text: guesses, what stands for them, and tokens.

n tokens from a position on, V vocabulary, K tested guesses.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specbench.stats.test_statistics import SMALLEST, classes, of_events, of_tokens
from specbench.stats.verdict_records import DEVIATIONS, DrawnFrom, ReferenceScore, law_window

LOG_P, LEAK, GUESS = range(len(DEVIATIONS))
SURE = 1 + 1e-6  # p / q from which a guess is accepted whatever rounding does


def add_guesses(found: ReferenceScore, evidence: DrawnFrom, tokens: Sequence[int]) -> None:
    """Adds whether the first guess of each tested step stands in the text, whose probability follows from the decoder's
    own p and q."""
    known = [i for i, at in enumerate(evidence.at) if at < len(tokens)]
    if evidence.rule is None or not known:
        return
    p, q = (np.array([values[i] for i in known], float) for values in (evidence.p, evidence.q))
    ratio = np.divide(p, q, out=np.ones_like(p), where=q > 0) if evidence.rule == "p / q" else p
    found.impossible += int((q == 0).sum())
    places = [evidence.place[i] for i in known]
    mean, least = torch.from_numpy(ratio).clamp(max=1), list[float]()
    for place, before in zip(places, [1.0, *mean.tolist()], strict=False):
        least.append(1.0 if place == 1 else min(least[-1], before))
    stands = torch.tensor([tokens[evidence.at[i]] == evidence.guess[i] for i in known])
    more = torch.tensor(places), torch.tensor(least, dtype=torch.double)
    found.impossible += int(((mean == 0) & stands).sum()) + int((torch.from_numpy(ratio > SURE) & ~stands).sum())
    found.sums = found.sums + of_events("stands", mean[:, None], stands[:, None], *more)
    _add_deviation(found, GUESS, stands.double() - mean, mean * (1 - mean))


def add_draws(
    found: ReferenceScore, evidence: DrawnFrom, begin: int, p: Tensor, tokens: Tensor, counts: Tensor, decoder: Tensor
) -> None:
    """Adds the tokens [n] from position `begin` on: the stock module's p [n, V], which of them the test uses, counts
    [n], and the decoder's p [n, V], zero where it was not kept."""
    known = [i for i, at in enumerate(evidence.at) if begin <= at < begin + len(tokens)]
    at = [evidence.at[i] - begin for i in known]
    guess, favoured = torch.zeros_like(tokens), torch.zeros_like(p, dtype=torch.bool)
    tested, point = (torch.zeros_like(tokens, dtype=torch.bool) for _ in range(2))
    guess[at] = torch.tensor([evidence.guess[i] for i in known], dtype=torch.long, device=p.device)
    tested[at] = True
    point[[place for place, i in zip(at, known, strict=True) if evidence.q[i] == 1]] = True
    for place, i in zip(at, known, strict=True):
        favoured[place, evidence.over[i]] = True
    free, judged = counts & ~tested, counts & tested
    f = p[counts].clamp(min=SMALLEST).log()
    mean = (p[counts] * f).sum(-1, keepdim=True)
    _add_deviation(found, LOG_P, f.gather(1, tokens[counts, None]) - mean, p[counts] * (f - mean).square())
    likely = (p * favoured).sum(-1).clamp(max=1)[judged]
    happened = favoured.gather(1, tokens[:, None])[judged]
    _add_deviation(found, LEAK, happened[:, 0].double() - likely, likely * (1 - likely))
    before, drafted = law_window(evidence.drafts, begin - 1, p)
    bonus = free & drafted
    found.sums = (
        found.sums
        + of_events("favoured", likely[:, None], happened)
        + of_tokens("token", p[counts], tokens[counts])
        + of_tokens("untested", p[free], tokens[free])
        + of_events("untested class", *in_classes(p[free], tokens[free]))
        + of_tokens("bonus", p[bonus], tokens[bonus], normal(before[bonus]))
    )
    if evidence.rule is not None:
        _add_recovered(found, evidence, begin, tokens, guess, tested, point, decoder)


def _add_recovered(
    found: ReferenceScore,
    evidence: DrawnFrom,
    begin: int,
    tokens: Tensor,
    guess: Tensor,
    tested: Tensor,
    point: Tensor,
    decoder: Tensor,
) -> None:
    """Adds the guesses [n], and the tokens [n] in place of those that were rejected, where the decoder's p and q are
    known; which positions were `tested` [n], and with a `point` mass [n]."""
    drafts, drafted = law_window(evidence.drafts, begin, decoder)
    drafts, x = normal(drafts), guess[:, None]
    found.impossible += int((drafts.gather(1, x)[drafted] == 0).sum())
    lost = tested & (drafted | point) & (decoder.sum(-1) > 0) & (tokens != guess)
    p, q, drawn = decoder[lost], drafts[lost], tokens[lost]
    without_guess = p.scatter(1, x[lost], 0.0)
    rest = torch.where(point[lost, None] | (evidence.rule == "p"), without_guess, (p - q).clamp(min=0))
    rest = normal(torch.where(rest.sum(-1, keepdim=True) > 0, rest, p))
    found.impossible += int((rest.gather(1, drawn[:, None]) == 0).sum())
    found.sums = (
        found.sums
        + of_tokens("guess", drafts[drafted], guess[drafted])
        + of_tokens("recovered", rest, drawn)
        + of_events("recovered class", *in_classes(rest, drawn))
        + of_tokens("after", rest, drawn, q)
    )


def in_classes(law: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The probabilities [k, 18] of the classes of tokens by laws [k, V], and in which of them tokens [k] are."""
    table = classes(law.shape[-1], law.device)
    return (law @ table).clamp(0, 1), table[tokens] > 0


def normal(law: Tensor) -> Tensor:
    """Laws [k, V] that sum to 1, in float64."""
    law = law.double()
    return law / law.sum(-1, keepdim=True).clamp(min=1e-300)


def _add_deviation(found: ReferenceScore, place: int, deviation: Tensor, variance: Tensor) -> None:
    found.deviations[place] += [float(deviation.sum()), float(variance.sum())]
