"""What lossy decoding costs: the distance of its output distribution from the target's, and repetition in its texts."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.verify import output_distribution
from specbench.measure.intervals import Estimate
from specbench.measure.latency import METHODS, text_of
from specbench.measure.record import Record
from specbench.measure.rounds import finished

NUMBERS = ("tv", "kl", "bound")


def drift_of_steps(p: Tensor, q: Tensor, lenience: float, greedy: bool) -> Tensor:
    """The NUMBERS [..., 3] of steps with p [..., V] and q [..., V], float64: total variation between the output
    distribution s and p; KL(s | p) in nats; the largest s(x) l / p(x), which is at most 1 (A.5). At temperature 0 p is
    that before the argmax: 1 - s(best), log p lost against the best token, and the largest s(x) l max p / p(x)."""
    p, q = (values.double() / values.double().sum(-1, keepdim=True).clamp(min=1e-300) for values in (p, q))
    s, _ = output_distribution(p, q, lenience, greedy)
    positive = p.clamp(min=1e-300)
    if greedy:
        most, best = p.max(-1, keepdim=True)
        tv = 1 - s.gather(-1, best)[..., 0]
        kl = (s * (most.log() - positive.log())).sum(-1)
        bound = (s * lenience * most / positive).amax(-1)
    else:
        tv = (s - p).abs().sum(-1) / 2
        kl = (torch.xlogy(s, s) - torch.xlogy(s, positive)).sum(-1)
        bound = (s * lenience / positive).amax(-1)
    return torch.stack([tv, kl.clamp(min=0), bound], -1)


def drift(records: Sequence[Record], means: Mapping[str, Estimate]) -> dict[str, Any]:
    """The `means` of total variation and KL over tested positions, the largest bound, and repetition in both texts."""
    own = [record.drift for record in records if record.drift]
    found: dict[str, Any] = {name: {"mean": e.value, "ci95": e.ci95} for name, e in means.items()}
    found["bound"] = max((sums["bound"] for sums in own), default=None)
    for method in METHODS:
        texts = [text_of(record, method).ids for record in finished(records)]
        found[method] = {"repetition": repetition(texts), "distinct_2": distinct(texts)}
    return found


def repetition(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """The share of n-grams that occurred earlier in the same text."""
    repeated = total = 0
    for text in texts:
        grams = list(zip(*(text[i:] for i in range(n)), strict=False))
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else 0.0


def distinct(texts: Sequence[Sequence[int]], n: int = 2) -> float:
    """The number of different n-grams over the number of n-grams, all texts together (distinct-n)."""
    grams = [gram for text in texts for gram in zip(*(text[i:] for i in range(n)), strict=False)]
    return len(set(grams)) / len(grams) if grams else 0.0
