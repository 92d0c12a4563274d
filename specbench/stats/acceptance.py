"""Estimates of acceptance: alpha in total, by position and by category, and block efficiency."""

from collections.abc import Sequence

import numpy as np

from specbench.results.schema import Estimate
from specbench.stats.bootstrap import ratio
from specbench.stats.bootstrap_clusters import prompt_clusters
from specbench.stats.records import Result


def acceptance(results: Sequence[Result]) -> tuple[Estimate, Estimate, Estimate]:
    """Three estimates, with prompts as clusters: alpha as mean beta over tested positions, alpha as accepted / tested,
    and block efficiency, tokens per target call. Corollary 3.6 has all positions: see `alpha_on_text`."""
    rows, clusters = [result.speculative.rounds for result in results], prompt_clusters(results)
    tested = [sum(r.tested for r in rounds) for rounds in rows]
    return (
        ratio([sum(sum(r.beta) for r in rounds) for rounds in rows], tested, clusters),
        ratio([sum(r.accepted for r in rounds) for rounds in rows], tested, clusters),
        ratio([sum(r.tokens for r in rounds) for rounds in rows], [len(rounds) for rounds in rows], clusters),
    )


def beta_by_position(results: Sequence[Result]) -> list[Estimate]:
    """Mean beta (Definition 3.1) of the first, second, ... guess of a round, over the rounds in which it was tested."""
    rows = [result.speculative.rounds for result in results]
    longest = max((r.tested for rounds in rows for r in rounds), default=0)
    return [
        ratio(
            [sum(r.beta[i] for r in rounds if r.tested > i) for rounds in rows],
            [sum(r.tested > i for r in rounds) for rounds in rows],
            prompt_clusters(results),
        )
        for i in range(longest)
    ]


def alpha_by_category(results: Sequence[Result]) -> dict[str, Estimate]:
    """alpha (mean beta) of each category of prompts, if the data name categories."""
    categories = sorted({result.request.category for result in results} - {""})
    return {
        category: acceptance([result for result in results if result.request.category == category])[0]
        for category in categories
    }


def alpha_on_text(results: Sequence[Result]) -> Estimate:
    """Mean beta over every position of plain decoding's texts that were read, tested or not (Corollary 3.6), with
    prompts as clusters."""
    read = [result for result in results if result.baseline_laws is not None]
    laws = [result.baseline_laws for result in read if result.baseline_laws is not None]
    betas = [found.beta[np.isfinite(found.beta)] for found in laws]
    return ratio([found.sum() for found in betas], [len(found) for found in betas], prompt_clusters(read))
