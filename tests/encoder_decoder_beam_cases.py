"""Beams of an encoder-decoder."""

from specbench.contrib.beams.beam_search import plain_round, speculative_round
from specbench.contrib.beams.search_state import Search
from specbench.contrib.beams.tree_reader import TreeReader
from specbench.decoding.timer import Clock

LIMIT = 12


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
