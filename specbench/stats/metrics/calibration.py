"""Calibration of the drafter: compares q(x) of tested guesses with how often such guesses are accepted."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from specbench.settings import BaseSettings
from specbench.stats.estimates import Floats
from specbench.stats.metrics.base import Metric, Path


class Calibration(Metric):
    """Counts tested guesses in `bins` bins by q(x). A point mass has q(x) = 1."""

    class Settings(BaseSettings):
        bins: int = Field(ge=1, le=1000)

    def __init__(self, bins: int):
        self.bins = bins
        self.columns = tuple(f"{name}_{i}" for name in ("guesses", "q", "accepted") for i in range(bins))

    def of_round(self, path: Path) -> Tensor:
        draft = path.draft
        q = torch.ones_like(draft.tokens, dtype=torch.double)
        if draft.probs is not None:
            q = draft.probs.gather(-1, draft.tokens[..., None])[..., 0].double()
        where = (q * self.bins).long().clamp(max=self.bins - 1)  # [B, D]
        one = torch.nn.functional.one_hot(where, self.bins).double() * path.judged()[..., None]
        accepted = torch.arange(q.shape[1], device=q.device) < path.accepted[:, None]
        sums = [one.sum(1), (one * q[..., None]).sum(1), (one * accepted[..., None]).sum(1)]
        return torch.cat(sums, -1)

    def of_run(self, requests: Sequence[Sequence[tuple[float, ...]]]) -> Mapping[str, float | None]:
        """Mean q(x), the share of accepted guesses, and `error`: the mean distance of the two over bins, weighted by
        their guesses (the expected calibration error)."""
        rounds = [numbers for rounds in requests for numbers in rounds]
        guesses, q, accepted = np.reshape(rounds, (-1, 3, self.bins)).sum(0)
        total = guesses.sum()
        if not total:
            return {"mean_q": None, "accepted": None, "error": None}
        error = calibration_error(guesses, q, accepted)
        return {"mean_q": float(q.sum() / total), "accepted": float(accepted.sum() / total), "error": error}


def calibration_error(counts: Floats, predicted: Floats, happened: Floats) -> float:
    """The expected calibration error: the mean distance of what was predicted and what happened over bins, weighted by
    the counts of the bins; all three are sums over each bin [bins]."""
    return float(np.abs(predicted - happened).sum() / counts.sum())
