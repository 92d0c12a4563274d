"""Reads finished texts once more, by the stock module, for the losslessness test (`measure/lossless.py`).

Its p comes from a plain forward pass and is standardized here once more (section 2.2), so that an error in our cache,
masks, positions, executors or sampling cannot hide in it. Nothing here is timed as decoding.

n new tokens of a text, V vocabulary.
"""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from specbench.decoding.sampling import Sampling
from specbench.models.language_model import LanguageModel
from specbench.models.stock import stock_logits
from specbench.reading import Events, Evidence, Reading, Sums

LONGEST = 4096  # tokens of a text that are read, its prompt included: eager attention holds their square
CHUNK = 64  # positions whose p is computed at a time
LOG_FLOOR = -10.0  # nats: log p below it counts as this, so that no difference exceeds 10
ROUNDINGS = {torch.float32: 64.0, torch.float64: 64.0}  # dot products are summed in the dtype itself
ROUNDINGS_16_BIT = 4.0  # they are summed in float32
Floats = npt.NDArray[np.float64]


def read(model: LanguageModel, prompt: Sequence[int], new: Sequence[int], evidence: Evidence | None) -> Reading:
    """Reads the tokens `new` after a prompt, as many as fit LONGEST. `evidence` is needed above temperature 0. Raises
    RuntimeError if the device has no room for it."""
    clock = time.perf_counter()
    text = torch.tensor([[*prompt, *new][:LONGEST]], device=model.device)
    n, sampling = text.shape[1] - len(prompt), model.sampling
    if n <= 0:
        return Reading(0, 0.0)
    logits = penalised(stock_logits(model, text, len(prompt)).float(), text, len(prompt), sampling)
    largest = torch.where(logits > -torch.inf, logits.abs(), 0.0).amax(-1).double()
    tolerance = roundings(model.dtype) * torch.finfo(model.dtype).eps * largest  # [n], of a logit
    tokens = text[0, len(prompt) :]
    finite = not (logits.isnan() | (logits == torch.inf)).any()
    if sampling.greedy:
        reading = _greedy(logits, tokens, tolerance)
    else:
        assert evidence is not None
        reading = _sampled(logits, tokens, tolerance, sampling, evidence)
    reading.finite, reading.seconds = finite and reading.finite, time.perf_counter() - clock
    return reading


def roundings(dtype: torch.dtype) -> float:
    """How many roundings of the largest logit two correct forwards may differ by."""
    return ROUNDINGS.get(dtype, ROUNDINGS_16_BIT)


def penalised(logits: Tensor, text: Tensor, begin: int, sampling: Sampling) -> Tensor:
    """Logits [n, V] of the tokens from `begin` on of a text [1, T], after the repetition penalty of each position."""
    if sampling.repetition_penalty == 1:
        return logits
    processor = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    rows = [processor(text[:, : begin + i], logits[i : i + 1]) for i in range(len(logits))]
    return torch.cat(rows)


def _greedy(logits: Tensor, tokens: Tensor, tolerance: Tensor) -> Reading:
    """The reading at temperature 0, from logits [n, V], tokens [n] and tolerance [n]."""
    best = logits.topk(2).values.double()
    short = best[:, 0] - logits.gather(-1, tokens[:, None])[:, 0].double()
    gap = best[:, 0] - best[:, 1]
    return Reading(len(tokens), 0.0, gap=_host(gap), short=_host(short), tolerance=_host(tolerance))


def _sampled(logits: Tensor, tokens: Tensor, tolerance: Tensor, sampling: Sampling, evidence: Evidence) -> Reading:
    """The reading above temperature 0, from logits [n, V], tokens [n] and tolerance [n]."""
    guess, ratios = guesses(evidence, tokens.tolist())
    parts = []
    for begin in range(0, len(tokens), CHUNK):
        here = slice(begin, begin + CHUNK)
        scaled = tolerance[here] / sampling.temperature
        parts.append(_chunk(logits[here], tokens[here], scaled, sampling, evidence, begin))
    return Reading(
        len(tokens),
        0.0,
        finite=all(part.finite for part in parts) and bool(np.isfinite([*evidence.p, *evidence.q]).all()),
        impossible=[at for part in parts for at in part.impossible],
        log_p=sum((part.log_p for part in parts), Sums()),
        leak=Events.join([part.leak for part in parts]),
        guess=guess,
        ratios=ratios,
        tv=np.concatenate([part.tv for part in parts]),
        rounding=np.concatenate([part.rounding for part in parts]),
    )


def _chunk(
    logits: Tensor, tokens: Tensor, tolerance: Tensor, sampling: Sampling, evidence: Evidence, begin: int
) -> Reading:
    """The reading of n tokens from position `begin` on: logits [n, V], tokens [n], tolerance [n] of their scores."""
    n, x = len(tokens), tokens[:, None]
    decoder, kept = evidence.law(begin, n, logits)
    p = law(logits, tolerance, sampling, torch.where(kept[:, None], decoder > 0, False).scatter(1, x, True))
    drawn = torch.tensor(evidence.chosen[begin : begin + n], dtype=torch.double, device=p.device)
    chosen = p.gather(1, x)[:, 0]
    tv = (decoder.double() - p).abs().sum(-1)[kept] / 2
    over, tested = evidence.leaks(begin, n, p)
    leaked = (p * over).sum(-1).clamp(max=1), over.gather(1, x)[:, 0].double()
    return Reading(
        n,
        0.0,
        finite=bool((drawn + chosen).isfinite().all() and tv.isfinite().all()),
        impossible=(begin + ((drawn == 0) | (chosen == 0)).nonzero()[:, 0]).tolist(),
        log_p=_log_p(p, x),
        leak=Events(*(_host(values[tested]) for values in leaked)),
        tv=_host(tv),
        rounding=_host(tolerance.double().tanh()[kept]),
    )


def law(logits: Tensor, tolerance: Tensor, sampling: Sampling, inside: Tensor) -> Tensor:
    """p [n, V] in float64 from penalised logits [n, V] (section 2.2). Rounding may move a token across the edge of
    top-k or top-p: closer to the edge than tolerance [n], `inside` [n, V] bool says on which side it is."""
    scores = logits.double() / sampling.temperature
    slack = tolerance.double()[:, None]
    if sampling.top_k:
        edge = scores.topk(min(sampling.top_k, scores.shape[-1]), -1).values[:, -1:]
        # What top-p then cuts off is not inside, on whichever side of this edge it was.
        near = inside | (scores >= edge) if sampling.top_p < 1 else inside
        scores = scores.masked_fill(~_decided(scores >= edge + slack, scores >= edge - slack, near, scores), -torch.inf)
    if sampling.top_p < 1:
        sorted_p, order = scores.softmax(-1).sort(-1, descending=True)
        above = torch.zeros_like(sorted_p).scatter(1, order, sorted_p.cumsum(-1) - sorted_p)  # mass of likelier tokens
        narrow, wide = above < sampling.top_p - slack.tanh(), above < sampling.top_p + slack.tanh()
        scores = scores.masked_fill(~_decided(narrow, wide, inside, scores), -torch.inf)
    return scores.softmax(-1)


def _decided(narrow: Tensor, wide: Tensor, inside: Tensor, scores: Tensor) -> Tensor:
    """[n, V] bool: the tokens that are kept. The most probable one always is."""
    return narrow | (wide & inside) | (scores == scores.amax(-1, keepdim=True))


def _log_p(p: Tensor, x: Tensor) -> Sums:
    """The sums of f = log p over n tokens x [n, 1] drawn from p [n, V]."""
    f = p.log().clamp(min=LOG_FLOOR)
    mean = (p * f).sum(-1, keepdim=True)
    return Sums(float((f.gather(1, x) - mean).sum()), float((p * (f - mean).square()).sum()))


def guesses(evidence: Evidence, tokens: Sequence[int]) -> tuple[Events, Floats]:
    """Whether the first guess of each tested step stands in the text, whose probability follows from the decoder's own
    p and q; and p / q of these guesses [K], infinite for q = 0, if the verifier uses it."""
    rule, known = evidence.rule, [i for i, at in enumerate(evidence.at) if at < len(tokens)]
    p, q = (np.array([values[i] for i in known], float) for values in (evidence.p, evidence.q))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios: Floats = p / q
    stands = np.array([tokens[evidence.at[i]] == evidence.guess[i] for i in known], float)
    if rule == "p / q":
        return Events(np.minimum(ratios, 1), stands), ratios
    return Events(p, stands) if rule == "p" else Events(), ratios[:0]


def _host(values: Tensor) -> Floats:
    found: Floats = values.double().cpu().numpy()
    return found
