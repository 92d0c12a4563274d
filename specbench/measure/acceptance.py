"""How often guesses are accepted: alpha, by position and by category, and tokens per round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specbench.measure.estimators import Estimate, ratio

if TYPE_CHECKING:
    from specbench.batch import Batch
    from specbench.measure.recorder import Round


def acceptance(finished: Sequence[Batch]) -> tuple[Estimate, Estimate, Estimate]:
    """alpha by mean beta over tested positions (Corollary 3.6), alpha by accepted / tested, and
    block efficiency, tokens per target call; each with prompts as clusters."""
    rows = [rounds for _, rounds in _requests(finished)]
    tested = [sum(r.tested for r in rounds) for rounds in rows]
    return (
        ratio([sum(sum(r.beta) for r in rounds) for rounds in rows], tested),
        ratio([sum(r.accepted for r in rounds) for rounds in rows], tested),
        ratio([sum(r.tokens for r in rounds) for rounds in rows], [len(rounds) for rounds in rows]),
    )


def beta_by_position(finished: Sequence[Batch]) -> list[Estimate]:
    """Mean beta of the first, second, ... guess of a round, where it was tested."""
    rows = [rounds for _, rounds in _requests(finished)]
    longest = max((r.tested for rounds in rows for r in rounds), default=0)
    return [
        ratio(
            [sum(r.beta[i] for r in rounds if r.tested > i) for rounds in rows],
            [sum(r.tested > i for r in rounds) for rounds in rows],
        )
        for i in range(longest)
    ]


def alpha_by_category(finished: Sequence[Batch]) -> dict[str, Estimate]:
    """alpha of each kind of prompt, where the data name them."""
    rows: dict[str, list[list[Round]]] = {}
    for category, rounds in _requests(finished):
        rows.setdefault(category, []).append(rounds)
    return {
        category: ratio(
            [sum(sum(r.beta) for r in rounds) for rounds in found], [sum(r.tested for r in rounds) for rounds in found]
        )
        for category, found in sorted(rows.items())
        if category
    }


def alpha_on_text(finished: Sequence[Batch], text: str) -> Estimate:
    """Mean beta over every position of a text, tested or not; a prompt is a cluster."""
    betas = [laws.beta[np.isfinite(laws.beta)] for batch in finished for laws in batch.texts.get(text, [])]
    return ratio([found.sum() for found in betas], [len(found) for found in betas])


def _requests(finished: Sequence[Batch]) -> Iterator[tuple[str, list[Round]]]:
    """Category and rounds of every request."""
    for batch in finished:
        for row, request in enumerate(batch.requests):
            yield request.category, [r for r in batch.speculative.rounds if r.row == row]
