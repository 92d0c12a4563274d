"""Beam search (A.4): hypotheses and scores against an enumeration and transformers, and plain against speculative."""

import copy
from types import SimpleNamespace

import pytest
import torch
from beam_cases import assert_equal, noisy, of_transformers, searched, stopping
from choosing import in_turn
from decoder_cases import CACHES, GREEDY, V, tabular_model
from small_runs import call, composed, parts_of, run, small
from tabular import random_table
from transformers import AutoModelForCausalLM, MistralConfig

from specbench.beams import decode as beam_search
from specbench.beams import search as tree_reader
from specbench.beams.beam import judge
from specbench.beams.search import BeamRules
from specbench.config.check import check
from specbench.errors import ConfigError
from specbench.report.files import read_run

PROMPT = [3, 1, 4, 1, 5]
STOPS = {3, 8}


def enumerated(table, rules, limit=12):
    """Beam search of PROMPT written down once more: whole texts in Python lists, all continuations of each."""
    running, finished = [((), 0.0)], []
    for length in range(1, limit + 1):
        every = []
        for text, score in running:
            before, last = [*PROMPT, *text][-2:]
            log_p = table[before, last].double().log_softmax(-1).tolist()
            every += [((*text, x), score + log_p[x]) for x in range(len(log_p))]
        every.sort(key=lambda entry: -entry[1])
        ended = [length == limit or text[-1] in STOPS for text, _ in every]
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


RULES = [BeamRules(1, 2, 1.0, False), BeamRules(3, 5, 1.0, False), BeamRules(3, 3, 0.0, True),
         BeamRules(4, 9, 2.0, False), BeamRules(2, 6, -1.0, True)]  # fmt: skip


@pytest.mark.parametrize(("rules", "cache"), in_turn(RULES, [(cache,) for cache in CACHES]), ids=str)
def test_both_searches_find_what_an_enumeration_finds(rules, cache, monkeypatch):
    monkeypatch.setattr(tree_reader, "MOST_UNUSED", 3)
    accepted = rejected = 0
    for seed in range(4):
        table = random_table(V, seed)
        target = tabular_model(table, GREEDY, cache, context=300)
        wanted = enumerated(table, rules)
        assert_equal(searched(rules, target, prompt=PROMPT, stops=STOPS)[0].finished, wanted)
        for gamma, spread in ((1, 0.3), (3, 0.3), (3, 3.0), (6, 0.0)):
            drafter = tabular_model(table + random_table(V, seed + 50, spread), GREEDY, cache, context=300)
            found, rounds, _ = searched(rules, target, drafter, gamma, PROMPT, STOPS)
            assert_equal(found.finished, wanted)
            assert sum(r.levels for r in rounds) == found.levels
            accepted, rejected = accepted + sum(r.accepted for r in rounds), rejected + sum(r.rejected for r in rounds)
    assert accepted > 10 and rejected > 3


def test_accepting_all_continuations_but_one_finds_other_beams(monkeypatch):
    """The negative control: a level that holds w - 1 of w continuations is accepted, with a guess for the other."""

    def lenient(chosen):
        found = [parent.children.get(token) for parent, token in chosen]
        if found.count(None) != 1:
            return None if None in found else found
        known = [node for node in found if node is not None]
        others = [node for parent, _ in chosen for node in parent.children.values() if node not in known]
        return [node or (others or known)[0] for node in found]

    rules, differ = BeamRules(3, 4, 1.0, False), 0
    monkeypatch.setattr(beam_search, "drafted", lenient)
    for seed in range(8):
        table = random_table(V, seed)
        similar = table + random_table(V, seed + 50, 0.6)
        models = (tabular_model(t, GREEDY, context=300) for t in (table, similar))
        found, _, _ = searched(rules, *models, 4, PROMPT, STOPS)
        differ += [h.tokens for h in found.finished] != [tokens for tokens, _ in enumerated(table, rules)]
    assert differ > 2


def test_a_target_that_drafts_for_itself_accepts_every_level():
    target, twin = (tabular_model(random_table(V, 1), GREEDY, context=300) for _ in range(2))
    _, rounds, reader = searched(BeamRules(3, 3, 1.0, False), target, twin, 4, PROMPT)
    assert all(not r.rejected and r.accepted == r.gamma for r in rounds)
    assert [r.levels for r in rounds] == [5, 5, 2]
    assert rounds[1].width == 3 + 3 * 4  # w + u gamma (A.4)
    assert reader.tokens == sum(r.width for r in rounds)


@pytest.mark.parametrize(("penalty", "early"), in_turn([0.0, 1.0, 2.0], [(False,), (True,)], [1.0]))
def test_the_beams_and_scores_are_those_of_transformers(penalty, early, good):
    module, other = (AutoModelForCausalLM.from_pretrained(good) for _ in range(2))
    noisy(other)
    lengths = set()
    for prompt in ([5, 17, 9], [40, 41, 42, 43], [7] * 6):
        text = torch.tensor([prompt])
        probed = module.generate(text, num_beams=4, do_sample=False, max_new_tokens=14, pad_token_id=0)
        stops = {int(probed[0, len(prompt) + 4]), int(probed[0, len(prompt) + 9])}  # tokens that the search would meet
        rules = BeamRules(4, 8, penalty, early)
        wanted = of_transformers(module, prompt, rules, stops, 14, len(prompt))
        for drafter in (None, stopping(other, stops)):
            found, _, _ = searched(rules, stopping(module, stops), drafter, 3, prompt, stops, limit=14)
            assert_equal(found.finished, wanted)
        lengths |= {len(h.tokens) for h in found.finished}
    assert len(lengths) > 1 or penalty == 2, "some hypotheses end before the limit"


REFUSED = {
    "temperature=1": "decoding=beam is not possible with temperature=1.0: it must be 0, or use decoding=sampling",
    "top_k=5": "with top_k=5: it must be 0",
    "top_p=0.9": "with top_p=0.9",
    "repetition_penalty=1.1": "with repetition_penalty=1.1",
    "lenience=0.5": "with lenience=0.5: it must be 1",
    "batch_size=2": "with batch_size=2: it must be 1",
    "stop=[x]": r"with stop=\['x'\]",
    "verifier=block": "with verifier=block: use verifier=speculative",
    "gamma_policy=adaptive": "with gamma_policy=adaptive: use gamma_policy=fixed",
    "lenience_policy=load": "with lenience_policy=load",
    "workload=poisson": "with workload=poisson: use workload=all_at_once",
    "peers=transformers": "with peers=transformers",
    "drafter=ngram": "with drafter=ngram, which has no beams",
    "drafter=tree": "with drafter=tree, which has no beams|with drafter=tree, which drafts trees|verifier=",
    "executor=compiled": "with executor=compiled, whose calls have few shapes",
    "decoding.drafter_beams=3": "decoding.drafter_beams=3 is not allowed: it must be at least beams=4",
    "decoding.early_stopping=never": "decoding.early_stopping=never is not allowed: it must be true or false",
    "beams=65": "beams=65 is not allowed: it must be an integer >= 1 and <= 64",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_makes_no_sense_with_beams_is_refused_before_a_model_loads(override):
    with pytest.raises(ConfigError, match=REFUSED[override]):
        check(composed("decoding=beam", override))


@pytest.mark.parametrize(("window", "possible"), [(6, False), (None, True), (256, True)])
def test_a_sliding_window_that_texts_outgrow_is_refused(window, possible):
    decoding = check(composed("decoding=beam")).choices["decoding"].build()
    config = MistralConfig(max_position_embeddings=256, sliding_window=window)
    wide, model = (
        SimpleNamespace(name=name, trees=True, context=256, vocab_size=64, stop_tokens=[1], config=each)
        for name, each in (("wide", MistralConfig(sliding_window=None)), ("narrow", config))
    )
    if possible:
        decoding.refuse_models([wide, model])
        return
    for models in ([wide, model], [model, wide]):
        with pytest.raises(ConfigError, match="decoding=beam is not possible with narrow"):
            decoding.refuse_models(models)


def test_beams_without_a_beam_search_are_refused():
    expected = "decoding=sampling is not possible with beams=4: it must be 1, or use decoding=beam"
    with pytest.raises(ConfigError, match=expected):
        check(composed("beams=4"))
    assert check(composed("decoding=beam", "beams=6")).choices["decoding"].settings.drafter_width == 12


def test_a_run_by_beam_search_leaves_the_numbers_of_a_run(monkeypatch, tmp_path):
    words = small("decoding=beam", "beams=3", "gamma=3", "logger=none", f"hydra.run.dir={tmp_path}")
    assert call(words, monkeypatch, tmp_path) == 0
    run = read_run(tmp_path)
    beam, counts = run.results["details"]["beam"], run.results["counts"]
    assert run.results["lossless"]["passed"] and beam["equal"] == beam["requests"] == 2
    assert (beam["beams"], beam["drafter_beams"], beam["most_target_runs_a_call"]) == (3, 6, 3 + 6 * 3)
    assert beam["levels"] == counts["tokens"] == 24  # no text ends before its limit
    assert beam["calls"] == counts["rounds"] < 24 and beam["plain_target_runs"] == 2 * (1 + 3 * 11)
    assert run.results["alpha"]["mean"] == run.results["alpha_counted"]["mean"] == counts["accepted"] / counts["tested"]
    assert all(record.speculative.ids == record.baseline.ids for record in run.records)


def test_other_beams_and_scores_fail_the_verdict(tmp_path):
    """Negative controls on the record of a sound run."""
    _, [record] = run(parts_of("decoding=beam", "data.limit=1"), tmp_path)
    assert judge([record], coarse=False)["passed"] is True
    assert judge([], coarse=False)["passed"] is None
    beams = record.search["speculative"]["hypotheses"]
    honest = copy.deepcopy(beams)
    beams[0][1] += 1e-2
    assert "best scores" in judge([record], coarse=False)["reason"] and judge([record], False)["passed"] is False
    beams[:] = copy.deepcopy(honest)
    beams[1][0][-1] += 1
    beams[1][1] -= 1e-2
    assert "other beams" in judge([record], coarse=False)["reason"] and judge([record], False)["passed"] is False
    assert judge([record], coarse=True)["passed"] is None
