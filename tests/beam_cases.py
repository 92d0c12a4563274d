"""Searches for beams, beams found by enumeration, and what two results must share."""

import pytest

from specbench.beams.reader import TreeReader
from specbench.beams.rounds import plain_round, speculative_round
from specbench.beams.search import Search
from specbench.decoding.timer import Clock

LIMIT = 12


def assert_equal(found, wanted):
    assert [h.tokens for h in found] == [tuple(tokens) for tokens, _ in wanted]
    assert [h.score for h in found] == pytest.approx([score for _, score in wanted], abs=1e-4)


def searched(rules, target, drafter=None, gamma=0, prompt=(), stops=(), limit=LIMIT, read=None):
    """The finished search of one prompt, or of an encoder's input, its rounds, and the target's reader; plain without a
    drafter."""
    start, forced = [*(prompt or target.start_tokens)], target.forced_tokens
    found = Search(rules, start[-1], frozenset(stops), limit - forced, target.device, forced)
    readers = [TreeReader(model, start, 200, read) for model in (target, drafter) if model is not None]
    rounds = []
    while not found.over:
        if drafter is None:
            rounds.append(plain_round(found, *readers, Clock()))
        else:
            left = max(0, min(gamma, found.limit - found.levels - 1))
            rounds.append(speculative_round(found, *readers, left, Clock()))
    return found, rounds, readers[0]
