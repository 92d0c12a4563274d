"""Searches for beams, beams found by enumeration, and what two results must share."""

import pytest

from specbench.beams.decode import one_round
from specbench.beams.search import Search, TreeReader
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
    reader, drafts = (model and TreeReader(model, start, 200, read) for model in (target, drafter))
    rounds = []
    while not found.over:
        left = 0 if drafter is None else max(0, min(gamma, found.limit - found.levels - 1))
        rounds.append(one_round(found, reader, drafts, left, Clock()))
    return found, rounds, reader
