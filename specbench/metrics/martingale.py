"""Statistics that are standard normal if tokens are drawn from p; the losslessness gate tests them.

For any f that is known before the draw, z = sum(f(x_t) - E_p f) / sqrt(sum Var_p f) is a sum of martingale differences
over its standard deviation.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specbench.metrics.metric import Metric, Path

LOG_FLOOR = -30.0  # nats: stands for log p of tokens that cannot be drawn


class Martingale(Metric):
    """Base class: a round is the pair of sum(f(x_t) - E_p f) and sum Var_p f."""

    columns = ("deviation", "variance")

    def of_run(self, requests: Sequence[Sequence[tuple[float, ...]]]) -> Mapping[str, float | None]:
        return {"z": z_of([numbers for rounds in requests for numbers in rounds])}


def z_of(rounds: Sequence[tuple[float, ...]]) -> float:
    """z of all rounds together: 0 if the variance is 0, infinite if a number is not finite."""
    deviation, variance = (sum(numbers[i] for numbers in rounds) for i in (0, 1))
    if not math.isfinite(deviation + variance):
        return math.inf
    return deviation / math.sqrt(variance) if variance > 0 else 0.0


class LogProbability(Martingale):
    """f = log p, over the emitted tokens of a round."""

    def of_round(self, path: Path) -> Tensor:
        p, emitted = path.p, path.emitted()
        f = p.log().clamp(min=LOG_FLOOR)
        mean = (p * f).sum(-1)
        variance = (p * (f - mean[..., None]).square()).sum(-1)
        drawn = f.gather(-1, path.tokens[..., None]).squeeze(-1)
        return torch.stack([((drawn - mean) * emitted).sum(-1), (variance * emitted).sum(-1)], -1).double()


class DraftLeak(Martingale):
    """f = 1[q(x) > p(x)], which marks tokens that the draft proposes too often, over the tested positions of a
    round."""

    def of_round(self, path: Path) -> Tensor:
        p, tokens, draft = path.p[:, :-1], path.tokens[:, :-1], path.draft
        if draft.probs is None:
            mean = p.gather(-1, draft.tokens[..., None]).squeeze(-1)
            drawn = (tokens == draft.tokens).double()
            drawn = torch.where(mean < 1, drawn, mean.double())
        else:
            over = draft.probs > p
            mean = (p * over).sum(-1)
            drawn = over.gather(-1, tokens[..., None]).squeeze(-1).double()
        mean, tested = mean.double(), path.judged()
        return torch.stack([((drawn - mean) * tested).sum(-1), (mean * (1 - mean) * tested).sum(-1)], -1)
