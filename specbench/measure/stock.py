"""What the stock modules of transformers say of a finished text, and how far rounding may move it.

Written apart from `decoding/sampling.py`, so that an error there is seen. n new tokens of a text, V vocabulary.
"""

import torch
from torch import Tensor

from specbench.decoding.sampling import Sampling

# How many roundings of the largest logit two correct forwards may differ by. In 16 bits sums are kept in float32, and
# results are rounded; in float32 the sums are rounded too.
ROUNDINGS = {torch.float16: 4.0, torch.bfloat16: 4.0}
ROUNDINGS_OF_SUMS = 64.0
TYPICAL_16_BIT = 0.25  # of these, for p in 16 bits: a tie must be forgiven surely, an error of p be found
UNDERFLOW = 1e-37  # probabilities below it may be 0 in float32


def tolerance(logits: Tensor, dtype: torch.dtype, sampling: Sampling) -> Tensor:
    """[n]: how far two logits may move against each other by rounding, from logits [n, V]."""
    largest = torch.where(logits > -torch.inf, logits.abs(), 0.0).amax(-1).double()
    return ROUNDINGS.get(dtype, ROUNDINGS_OF_SUMS) * torch.finfo(dtype).eps * largest * _penalty(sampling)


def tie(logits: Tensor, dtype: torch.dtype, sampling: Sampling) -> Tensor:
    """[n]: how far below the largest of logits [n, V] a token's may be by rounding. In 16 bits it is counted in steps
    of the dtype at that logit itself, but one step at the largest absolute value is always forgiven."""
    most = tolerance(logits, dtype, sampling)
    if dtype not in ROUNDINGS:
        return most
    eps, best = torch.finfo(dtype).eps, logits.amax(-1).double() * _penalty(sampling)
    step, largest = (torch.ldexp(x.new_full(x.shape, eps / 2), torch.frexp(x).exponent)
                     for x in (best, most / ROUNDINGS[dtype] / eps))  # fmt: skip
    return torch.maximum(ROUNDINGS[dtype] * step, largest).minimum(most)


def _penalty(sampling: Sampling) -> float:
    """By how much the repetition penalty makes errors of logits grow."""
    return max(sampling.repetition_penalty, 1 / sampling.repetition_penalty)


def distance(logits: Tensor, decoder: Tensor, dtype: torch.dtype, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """[n]: the total variation between the decoder's distribution [n, V] and that of the stock module's penalised
    logits [n, V], and the largest that rounding explains: a move of all logits by at most d changes p by at most
    tanh d. Under top-k and top-p both are compared on the decoder's tokens; the total variation is 1 if rounding does
    not explain why these passed."""
    temperature = sampling.temperature or 1.0  # at temperature 0 the softmax before the argmax is compared
    scores, slack = logits.double() / temperature, tolerance(logits, dtype, sampling) / temperature
    limit = ((TYPICAL_16_BIT if dtype in ROUNDINGS else 1.0) * slack).tanh()
    if sampling.greedy or (not 0 < sampling.top_k < scores.shape[-1] and sampling.top_p == 1):
        return (decoder.double() - scores.softmax(-1)).abs().sum(-1) / 2, limit
    theirs = decoder > 0
    surely, possibly = passing(scores, slack[:, None], sampling)
    own = scores.masked_fill(~theirs, -torch.inf).softmax(-1)
    surely = surely & (scores.softmax(-1) > UNDERFLOW)
    explained = ~((surely & ~theirs) | (theirs & ~possibly)).any(-1)
    return torch.where(explained, (decoder.double() - own).abs().sum(-1) / 2, 1.0), limit


def passing(scores: Tensor, slack: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """[n, V] bool: which tokens pass top-k and top-p whatever rounding does, and which may pass, from scores [n, V]
    that may move against each other by slack [n, 1]."""
    top_k = min(sampling.top_k or scores.shape[-1], scores.shape[-1])
    edge = scores.topk(top_k, -1).values[:, -1:]
    surely, possibly = scores > edge + 2 * slack, (scores >= edge - 2 * slack) & (scores > -torch.inf)
    if top_k == scores.shape[-1]:
        surely = possibly
    if sampling.top_p < 1:
        p = scores.masked_fill(scores < edge, -torch.inf).softmax(-1)
        ordered, index = scores.sort(-1, descending=True)
        mass = torch.cat([torch.zeros_like(slack), p.gather(-1, index).cumsum(-1)], -1)  # [n, V + 1]
        # Mass of the tokens that are likelier for certain, and of those that may be, without the token itself.
        least = mass.gather(-1, torch.searchsorted(-ordered, -scores - 2 * slack))
        most = mass.gather(-1, torch.searchsorted(-ordered, -scores + 2 * slack, right=True)) - p
        moved = slack.tanh()
        best = scores == scores.amax(-1, keepdim=True)
        surely = surely & ((most + moved < sampling.top_p) | (best & (ordered[:, :1] - ordered[:, 1:2] > 2 * slack)))
        possibly = possibly & (least - moved < sampling.top_p)
    return surely, possibly
