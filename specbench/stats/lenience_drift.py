"""What lenience costs: the distance of the output distribution from the target's, and signs of it in the text."""

from collections.abc import Sequence

import numpy as np

from specbench.stats.estimates import Drift, Floats, Interval
from specbench.stats.records import Result


def drift(results: Sequence[Result], tv: float | None, kl: float | None, ci95: dict[str, Interval]) -> Drift:
    """The given total variation and KL, with the bound of A.5 over tested positions (others have the target's own
    distribution), and repetition in the texts of both decoders."""
    bounds = np.concatenate([drift_table(result)[2] for result in results])
    ours, theirs = ([result.both[way].tokens for result in results] for way in (0, 1))
    return Drift(tv, kl, float(bounds.max()) if len(bounds) else None, repetition(ours), distinct(ours),
                 repetition(theirs), distinct(theirs), ci95)  # fmt: skip


def drift_table(result: Result) -> Floats:
    """[3, n]: total variation, KL and the bound of A.5 at the tested positions of a text; n is 0 if it was not read."""
    laws = result.speculative_laws
    if laws is None:
        return np.zeros((3, 0))
    tested = [outcome is not None for outcome in result.speculative.outcomes()]
    table = np.stack([laws.drift_tv, laws.drift_kl, laws.bound])[:, tested[: len(laws.beta)]]
    return table[:, np.isfinite(table).all(0)]


def repetition(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """The share of n-grams that occurred earlier in the same text."""
    repeated = total = 0
    for text in texts:
        grams = list(zip(*(text[i:] for i in range(n)), strict=False))
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else 0.0


def distinct(texts: Sequence[Sequence[int]]) -> float:
    """The number of different 2-grams divided by the number of 2-grams, all texts together (distinct-2)."""
    pairs = [np.asarray(text, np.int64)[:-1] << 32 | np.asarray(text, np.int64)[1:] for text in texts]
    together = np.concatenate(pairs) if pairs else np.zeros(0)
    return len(np.unique(together)) / len(together) if len(together) else 0.0
