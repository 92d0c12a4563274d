"""What lossy decoding costs: the distance of its output distribution from the target's."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.verify import output_distribution
from specbench.measure.intervals import Estimate
from specbench.measure.record import Record

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
    """The `means` of total variation and KL over tested positions, and the largest bound."""
    own = [record.drift for record in records if record.drift]
    found: dict[str, Any] = {name: {"mean": e.value, "ci95": e.ci95} for name, e in means.items()}
    found["bound"] = max((sums["bound"] for sums in own), default=None)
    return found
