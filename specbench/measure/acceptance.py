"""How often guesses are accepted: alpha, by position and by category, and tokens per round."""

from collections.abc import Sequence

import numpy as np

from specbench.decoded import Result, TextLaws
from specbench.measure.estimators import ratio
from specbench.results import Estimate


def acceptance(results: Sequence[Result]) -> tuple[Estimate, Estimate, Estimate]:
    """alpha by mean beta over tested positions (Corollary 3.6), alpha by accepted / tested, and
    block efficiency, tokens per target call; each with prompts as clusters."""
    rows = [result.speculative.rounds for result in results]
    tested = [sum(r.tested for r in rounds) for rounds in rows]
    return (
        ratio([sum(sum(r.beta) for r in rounds) for rounds in rows], tested),
        ratio([sum(r.accepted for r in rounds) for rounds in rows], tested),
        ratio([sum(r.tokens for r in rounds) for rounds in rows], [len(rounds) for rounds in rows]),
    )


def beta_by_position(results: Sequence[Result]) -> list[Estimate]:
    """Mean beta of the first, second, ... guess of a round, where it was tested."""
    rows = [result.speculative.rounds for result in results]
    longest = max((r.tested for rounds in rows for r in rounds), default=0)
    return [
        ratio(
            [sum(r.beta[i] for r in rounds if r.tested > i) for rounds in rows],
            [sum(r.tested > i for r in rounds) for rounds in rows],
        )
        for i in range(longest)
    ]


def alpha_by_category(results: Sequence[Result]) -> dict[str, Estimate]:
    """alpha of each kind of prompt, where the data name them."""
    categories = sorted({result.request.category for result in results} - {""})
    return {
        category: acceptance([result for result in results if result.request.category == category])[0]
        for category in categories
    }


def alpha_on_text(laws: Sequence[TextLaws | None]) -> Estimate:
    """Mean beta over every position of the texts that were read, tested or not; a prompt is a cluster."""
    betas = [read.beta[np.isfinite(read.beta)] for read in laws if read is not None]
    return ratio([found.sum() for found in betas], [len(found) for found in betas])
