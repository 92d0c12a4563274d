"""What the stock modules of transformers say of a finished text, and how far rounding may move it.

Their distributions are made by the logits processors of transformers, so that an error of `decoding/sampling.py` is
seen. n new tokens of a text, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

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
    tanh d. Both are compared on the decoder's tokens; the total variation is 1 if rounding does not explain why these
    passed top-k and top-p. At temperature 0 the softmax before the argmax is compared."""
    if sampling.greedy:
        sampling = Sampling()
    slack = tolerance(logits, dtype, sampling) / sampling.temperature
    scores = warped(logits, Sampling(sampling.temperature))
    surely, possibly = passing(scores, slack[:, None], sampling)
    theirs = decoder > 0
    own = scores.masked_fill(~theirs, -torch.inf).softmax(-1)
    surely = surely & (scores.softmax(-1) > UNDERFLOW)
    explained = ~((surely & ~theirs) | (theirs & ~possibly)).any(-1)
    limit = ((TYPICAL_16_BIT if dtype in ROUNDINGS else 1.0) * slack).tanh()
    return torch.where(explained, (decoder.double() - own).abs().sum(-1) / 2, 1.0), limit


def passing(scores: Tensor, slack: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """[n, V] bool: which tokens pass top-k and top-p whatever rounding does, and which may pass, from scores [n, V]
    after the temperature that may move against each other by slack [n, 1]. A token passes surely if it stays likelier
    than all that are excluded from the smallest set, and may pass if it can reach the largest set."""
    possible, top_k = scores > -torch.inf, sampling.top_k
    truncation = replace(sampling, temperature=1.0)
    smallest, largest = (warped(scores, truncation, sign * slack.tanh()) > -torch.inf for sign in (-1, 1))
    best_excluded = scores.masked_fill(smallest, -torch.inf).amax(-1, keepdim=True)
    if 0 < top_k < scores.shape[-1]:  # of tokens that tie for the last place rounding may exclude any
        best_excluded = best_excluded.maximum(scores.topk(top_k + 1, -1).values[:, -1:])
    last_included = scores.masked_fill(~largest, torch.inf).amin(-1, keepdim=True)
    return possible & (scores > best_excluded + 2 * slack), possible & (scores >= last_included - 2 * slack)


def warped(logits: Tensor, sampling: Sampling, more_mass: Tensor | None = None) -> Tensor:
    """Scores [n, V] in float64 of penalised logits [n, V] after temperature, top-k and top-p, by transformers' own
    processors in the order of generate(); -inf where a token is excluded. `more_mass` [n, 1] is added to top-p."""
    scores, no_text = logits.double(), torch.empty(0, dtype=torch.long)
    if sampling.temperature != 1:
        scores = TemperatureLogitsWarper(float(sampling.temperature))(no_text, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(no_text, scores)
    if sampling.top_p < 1:
        top_p: Any = TopPLogitsWarper(sampling.top_p)
        if more_mass is not None:
            top_p.top_p = sampling.top_p + more_mass
        scores = top_p(no_text, scores)
    return scores
