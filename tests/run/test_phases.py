"""What a run does besides decoding: its phases, the prompt that probes find in the cache, and p that is kept for
betas."""

import logging
from dataclasses import astuple
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from choosing import only, slow_unless
from decoder_cases import CACHES, VERIFIERS, V, make_drafter, tabular_model, verifier_of
from small_runs import parts_of

from specbench.cache.static import StaticCache
from specbench.decoding.sampling import Sampling
from specbench.decoding.search import Decoding
from specbench.decoding.sequence import Sequence
from specbench.models.language_model import LanguageModel
from specbench.policies.fixed import FixedGamma
from specbench.results.report.run_sections import phases as in_words
from specbench.run import interleave as member
from specbench.run import phase_timer as clock
from specbench.run import recorder
from specbench.run.batching import Requests
from specbench.run.decoder import Session
from specbench.run.phase_timer import Phases
from specbench.run.run import run
from specbench.run.warm_up import warm_up
from specbench.stats.position_stats import DecodedText, read_texts
from specbench.verifiers.speculative import SpeculativeVerifier

COLUMNS = 64


def session_of(tables, cache="static", sampling=None, rows=1, kind="model", verifier=SpeculativeVerifier, lenience=1.0):
    sampling = sampling or Sampling()
    target = tabular_model(tables.target, sampling, cache, COLUMNS)
    drafter = make_drafter(kind, target, "", tabular_model(tables.similar, sampling, cache, COLUMNS))
    verifier = verifier_of(verifier, sampling, lenience)
    return Session(SimpleNamespace(
        target=target, drafter=drafter, policy=FixedGamma(3), verifier=verifier,
        metrics={}, prefill_chunk=8, verdict_tokens=0, stop_strings=[], batch_size=rows, spare=4, decoding=Decoding(),
    ))  # fmt: skip


def jobs(number=3, new=20):
    prompts = torch.randint(V, (number, 12), generator=torch.Generator().manual_seed(5)).tolist()
    return [Sequence(prompt, 12 + new, 40 + key) for key, prompt in enumerate(prompts)]


def test_no_second_is_in_two_phases(monkeypatch):
    ticks = count()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(ticks)))
    phases = Phases(begun=-7.0)  # made at 0, and every look at the clock is a second later
    with phases("outer"), phases("inner"):
        pass
    with pytest.raises(ValueError), phases("inner"):
        raise ValueError
    assert phases.seconds == {"start": 7.0, "outer": 2.0, "inner": 2.0}
    assert "start 7.0, outer 2.0" in in_words({"seconds": phases.seconds}) and in_words({"seconds": {}}) == ""


def columns(laws):
    return np.array(astuple(laws))


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=5, repetition_penalty=1.3)])
def test_betas_by_the_kept_p_are_those_of_a_text_that_is_read(sampling, speculative, tables):
    """Negative control: the p of the position before gives others."""
    session = session_of(tables, sampling=sampling, rows=2)
    target, drafter = session.parts.target, session.parts.drafter
    wanted = jobs()
    decoded = session.decode(wanted, speculative, COLUMNS, laws=True)
    if not speculative:
        drafter.model.allocate(1, COLUMNS)
    for job, request, evidence in zip(wanted, decoded.requests, decoded.evidence, strict=True):
        new = request.tokens
        p = evidence.whole_law(len(new))
        assert p.shape == (len(new), V) and len(new) == 20
        lenience = [0.8 if i % 3 else 1.0 for i in range(len(new))]
        read, kept, shifted = (
            columns(read_texts(target, drafter, job.tokens, [DecodedText(new, lenience, law)])[0])
            for law in (None, p, p.roll(1, 0))
        )
        assert np.allclose(read, kept, atol=1e-5, equal_nan=True)
        assert not np.allclose(read[0], shifted[0], atol=1e-2)


@pytest.mark.parametrize(("kind", "verifier", "lenience"), [
    ("model", "match", 1.0), ("model", "block", 1.0), ("model", "rejection", 1.0), ("random", "speculative", 0.5),
    ("prompt_lookup", "speculative", 1.0), ("ngram_sample", "match", 1.0), ("random", "block", 1.0),
    ("early_exit", "speculative", 1.0), ("speculative", 1.0), ("under_ngram", "speculative", 1.0),
    ("tree_distinct", "iterative", 1.0), ("multi_draft_two", "iterative", 1.0), ("medusa", "match", 1.0),
    ("own_trees", "iterative", 1.0),
])  # fmt: skip
def test_the_kept_p_of_a_token_is_the_law_that_the_target_gives_it(kind, verifier, lenience, tables):
    """By the chain's own table, whatever drafts and judges. Negative control: the p of the position before."""
    session = session_of(tables, rows=2, kind=kind, verifier=VERIFIERS[verifier], lenience=lenience)
    decoded = session.decode(wanted := jobs(), True, COLUMNS, laws=True)
    rounds = [r for request in decoded.requests for r in request.rounds]
    assert any(r.accepted for r in rounds) and any(r.accepted < r.gamma for r in rounds)
    for job, request, evidence in zip(wanted, decoded.requests, decoded.evidence, strict=True):
        text = [*job.tokens, *request.tokens]
        law = torch.stack(
            [tables.target[text[i - 2], text[i - 1]].softmax(-1) for i in range(len(job.tokens), len(text))]
        )
        kept = evidence.whole_law(len(request.tokens))
        assert torch.allclose(kept, law.to(kept), atol=1e-5)
        assert not torch.allclose(kept, law.roll(1, 0).to(kept), atol=1e-2)


def test_a_text_whose_p_was_kept_is_not_read_by_the_target(tables, monkeypatch):
    session, readers = session_of(tables), []
    [job] = jobs(1)
    decoded = session.decode([job], True, COLUMNS, laws=True)
    own = LanguageModel.read_text
    monkeypatch.setattr(LanguageModel, "read_text", lambda self, *a: readers.append(self) or own(self, *a))
    new, target, drafter = decoded.requests[0].tokens, session.parts.target, session.parts.drafter
    text = DecodedText(new, [1.0] * len(new), decoded.evidence[0].whole_law(len(new)))
    read_texts(target, drafter, job.tokens, [text])
    assert drafter.model in readers and target not in readers
    read_texts(target, drafter, job.tokens, [text, DecodedText(new[:5], [1.0] * 5)])
    assert target in readers


def test_p_without_room_or_with_a_gap_is_no_whole_law(tables, monkeypatch):
    session, wanted = session_of(tables), jobs(1)
    evidence = session.decode(wanted, True, COLUMNS, laws=True).evidence[0]
    assert evidence.whole_law(20) is not None and evidence.whole_law(21) is None
    del evidence.laws[1]
    assert evidence.whole_law(20) is None
    monkeypatch.setattr(recorder, "LAW_BYTES", 9 * 4 * V)
    assert session.decode(wanted, True, COLUMNS, laws=True).evidence[0].whole_law(20) is None
    greedy = session_of(tables, sampling=Sampling(temperature=0))
    assert not greedy.decode(wanted, True, COLUMNS, laws=True).evidence


@pytest.fixture
def prefilled(monkeypatch):
    """Counts the tokens of prompts that each model reads."""
    found = {}

    def counting(name):
        own = getattr(LanguageModel, name)

        def call(self, *arguments, **named):
            before = list(self.cached)
            result = own(self, *arguments, **named)
            found[self] = found.get(self, 0) + sum(self.cached) - sum(before)
            return result

        monkeypatch.setattr(LanguageModel, name, call)

    counting("read")
    counting("prefill")
    return found


@pytest.mark.parametrize("cache", CACHES)
def test_a_prompt_that_is_in_the_cache_is_not_read_again(cache, tables, prefilled):
    """Tokens are the same; a decode that is measured reads its prompt, and so does one of another prompt."""
    session = session_of(tables, cache)
    target, (one, other, _) = session.parts.target, jobs()
    held = {"static": 11, "paged": 8, "dynamic": 0}[cache]  # of 11; paged has blocks of 4

    def read(wanted, speculative, **named):
        prefilled.clear()
        tokens = session.decode([wanted], speculative, COLUMNS, **named).requests[0].tokens
        return tokens, prefilled.get(target, 0)

    first = {speculative: read(one, speculative) for speculative in (True, False)}
    assert [tokens for _, tokens in first.values()] == [11, 11]
    for speculative in (True, False):
        assert read(one, speculative, again=True) == (first[speculative][0], 11 - held)
    assert read(one, True) == first[True]
    fresh = session_of(tables, cache).decode([other], True, COLUMNS).requests[0].tokens
    assert read(other, True, again=True) == (fresh, 11)
    part = Sequence(other.tokens[:6] + one.tokens[6:], 32, 77)
    fresh = session_of(tables, cache).decode([part], True, COLUMNS).requests[0].tokens
    assert read(part, True, again=True) == (fresh, 11 - {"static": 6, "paged": 4, "dynamic": 0}[cache])


def test_a_cache_that_mistook_another_prompt_for_this_one_would_be_seen(tables, monkeypatch):
    """The negative control of the test before."""
    session, (one, other, _) = session_of(tables), jobs()
    assert one.tokens[-2] != other.tokens[-2]  # the chain looks at two tokens
    right = first_law(session_of(tables), other)
    first_law(session, one)
    assert torch.allclose(first_law(session, other, again=True), right, atol=1e-6)
    first_law(session, one)
    monkeypatch.setattr(StaticCache, "admit", lambda self, row, tokens, columns: len(tokens) - 1)
    assert not torch.allclose(first_law(session, other, again=True), right, atol=1e-2)


def first_law(session, job, **named):
    return session.decode([job], False, COLUMNS, laws=True, **named).evidence[0].whole_law(1)


def test_several_rows_read_their_prompts_again(tables, prefilled):
    """An idle row is written to, so a cache of several rows does not say what it still holds."""
    session, wanted = session_of(tables, rows=2), jobs(2)
    tokens = [r.tokens for r in session.decode(wanted, True, COLUMNS).requests]
    prefilled.clear()
    assert [r.tokens for r in session.decode(wanted, True, COLUMNS, again=True).requests] == tokens
    assert prefilled[session.parts.target] == 22


@pytest.mark.slow
def test_a_run_keeps_p_probes_other_gammas_and_stores_its_phases(tmp_path, monkeypatch):
    """One run with the kept p and one that reads all texts: the same betas."""
    probed, own = [], member.probe_costs
    monkeypatch.setattr(member, "PROBES", 6)
    monkeypatch.setattr(
        member, "probe_costs", lambda *given, place: probed.append(given[3]) or own(*given, place=place)
    )
    words = ("gamma=2", "data.limit=3", "max_new_tokens=12")
    parts = parts_of(*words)
    result, record = run(parts, tmp_path / "kept")
    assert probed == [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1]]  # each time begun one later
    assert set(result.seconds) == {"warm_up", "probes", "plain", "speculative", "betas", "verdict", "logger",
                                   "statistics"}  # fmt: skip
    assert all(seconds >= 0 for seconds in result.seconds.values())
    assert sum(result.seconds.values()) < 1.1 * result.provenance["seconds"]
    monkeypatch.setattr(member, "LAW_BYTES", 0)
    monkeypatch.setattr(recorder, "LAW_BYTES", 0)
    _, reread = run(parts_of(*words), tmp_path / "read")
    for ours, theirs in zip(record.results, reread.results, strict=True):
        assert list(ours.speculative.tokens) == list(theirs.speculative.tokens)
        for name in ("speculative_laws", "baseline_laws"):
            assert np.allclose(columns(getattr(ours, name)), columns(getattr(theirs, name)), atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("overrides", only([(), ("gamma_policy=adaptive", "gamma_policy.largest=3")], [
    (), ("drafter=tree",), ("drafter=prompt_lookup", "batch_size=2"),
    ("gamma_policy=adaptive", "gamma_policy.largest=3"),
]), ids=str)  # fmt: skip
def test_a_warm_up_meets_both_ways_and_every_shape_that_is_fixed(overrides, fixed, monkeypatch, caplog):
    parts = parts_of("gamma=3", *overrides)
    parts.target.executor.fixed_shapes = fixed
    monkeypatch.setattr("specbench.run.warm_up.WIDTHS", 9)
    expected, gammas, plain = {None, 0, *parts.gammas}, [], Session.decode

    def decode(self, jobs, speculative, *others, policy=None, **options):
        gammas.append(policy.largest if speculative else None)
        return plain(self, jobs, speculative, *others, policy=policy, **options)

    monkeypatch.setattr(Session, "decode", decode)
    wanted = next(iter(Requests(parts, parts.spare).groups()))
    warm_up(Session(parts), wanted)
    assert {*gammas} == expected
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("probe", "groups"), [slow_unless(False, 1, 1), (2, 2)])
def test_a_group_that_is_decoded_outlives_an_interrupt_of_its_probes(probe, groups, tmp_path, monkeypatch, caplog):
    probed, own = [], member.probe_costs

    def interrupted(*arguments, **named):
        probed.append(arguments)
        if len(probed) == probe:
            raise KeyboardInterrupt
        own(*arguments, **named)

    monkeypatch.setattr(member, "probe_costs", interrupted)
    result, record = run(parts_of("gamma=2", "data.limit=5", "max_new_tokens=4"), tmp_path)
    assert (result.status, result.counts.prompts, len(record.groups)) == ("interrupted", groups, groups)
    assert all(found.speculative_laws and found.reading for found in record.results)
    assert f"interrupted after {groups} of 5 requests" in caplog.text
    assert len((tmp_path / "prompts.jsonl.part").read_text().splitlines()) == groups
