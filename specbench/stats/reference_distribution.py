"""The stock module's p: its logits standardized once more (section 2.2), and how far rounding may move it.

Written apart from `decoding/sampling.py`, so that an error there is seen. n positions, V vocabulary.
"""

import torch
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from specbench.decoding.encoder_input import EncoderInput
from specbench.decoding.sampling import Sampling
from specbench.models.language_model import LanguageModel
from specbench.models.reference_forward import stock_logits

# How many roundings of the largest logit two correct forwards may differ by. In 16 bits sums are kept in float32, and
# results are rounded; in float32 the sums are rounded too.
ROUNDINGS = {torch.float16: 4.0, torch.bfloat16: 4.0}
ROUNDINGS_OF_SUMS = 64.0
TYPICAL_16_BIT = 0.25  # of these, for p in 16 bits: a tie must be forgiven surely, an error of p be found


def penalised(logits: Tensor, text: Tensor, begin: int, sampling: Sampling) -> Tensor:
    """Logits [n, V] of the tokens from `begin` on of a text [1, T], after the repetition penalty of each position."""
    if sampling.repetition_penalty == 1:
        return logits
    processor = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    rows = [processor(text[:, : begin + i], logits[i : i + 1]) for i in range(len(logits))]
    return torch.cat(rows)


def stock_scores(model: LanguageModel, text: Tensor, begin: int, encoder_input: EncoderInput | None = None) -> Tensor:
    """Logits [n, V] of the target's tokens from `begin` on of a text [1, T], by the stock module of the target or of a
    drafter, after the repetition penalty."""
    logits = model.vocabulary.fit(stock_logits(model, model.vocabulary.read(text), begin, encoder_input).float())
    return penalised(logits, text, begin, model.sampling)


def tolerance(logits: Tensor, dtype: torch.dtype, sampling: Sampling) -> Tensor:
    """[n]: how far two logits may move against each other by rounding, from logits [n, V]; the rule of ties."""
    largest = torch.where(logits > -torch.inf, logits.abs(), 0.0).amax(-1).double()
    return ROUNDINGS.get(dtype, ROUNDINGS_OF_SUMS) * torch.finfo(dtype).eps * largest * _penalty(sampling)


def tie(logits: Tensor, dtype: torch.dtype, sampling: Sampling) -> Tensor:
    """[n]: how far below the largest of logits [n, V] a token's may be by rounding. In 16 bits it is counted in steps
    of the dtype at that logit itself, but one step at the largest absolute value is always forgiven."""
    most = tolerance(logits, dtype, sampling)
    if dtype not in ROUNDINGS:
        return most
    eps, best = torch.finfo(dtype).eps, logits.amax(-1).double() * _penalty(sampling)
    return torch.maximum(ROUNDINGS[dtype] * _step(best, eps), _step(most / ROUNDINGS[dtype] / eps, eps)).minimum(most)


def _penalty(sampling: Sampling) -> float:
    """By how much the repetition penalty makes errors of logits grow."""
    return max(sampling.repetition_penalty, 1 / sampling.repetition_penalty)


def _step(values: Tensor, eps: float) -> Tensor:
    """The distance of values from the next larger number of a dtype with this eps."""
    return torch.ldexp(torch.full_like(values, eps / 2), torch.frexp(values).exponent)


def largest_tv(logits: Tensor, dtype: torch.dtype, sampling: Sampling) -> Tensor:
    """[n]: the largest total variation that rounding explains. A move of all logits by at most d changes p by at most
    tanh d."""
    share = TYPICAL_16_BIT if dtype in ROUNDINGS else 1.0
    return (share * tolerance(logits, dtype, sampling) / sampling.temperature).tanh()


def counted(logits: Tensor, kept: Tensor, dtype: torch.dtype, sampling: Sampling) -> Tensor:
    """[n] bool: the positions that the statistics of drawn tokens use: not those where rounding chooses between the two
    best tokens, and under top-k and top-p only those whose p the decoder `kept` [n]."""
    best = logits.topk(2).values.double()
    slack = tolerance(logits, dtype, sampling)
    torn = (slack > sampling.temperature) & (best[:, 0] - best[:, 1] <= slack)
    cuts = 0 < sampling.top_k < logits.shape[-1] or sampling.top_p < 1
    return kept & ~torn if cuts else ~torn


def law(logits: Tensor, decoder: Tensor, kept: Tensor, dtype: torch.dtype, sampling: Sampling) -> Tensor:
    """p [n, V] in float64 from penalised logits [n, V]. Where the decoder's p [n, V] was kept [n] and another set of
    tokens has passed its top-k and top-p, that set is taken if rounding explains it."""
    scores = logits.double() / sampling.temperature
    own = _top_p(scores.masked_fill(~_top_k(scores, sampling.top_k), -torch.inf), sampling.top_p)
    theirs = decoder > 0
    differ = kept & (own != theirs).any(-1)
    if differ.any():
        most = tolerance(logits, dtype, sampling) / sampling.temperature
        near = torch.maximum(_observed(scores, decoder, own & theirs), most / 16).minimum(most)
        explained = differ & _is_explained(scores, theirs, most, near, sampling)
        own = torch.where(explained[:, None], theirs, own)
    return scores.masked_fill(~own, -torch.inf).softmax(-1)


def _top_k(scores: Tensor, top_k: int) -> Tensor:
    """[n, V] bool: the top_k largest scores [n, V] and their equals; all for 0."""
    if not top_k:
        return torch.ones_like(scores, dtype=torch.bool)
    return scores >= scores.topk(min(top_k, scores.shape[-1]), -1).values[:, -1:]


def _top_p(scores: Tensor, top_p: float) -> Tensor:
    """[n, V] bool: the fewest tokens whose mass reaches top_p, by scores [n, V]; -inf is outside."""
    if top_p == 1:
        return scores > -torch.inf
    p, order = scores.softmax(-1).sort(-1, descending=True)
    above = torch.zeros_like(p).scatter(1, order, p.cumsum(-1) - p)  # mass of likelier tokens
    return ((above < top_p) & (scores > -torch.inf)) | (scores == scores.amax(-1, keepdim=True))


def _observed(scores: Tensor, decoder: Tensor, joint: Tensor) -> Tensor:
    """[n]: how far the decoder's log p [n, V] is from scores [n, V] at most, over the tokens joint [n, V] bool, twice
    over for those outside; infinite where there are none."""
    some = joint.any(-1)
    difference = torch.where(joint, decoder.double().log() - scores, 0.0)
    centre = difference.sum(-1, keepdim=True) / joint.sum(-1, keepdim=True).clamp(min=1)
    largest = torch.where(joint, (difference - centre).abs(), 0.0).amax(-1)
    # One token alone says nothing about rounding.
    return torch.where(some & (joint.sum(-1) > 1), 2 * largest, torch.inf)


def _is_explained(scores: Tensor, theirs: Tensor, most: Tensor, near: Tensor, sampling: Sampling) -> Tensor:
    """[n] bool: whether rounding makes `theirs` [n, V] the tokens that pass. The order of scores [n, V] may change by
    at most `most` [n]; the mass of many tokens changes less, by moves of `near` [n]."""
    slack = most[:, None]
    lowest = torch.where(theirs, scores, torch.inf).amin(-1, keepdim=True)
    highest = torch.where(theirs, -torch.inf, scores).amax(-1, keepdim=True)
    fits = (lowest >= highest - 2 * slack)[:, 0]
    if sampling.top_k:
        edge = scores.topk(min(sampling.top_k, scores.shape[-1]), -1).values[:, -1:]
        fits &= ~(theirs & (scores < edge - 2 * slack)).any(-1)
        if sampling.top_p == 1:
            fits &= ~(~theirs & (scores > edge + 2 * slack)).any(-1)
        scores = scores.masked_fill(~(theirs | (scores >= edge)), -torch.inf)
    if sampling.top_p < 1:
        p = scores.softmax(-1)
        mass, least = (p * theirs).sum(-1), torch.where(theirs, p, torch.inf).amin(-1)
        edge = near.tanh()
        whole = ~((scores > -torch.inf) & ~theirs).any(-1)
        fits &= (mass - least < sampling.top_p + edge) & ((mass >= sampling.top_p - edge) | whole)
    return fits
