"""Searches for beams, beams found by enumeration, and what two results must share."""

import pytest

from specbench.beams.reader import TreeReader
from specbench.beams.rounds import plain_round, speculative_round
from specbench.beams.search import Search
from specbench.decoding.timer import Clock

LIMIT = 12


def enumerated_by(law, rules, stops, limit):
    """Beam search written down once more: whole texts in Python lists, all continuations of each. law(text) has the
    logits [V] behind a text."""
    running, finished = [((), 0.0)], []
    for length in range(1, limit + 1):
        every = []
        for text, score in running:
            log_p = law(text).double().log_softmax(-1).tolist()
            every += [((*text, x), score + log_p[x]) for x in range(len(log_p))]
        every.sort(key=lambda entry: -entry[1])
        ended = [length == limit or text[-1] in stops for text, _ in every]
        w = rules.width
        finished += [(t, s / length**rules.length_penalty) for (t, s), e in zip(every[:w], ended, strict=False) if e]
        finished = sorted(finished, key=lambda entry: -entry[1])[:w]
        running = [entry for entry, e in zip(every, ended, strict=True) if not e][:w]
        if not running:
            break
        best = running[0][1] / length**rules.length_penalty
        if len(finished) == w and (rules.early_stopping or best <= finished[-1][1]):
            break
    return finished


def assert_equal(found, wanted):
    assert [h.tokens for h in found] == [tuple(tokens) for tokens, _ in wanted]
    assert [h.score for h in found] == pytest.approx([score for _, score in wanted], abs=1e-4)


def searched(rules, read, stops, target, drafter=None, gamma=3):
    """The finished hypotheses, and how many levels of guesses were accepted and rejected."""
    start = target.start_tokens
    forced = target.forced_tokens
    search = Search(rules, start[-1], frozenset(stops), LIMIT - forced, target.device, forced)
    readers = [TreeReader(model) for model in (target, drafter) if model is not None]
    for reader in readers:
        reader.open(start, 200, read)
    accepted = rejected = 0
    while not search.over:
        if drafter is None:
            plain_round(search, *readers, Clock())
            continue
        made = speculative_round(search, *readers, max(0, min(gamma, search.limit - search.levels - 1)), Clock())
        accepted, rejected = accepted + made.accepted, rejected + made.rejected
    return search.finished, accepted, rejected
