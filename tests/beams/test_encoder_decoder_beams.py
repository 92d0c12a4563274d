"""Beam search on encoder-decoders (A.4, the paper's T5): against transformers, an enumeration, and plain search."""

import pytest
import torch
from beam_cases import LIMIT, assert_equal, noisy, of_transformers, searched, stopping
from choosing import slow_unless
from decoder_cases import CACHES
from encoder_decoder_cases import INPUTS, V, module_of

from specbench.beams import search as tree_reader
from specbench.beams.beam import stock_score
from specbench.beams.search import BeamRules

FAST = [("bart", "paged")]


def stops_on_the_way(module, read) -> set[int]:
    """Tokens that a search of this input would meet."""
    text = greedy_text(module, read, num_beams=4)
    return {text[5], text[8]} - {module.generation_config.forced_bos_token_id}


def greedy_text(module, read, **more) -> list[int]:
    """A text of LIMIT new tokens."""
    ids = torch.tensor([read])
    return module.generate(ids, do_sample=False, max_new_tokens=LIMIT, min_new_tokens=LIMIT, **more)[0].tolist()


@pytest.mark.parametrize(("kind", "cache"), [
    slow_unless((kind, cache) in FAST, kind, cache)
    for kind in ("t5", "bart") for cache in CACHES
])  # fmt: skip
def test_the_beams_and_scores_are_those_of_transformers(kind, cache, monkeypatch):
    """BART's text has a forced second token, which counts for the length, and tokens that are never drawn."""
    monkeypatch.setattr(tree_reader, "MOST_UNUSED", 5)
    module, other, unlike = module_of(kind), noisy(module_of(kind)), noisy(module_of(kind), 0.5)
    if kind == "bart":
        for m in (module, other, unlike):
            m.generation_config.forced_bos_token_id = 4
        first = greedy_text(module, INPUTS[0])
        for m in (module, other, unlike):
            m.generation_config.suppress_tokens, m.generation_config.bad_words_ids = [first[2]], [[first[3]]]
    lengths, accepted, rejected = set(), 0, 0
    for read, penalty, early in zip(INPUTS, (0.0, 1.0, 2.0), (True, False, False), strict=True):
        rules = BeamRules(4, 8, penalty, early)
        stops = stops_on_the_way(module, read)
        wanted = of_transformers(module, read, rules, stops, LIMIT, 2 if kind == "bart" else 1)
        target, *drafters = (stopping(m, stops, cache=cache, tokens=V) for m in (module, other, unlike))
        assert_equal(searched(rules, target, stops=stops, read=read)[0].finished, wanted)
        for drafter in drafters:
            search, rounds, _ = searched(rules, target, drafter, 3, stops=stops, read=read)
            found = search.finished
            assert_equal(found, wanted)
            accepted += sum(r.accepted for r in rounds)
            rejected += sum(r.rejected for r in rounds)
        lengths |= {len(hypothesis.tokens) for hypothesis in found}
        score, tolerance = stock_score(target, target.start_tokens, found[0].tokens, rules, read)
        assert score == pytest.approx(found[0].score, abs=tolerance)
    assert len(lengths) > 1 and accepted > 0 and rejected > 0
