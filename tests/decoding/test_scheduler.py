"""Continuous batching: rows are handed on, prompts are read in chunks, and no token changes."""

import heapq
from collections import defaultdict
from copy import deepcopy
from functools import partial
from unittest.mock import patch

import pytest
from choosing import in_turn, slow_unless
from decoder_cases import CACHES, DRAFTERS
from scheduler_cases import GAMMA, decode, jobs

from specbench.cache.paged import PagedCache
from specbench.decoding.scheduler import CacheTooSmallError, Scheduler
from specbench.decoding.sequence import Sequence
from specbench.models.language_model import LanguageModel
from specbench.policies.choosing import HeuristicGamma
from specbench.policies.stopping import ConfidenceGamma

LIKE_OTHERS = (  # in the default run other drafts of their kind stand for these
    "ngram", "prompt_lookup", "suffix", "unigram", 
    "mtp_distinct", "eagle3", "under_under_model", "tree_independent", "tree_best",
    "tree_dynamic", "tree_sampled", "multi_draft_two", "own_trees",
)  # fmt: skip


@pytest.mark.parametrize(("kind", "cache"), in_turn(
    (None, *DRAFTERS), [(cache,) for cache in CACHES], [None, *(kind for kind in DRAFTERS if kind not in LIKE_OTHERS)]
))  # fmt: skip
def test_the_batch_changes_no_token(kind, cache, tables, number_text):
    wanted = jobs() if kind in (None, "model", "ngram") else jobs(6)
    singles = decode(wanted, 1, tables, cache, kind, text=number_text)
    assert [len(out) for out in singles] == [job.limit - len(job.tokens) for job in wanted]
    for rows, chunk in ((3, 5),) if kind not in ("model", "ngram") else ((2, 1), (3, 5), (8, 64), (16, 7)):
        assert decode(wanted, rows, tables, cache, kind, chunk, text=number_text) == singles


@pytest.mark.parametrize("policy", [
    HeuristicGamma(2, GAMMA), slow_unless(False, ConfidenceGamma(GAMMA, 0.2))
], ids=["heuristic", "confidence"])  # fmt: skip
def test_the_batch_changes_no_token_where_noise_is_renewed(policy, tables):
    """What these policies know of a row is of that row alone."""
    singles = decode(jobs(), 1, tables, policy=deepcopy(policy))
    assert singles != decode(jobs(), 1, tables)  # not the tokens of a fixed gamma, whose noise stays
    for rows, chunk in ((3, 5), (16, 7)):
        assert decode(jobs(), rows, tables, chunk=chunk, policy=deepcopy(policy)) == singles


def test_a_row_is_handed_on_at_once_and_reading_never_stops_the_others(tables):
    seen = []

    def watch(state, queue, target):
        seen.append((list(state.request_ids), list(state.active), len(queue.waiting), list(queue.reading)))

    decode(jobs(), 3, tables, chunk=4, watch=watch)
    for owners, active, waiting, reading in seen[:-1]:
        assert not waiting or all(owner >= 0 for owner in owners)  # no free row while somebody waits
        assert any(active)
        assert all(on or row in reading or owners[row] < 0 for row, on in enumerate(active))
    assert any(reading and any(active) for _, active, _, reading in seen)


def few_blocks(count):
    return partial(PagedCache, block_size=4, blocks=count)


def test_requests_wait_for_blocks_and_change_no_token(tables):
    singles, most = decode(jobs(), 1, tables), []

    def watch(state, queue, target):
        most.append(sum(owner >= 0 for owner in state.request_ids))
        assert sum(map(len, target.cache.held)) <= target.cache.blocks.count

    assert decode(jobs(), 8, tables, few_blocks(24), watch=watch) == singles
    assert 1 < max(most) < 8


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(tables):
    with pytest.raises(CacheTooSmallError, match=r"needs \d+ cache columns.*cache\.blocks"):
        decode(jobs(), 2, tables, few_blocks(5))


def test_common_prefixes_are_read_once(tables, monkeypatch):
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    shared = [Sequence([*prompt, i], 14, i) for i in range(5)]
    expected, reads = decode(shared, 2, tables, kind=None), []
    plain = LanguageModel.read

    def read(self, state, row, begin, end):
        reads.append((begin, end))
        plain(self, state, row, begin, end)

    monkeypatch.setattr(LanguageModel, "read", read)
    assert decode(shared, 2, tables, "paged", kind=None, chunk=64) == expected
    assert reads[0] == (8, 9) and len(reads) == 3  # the first two were read together


def parts_read(rows, alone, tables):
    """Where the parts begin and end in which prompts are read, by key of the request."""
    found = defaultdict(list)

    def noted(self, state, row, begin, end, read=LanguageModel.read):
        found[state.at(row).key].append((begin, end))
        read(self, state, row, begin, end)

    with patch("decoder_cases.Scheduler", partial(Scheduler, alone=alone)), patch.object(LanguageModel, "read", noted):
        decode(jobs(), rows, tables, kind=None)
    return found


def test_prompts_read_alone_are_read_in_the_same_parts_beside_any_others(tables):
    expected = parts_read(1, True, tables)
    assert parts_read(3, True, tables) == expected and (0, 5) in expected[100]
    assert parts_read(3, False, tables) != expected  # negative control


def calls_predicted(limits, rows):
    """Calls of plain decoding if a row that ends takes the next request, longest first, before the next call."""
    ends = [0] * rows
    for new in limits:
        heapq.heapreplace(ends, ends[0] + new)
    return max(ends)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_target_is_called_as_often_as_continuous_batching_predicts(rows, tables):
    wanted, calls = jobs(20), []
    decode(wanted, rows, tables, kind=None, chunk=1000, watch=lambda state, *others: calls.append(any(state.active)))
    longest_first = sorted(wanted, key=lambda job: -job.limit)
    assert sum(calls) == calls_predicted([job.limit - len(job.tokens) for job in longest_first], rows)
